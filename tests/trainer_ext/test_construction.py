"""A trainer that could not be made leaves its model and tokenizer as they were; a TRL without the hook is named."""

import copy
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from trl import DPOTrainer

import reflogp.trainer.trainers
from reflogp.store import UsageError
from reflogp.trainer import CachedKTOTrainer, CachedReferenceMixin, MissingLogpsError
from reflogp.trainer.trl_versions import refuse_liger_loss
from tests.trainer_ext.conftest import losses

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
WRAPPED = {
    "plain": lambda model: (model, None),
    "LoRA to be": lambda model: (model, LoraConfig(**LORA)),
    "modules_to_save": lambda model: (model, LoraConfig(**LORA, modules_to_save=["norm"])),
    "IA3 to be": lambda model: (
        model,
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "prompt to be": lambda model: (model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
    "PeftModel": lambda model: (get_peft_model(model, LoraConfig(**LORA)), None),
    "two adapters": lambda model: (_with_two_adapters(model), None),
}


def _with_two_adapters(model):
    adapted = get_peft_model(model, LoraConfig(**LORA))
    adapted.add_adapter("other", LoraConfig(**LORA))
    adapted.set_adapter("other")
    return adapted


def described(model) -> dict:
    """What a person could tell of a model: its modules, weights, what of them trains, its hooks and settings."""
    return {
        "modules": {name: type(module).__name__ for name, module in model.named_modules()},
        "parameters": {name: (p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()},
        "own forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "hooks": {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()},
        "dropout": {name: m.p for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout)},
        "adapters": sorted(getattr(model, "peft_config", {})),
        "active": getattr(model, "active_adapters", None) if hasattr(model, "peft_config") else None,
        "config": copy.deepcopy(model.config.to_dict()),
        "generation": copy.deepcopy(model.generation_config.to_dict()),
        "tags": list(getattr(model, "model_tags", None) or []),
    }


def same(left, right) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_failed_construction_leaves_no_trace(kind, policy, config, dataset, tokenizer, source, pair_rows, cached_trainer):
    own = copy.deepcopy(tokenizer)
    own.pad_token = None
    base = policy()
    base.config.attention_dropout = 0.1
    base.model.layers[0].self_attn.extra = torch.nn.Dropout(0.3)  # TRL switches dropout off
    torch.manual_seed(0)
    model, peft_config = WRAPPED[kind](base)
    before, tokens_before = described(model), dict(own.special_tokens_map)
    args = config(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    kept = copy.deepcopy(args.gradient_checkpointing_kwargs)
    missing = Dataset.from_list(pair_rows[200:204])
    for _ in range(2):
        with pytest.raises(MissingLogpsError):
            cached_trainer({"model": model, "train_dataset": missing, "processing_class": own, "peft_config": peft_config})
        after = described(model)
        for name, value in before.items():
            assert same(value, after[name]), name
        assert dict(own.special_tokens_map) == tokens_before
    assert args.gradient_checkpointing_kwargs == kept

    trained = cached_trainer({"model": model, "processing_class": own, "peft_config": peft_config})
    trained.train()
    base = policy()
    torch.manual_seed(0)
    fresh, peft_config = WRAPPED[kind](base)
    expected = cached_trainer({"model": fresh, "peft_config": peft_config})
    expected.train()
    assert losses(trained) == losses(expected)
    assert trained.audit.as_dict()["verdict"] == "passed"


class TestATRLWithoutTheHook:
    def test_dpo(self, cached_trainer, monkeypatch):
        monkeypatch.delattr(DPOTrainer, "_precompute_ref_logps")
        with pytest.raises(
            ImportError, match=r"`_precompute_ref_logps`, which .* lacks; .* tested with TRL 1\.2, 1\.8, 1\.9 and 1\.12"
        ):
            cached_trainer()

    def test_an_old_one_is_told_apart_by_its_version(self, cached_trainer, monkeypatch):
        monkeypatch.delattr(DPOTrainer, "_precompute_ref_logps")
        monkeypatch.setattr("reflogp.trainer.trl_versions.trl_version", lambda: "0.28.0")
        assert "ref_chosen_logps" in cached_trainer().train_dataset.column_names

    @pytest.mark.parametrize(("version", "refused"), [("1.13.0", True), ("1.14.0", False), ("1.16.0", False)])
    def test_one_that_computes_the_reference_inside_of_ligers_loss(self, config, monkeypatch, version, refused):
        monkeypatch.setattr("reflogp.trainer.trl_versions.trl_version", lambda: version)
        said = r"use_liger_kernel=True: TRL 1\.13\.0 computes reference log-probs"
        with pytest.raises(UsageError, match=said) if refused else nullcontext():
            refuse_liger_loss(config(use_liger_kernel=True))
        refuse_liger_loss(config())

    def test_a_trainer_refuses_ligers_loss_before_it_does_anything(self, cached_trainer, monkeypatch):
        monkeypatch.setattr("reflogp.trainer.trl_versions.trl_version", lambda: "1.13.0")
        with pytest.raises(UsageError, match="inside Liger's loss"):
            cached_trainer(use_liger_kernel=True)

    def test_kto(self, monkeypatch):
        monkeypatch.setattr(reflogp.trainer.trainers, "_found", None)
        with pytest.raises(ImportError, match=r"method `_precompute_ref_logps`, which TRL .* lacks; .* tested with TRL"):
            CachedKTOTrainer()

    def test_a_hook_that_is_not_called(self, policy, config, dataset, tokenizer, source):
        class NewTRL(DPOTrainer):
            def __init__(self, model, ref_model, args, *more, **named):
                args.precompute_ref_log_probs = False
                super().__init__(model, ref_model, args, *more, **named)

        class Cached(CachedReferenceMixin, NewTRL):
            pass

        with pytest.raises(ImportError, match="but did not call it"):
            Cached(policy(), args=config(), train_dataset=dataset, processing_class=tokenizer, reference=source)
