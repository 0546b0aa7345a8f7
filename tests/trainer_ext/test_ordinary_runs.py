"""Whatever TRL completes, ours completes with the same losses: adapters, resuming, evaluation, memory, the loop."""

from itertools import zip_longest

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import set_seed

from tests.trainer_ext.conftest import apart

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
pytestmark = pytest.mark.slow


def both(cached_trainer, trl_trainer, options=dict, train=lambda trainer: trainer.train(), **changes):
    """Train with TRL's reference model, and without; return ours."""
    made = []
    for make in (trl_trainer, cached_trainer):
        trainer = make(options(), **{"max_length": 130, "max_steps": 3, **changes})
        set_seed(7)  # loading a reference model draws random numbers
        train(trainer)
        made.append(trainer)
    trl, ours = made
    assert apart(ours, trl) <= 1e-5
    for mine, theirs in zip_longest(ours.state.log_history, trl.state.log_history):
        names = {name for name in mine if not name.endswith("_model_preparation_time")}  # where no reference was prepared
        assert names == theirs.keys() and mine["step"] == theirs["step"]
        if "eval_loss" in mine:
            assert abs(mine["eval_loss"] - theirs["eval_loss"]) <= 1e-5
    return ours


@pytest.mark.parametrize(
    "peft_config",
    [
        LoraConfig(**LORA, use_rslora=True, use_dora=True),
        LoraConfig(**LORA, modules_to_save=["embed_tokens"]),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
    ids=["dora", "modules_to_save", "prompt"],
)
def test_adapters(peft_config, cached_trainer, trl_trainer, dataset):
    ours = both(cached_trainer, trl_trainer, lambda: {"peft_config": peft_config}, learning_rate=1e-3)
    assert ours.step_zero.passed
    ours.evaluate(dataset.select(range(4)))


def test_a_model_that_has_an_adapter_already(cached_trainer, trl_trainer, policy):
    def options():
        torch.manual_seed(0)
        return {"model": get_peft_model(policy(), LoraConfig(**LORA))}

    assert both(cached_trainer, trl_trainer, options).step_zero.passed


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"dataloader_drop_last": False, "per_device_train_batch_size": 7, "num_train_epochs": 1, "max_steps": -1},
        {"pad_to_multiple_of": 8, "padding_free": True, "dataloader_num_workers": 1},
        {"train_sampling_strategy": "group_by_length", "length_column_name": "tokens", "remove_unused_columns": False},
        {"torch_compile": True, "torch_compile_backend": "eager", "gradient_checkpointing": False, "max_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "disable_dropout": False},
    ],
    ids=str,
)
def test_settings_of_the_loop(changes, cached_trainer, trl_trainer, dataset):
    rows = dataset.map(lambda row: {"tokens": len(str(row["chosen"]))})
    options = {"train_dataset": rows, **({"eval_dataset": rows.select(range(6))} if "eval_steps" in changes else {})}
    assert both(cached_trainer, trl_trainer, lambda: dict(options), **changes).step_zero.passed


def test_training_twice_and_evaluating_anywhere(cached_trainer, trl_trainer, dataset):
    sets = {"first": dataset.select(range(8)), "second": dataset.select(range(8, 16))}

    def train(trainer):
        trainer.evaluate()
        trainer.train()
        trainer.evaluate({"new": dataset.select(range(16, 20)), "newer": dataset.select(range(20, 28))})
        trainer.train()

    ours = both(cached_trainer, trl_trainer, lambda: {"eval_dataset": sets}, train, eval_strategy="steps", eval_steps=1)
    assert {"train", "first", "second", "new", "newer"} == set(ours.joins)


def test_a_resumed_run_goes_on_as_one_that_was_not_interrupted(cached_trainer, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "resumed")}
    constant = {"lr_scheduler_type": "constant", "max_steps": 4}
    cached_trainer(**settings, **{**constant, "max_steps": 2}).train()
    resumed, whole = cached_trainer(**settings, **constant), cached_trainer(**constant)
    resumed.train(resume_from_checkpoint=True)
    whole.train()
    assert apart(resumed, whole) <= 1e-5
    assert resumed.step_zero is None
    assert "resumed at step 2" in (tmp_path / "resumed" / "reflogp.json").read_text()


def test_a_batch_that_does_not_fit_is_halved(cached_trainer):
    """As accelerate's `find_executable_batch_size` does after an out-of-memory: in the gate, and in a later step."""
    for fails_at in (1, 3):
        trainer = cached_trainer(auto_find_batch_size=True, max_steps=3)
        passes = []

        def run_out(module, args, passes=passes, fails_at=fails_at):
            passes.append(1)
            if len(passes) == fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        trainer.model.get_decoder().register_forward_pre_hook(run_out)
        trainer.train()
        assert trainer.state.global_step == 3 and trainer.step_zero.passed
