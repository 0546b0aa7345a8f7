"""CachedDPOTrainer in real training runs: the same losses as TRL with a reference pass, without a reference model."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel

from reflogp.store import Store, UsageError
from reflogp.trainer import (
    CachedDPOTrainer,
    MissingLogpsError,
    ReferenceSource,
    StepZeroError,
    UnusableLogpsError,
    join_reference_logps,
)
from tests.trainer_ext.conftest import losses, score_pairs


class LanguageModelsThatRan:
    """Every language model object whose forward pass begins, by a hook on all modules, and how often."""

    def __enter__(self):
        self.passes: dict[int, int] = {}

        def note(module, args):
            if isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None:
                self.passes[id(module)] = self.passes.get(id(module), 0) + 1

        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
        return self

    def __exit__(self, *exc):
        self._handle.remove()


@pytest.mark.slow
def test_twenty_steps_equal_trls_and_no_reference_model_runs(cached_trainer, trl_trainer, monkeypatch):
    built = []
    original = AutoModelForCausalLM.from_pretrained.__func__
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", classmethod(lambda cls, *a, **k: built.append(a) or original(cls, *a, **k))
    )
    settings = {"max_steps": 20, "learning_rate": 5e-5}
    with LanguageModelsThatRan() as ran:
        ours = cached_trainer(**settings)
        ours.train()
    assert len(built) == 1, "one model is loaded: the policy"
    policy = id(ours.accelerator.unwrap_model(ours.model))
    assert set(ran.passes) == {policy}
    assert ran.passes[policy] == 20 + 1 + 2, "20 steps, the step-0 gate, and two batches of the spot check"

    with LanguageModelsThatRan() as ran:
        trl = trl_trainer(**settings)
        trl.train()
    assert sum(ran.passes.values()) == 20 + 80 / 4, "what TRL's reference pass costs, to show that the count counts"
    assert len(losses(ours)) == 20
    assert np.abs(np.array(losses(ours)) - np.array(losses(trl))).max() <= 1e-5
    assert losses(ours)[-1] != losses(ours)[0]


@pytest.mark.slow
def test_joined_columns_equal_trls_precomputed_ones(cached_trainer, trl_trainer):
    for changes in ({}, {"max_length": 150}, {"max_length": 150, "ld_alpha": 0.4}, {"max_length": None, "ld_alpha": 0.4}):
        ours, trl = cached_trainer(**changes).train_dataset, trl_trainer(**changes).train_dataset
        assert len(ours) == len(trl)
        for column in ("ref_chosen_logps", "ref_rejected_logps"):
            assert np.abs(np.array(ours[column]) - np.array(trl[column])).max() <= 1e-3, (changes, column)


def test_the_columns_survive_pruning_into_the_batch(cached_trainer):
    trainer = cached_trainer(remove_unused_columns=True)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["ref_chosen_logps"].shape == batch["ref_rejected_logps"].shape == (4,)
    assert (batch["ref_chosen_logps"] < 0).all()


def test_the_policy_may_be_a_path(cached_trainer, reference_folder):
    trainer = cached_trainer({"model": str(reference_folder)}, model_init_kwargs={"dtype": "float32"})
    trainer.train()
    assert trainer.audit.step_zero.max_difference < 1e-2


@pytest.mark.slow
def test_evaluation_data_is_joined_too_also_after_training(cached_trainer, dataset):
    trainer = cached_trainer({"eval_dataset": dataset.select(range(8))}, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
    assert np.isfinite(trainer.evaluate(dataset.select(range(8, 16)))["eval_loss"])
    assert set(trainer.joins) >= {"train", "eval"}


def test_provenance_is_written_into_the_output_folder(cached_trainer, source, tmp_path):
    trainer = cached_trainer(max_length=512)
    trainer.train()
    written = json.loads((tmp_path / "run" / "reflogp_audit.json").read_text())
    assert written["joins"]["train"] == {
        "store": source.location,
        "reference_id": source.reference_id,
        "reference_dtype": "float32",
        "snapshot": source.open().where.snapshot,
        "rows": 80,
        "coverage": 1.0,
        "scored": 0,
        "computed": 0,
        "brought": [],
        "max_length": 512,
        "truncation_mode": "keep_start",
        "ld_alpha": None,
    }
    assert written["step_zero"]["max_per_root_token"] <= written["step_zero"]["tolerance"] == 1e-3
    assert written["verdict"] == "passed"
    assert written["spot_check"]["by"] == "policy"
    assert len(written["spot_check"]["rows"]) == 8
    assert written["spot_check"]["max_per_root_token"] <= 1e-3


def test_missing_rows_stop_the_run_and_the_command_in_the_error_scores_them(
    cached_trainer, reference_folder, pair_rows, tmp_path, tokenizer, policy, config, data_file
):
    few = tmp_path / "few"
    score_pairs(reference_folder, data_file, few)
    source = ReferenceSource(few, model=str(reference_folder), dtype="float32")
    more = Dataset.from_list(pair_rows[:80] + pair_rows[120:123])
    with pytest.raises(MissingLogpsError) as caught:
        cached_trainer({"train_dataset": more, "reference": source})
    assert caught.value.rows == [80, 81, 82]
    assert "rows 80, 81, 82" in str(caught.value)
    assert "None of the rows was found" not in str(caught.value)
    said = r"None of the rows was found\. .* check that the tokenizer and the chat template"
    with pytest.raises(MissingLogpsError, match=said):
        cached_trainer({"train_dataset": Dataset.from_list(pair_rows[120:123]), "reference": source})
    words = caught.value.command.split()
    assert words[:2] == ["reflogp", "score"]
    score_pairs(reference_folder, words[3], few)
    trainer = cached_trainer({"train_dataset": more, "reference": source})
    assert len(trainer.train_dataset) == 83


def test_a_value_that_is_not_finite_stops_the_run(source, reference_folder, tmp_path, store):
    import pyarrow as pa

    from reflogp.store import sequence_keys
    from reflogp.store.schema import shard_table

    table = Store(tmp_path / "bad").create_table(Store(store).table(source.reference_id).reference)
    prompts, chosen, rejected = [[1], [1]], [[2], [3]], [[4], [5]]
    keys = sequence_keys(prompts * 2, chosen + rejected)
    values = pa.array([[-1.0], [float("nan")], [-1.0], [-1.0]], pa.list_(pa.float32()))
    ones = np.ones(4, np.int32)
    table.replace([], [table.write(shard_table(keys, ones, ones, values, {}))])  # as another writer could; append refuses
    bad = ReferenceSource(tmp_path / "bad", reference_id=source.reference_id)
    rows = Dataset.from_dict({"prompt_ids": prompts, "chosen_ids": chosen, "rejected_ids": rejected})
    with pytest.raises(UnusableLogpsError) as caught:
        join_reference_logps(rows, bad)
    assert caught.value.rows == [1]


def test_the_step_zero_gate_stops_a_policy_that_is_not_the_reference(cached_trainer, policy):
    other = policy()
    for parameter in other.parameters():
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    with pytest.raises(StepZeroError, match="policy_starts_at_reference=False") as caught:
        cached_trainer({"model": other}).train()
    assert "in another dtype, although the store says float32" in str(caught.value)
    told = cached_trainer({"model": other, "policy_starts_at_reference": False})
    told.train()
    assert told.audit.step_zero is None
    assert len(losses(told)) == 2


@pytest.mark.slow
def test_a_reference_of_another_dtype_is_noise_that_has_to_be_asked_for(cached_trainer, policy):
    with pytest.raises(StepZeroError, match="computed in float32, but the policy computes in bfloat16"):
        cached_trainer({"model": policy().to(torch.bfloat16)}).train()
    trainer = cached_trainer({"model": policy().to(torch.bfloat16), "step_zero_tolerance": 0.1})
    trainer.train()
    assert trainer.audit.step_zero.tolerance == 0.1
    assert 1e-4 < trainer.audit.step_zero.max_per_root_token < 0.1


def test_arguments_that_contradict_a_stored_reference_are_refused(cached_trainer, policy, store, reference_folder):
    with pytest.raises(UsageError, match="ref_model"):
        cached_trainer({"ref_model": policy()})
    with pytest.raises(UsageError, match="reference_id"):
        ReferenceSource(store)
    with pytest.raises(UsageError, match="the reference id of"):
        ReferenceSource(store, model=str(reference_folder), dtype="float32", reference_id="00" * 16)


def test_the_users_config_is_left_as_it_was(config, policy, dataset, tokenizer, source):
    args = config()
    CachedDPOTrainer(policy(), args=args, train_dataset=dataset, processing_class=tokenizer, reference=source)
    assert args.precompute_ref_log_probs is False


def test_join_in_a_dataset_for_another_trainer(cached_trainer, source):
    tokenized = cached_trainer().train_dataset.remove_columns(["ref_chosen_logps", "ref_rejected_logps"])
    joined = join_reference_logps(tokenized.shuffle(seed=1), source, max_length=1024)
    expected = cached_trainer().train_dataset.shuffle(seed=1)
    assert joined["ref_chosen_logps"][:] == expected["ref_chosen_logps"][:]
