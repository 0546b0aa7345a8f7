"""CachedDPOTrainer in real training runs: the same losses as TRL with a reference model, without one; and what stops a run."""

import json
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl import DPOTrainer

from reflogp.store import Store, UsageError
from reflogp.trainer import CachedDPOTrainer, CachedReferenceMixin, MissingLogpsError, Reference, StepZeroError, patch
from reflogp.trainer.errors import ReferenceLogpsError, UnusableLogpsError
from tests.trainer_ext.conftest import apart, columns, damaged_copy, losses, score_missing, score_pairs


@contextmanager
def forward_passes():
    """Every language model whose forward pass begins, by a hook on all modules."""
    ran = []

    def note(module, args):
        if isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None:
            ran.append(module)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    yield ran
    handle.remove()


@pytest.mark.slow
def test_twenty_steps_equal_trls_and_no_reference_model_runs(cached_trainer, trl_trainer):
    settings = {"max_steps": 20, "learning_rate": 5e-5}
    with (
        forward_passes() as ran,
        mock.patch.object(AutoModelForCausalLM, "from_pretrained", wraps=AutoModelForCausalLM.from_pretrained) as load,
    ):
        ours = cached_trainer(**settings)
        ours.train()
    assert load.call_count == 1, "one model is loaded: the policy"
    assert len(ran) == 20 + 1 and len({*map(id, ran)}) == 1, "20 steps and the step-0 gate"
    with forward_passes() as ran:
        trl = trl_trainer(precompute_ref_log_probs=True, **settings)
        trl.train()
    assert len(ran) == 20 + 80 / 4, "what TRL's reference pass costs, to show that the count counts"
    assert apart(ours, trl) <= 1e-5
    assert losses(ours)[-1] != losses(ours)[0]


def test_keep_end_needs_values_of_its_own(cached_trainer, trl_trainer, dataset, tmp_path):
    """Columns that the dataset brings along are replaced."""
    changes = {"max_length": 32, "truncation_mode": "keep_end"}
    with pytest.raises(MissingLogpsError, match="--truncation-mode keep_end"):
        cached_trainer(**changes)
    with pytest.raises(MissingLogpsError) as caught:
        cached_trainer({"reference": tmp_path / "own"}, **changes)
    score_missing(caught.value)
    trl = trl_trainer(precompute_ref_log_probs=True, **changes)
    brought = dataset.add_column("ref_chosen_logps", [-1.0] * 80).add_column("ref_rejected_logps", [-2.0] * 80)
    ours = cached_trainer({"reference": tmp_path / "own", "train_dataset": brought}, **changes)
    assert np.abs(columns(ours.train_dataset) - columns(trl.train_dataset)).max() <= 1e-3


def test_the_policy_may_be_a_path(cached_trainer, reference_folder):
    trainer = cached_trainer({"model": str(reference_folder)}, model_init_kwargs={"dtype": "float32"})
    trainer.train()
    assert trainer.step_zero.max_difference < 1e-2
    with pytest.raises(RuntimeError, match="this run has no reference model"):
        trainer.ref_model(torch.ones(1, 4))


def test_the_record_says_what_was_trained_on(cached_trainer, store, tmp_path):
    args = {"max_length": 512, "remove_unused_columns": True}
    trainer = cached_trainer(**args)
    assert not (tmp_path / "run" / "reflogp.json").exists()
    trainer.train()
    written = json.loads((tmp_path / "run" / "reflogp.json").read_text())
    where = trainer.joins["train"].where
    assert written["joins"]["train"] == {
        "store": str(store),
        "reference_id": where.reference_id,
        "reference_dtype": "float32",
        "snapshot": Store(store)[where.reference_id].snapshot().number,
        "rows": 80,
        "scored": 0,
        "computed": 0,
        "max_length": 512,
        "truncation_mode": "keep_start",
        "ld_alpha": None,
    }
    assert written["step_zero"]["passed"]
    assert written["step_zero"]["max_per_root_token"] <= written["step_zero"]["tolerance"] == 1e-3
    assert {"reflogp", "trl", "torch"} <= set(written["versions"])


def test_a_record_that_cannot_be_written_is_a_warning(cached_trainer, tmp_path):
    trainer = cached_trainer()
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "reflogp.json").mkdir()
    with pytest.warns(UserWarning, match=r"reflogp.json cannot be written: .*; the run goes on"):
        trainer.train()
    assert len(losses(trainer)) == 2


def test_the_gate_stops_a_policy_that_is_not_the_reference(cached_trainer, policy, tmp_path):
    other = policy()
    for parameter in other.parameters():
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    with pytest.raises(StepZeroError, match="policy_starts_at_reference=False"):
        cached_trainer({"model": other}).train()
    assert not json.loads((tmp_path / "run" / "reflogp.json").read_text())["step_zero"]["passed"]
    told = cached_trainer({"model": other, "policy_starts_at_reference": False})
    told.train()
    assert told.step_zero is None and len(losses(told)) == 2


def test_stored_values_that_were_changed_stop_the_run(cached_trainer, store, tmp_path):
    changed = cached_trainer({"reference": damaged_copy(store, tmp_path / "changed", lambda values: values - 0.05)})
    for _ in range(2):  # and again when train() is called again
        with pytest.raises(StepZeroError, match="reflogp verify"):
            changed.train()
    bad = damaged_copy(store, tmp_path / "bad", lambda values: values * np.nan)
    with pytest.raises(UnusableLogpsError, match=r"80 of 80 rows of train .* run `reflogp store verify`"):
        cached_trainer({"reference": bad})


def test_a_collator_that_drops_the_columns_is_named(cached_trainer):
    trainer = cached_trainer()
    whole = trainer.data_collator
    trainer.data_collator = lambda rows: {name: v for name, v in whole(rows).items() if not name.startswith("ref_")}
    with pytest.raises(ReferenceLogpsError, match="the batch has no reference columns, but only input_ids"):
        trainer.train()


class TestMissingRows:
    @pytest.fixture
    def few(self, reference_folder, data_file, tmp_path):
        """A store of its own that has the dataset's 80 pairs."""
        score_pairs(reference_folder, data_file, tmp_path / "few")
        return tmp_path / "few"

    def test_of_all_datasets_come_in_one_error(self, few, cached_trainer, pair_rows):
        sets = {"seen": pair_rows[:2], "train": [pair_rows[2], pair_rows[122]]}
        options = {
            "reference": few,
            "train_dataset": Dataset.from_list(pair_rows[:8] + pair_rows[120:122]),
            "eval_dataset": {name: Dataset.from_list(rows) for name, rows in sets.items()},
        }
        with pytest.raises(MissingLogpsError) as caught:
            cached_trainer(dict(options))
        assert "2 of 10 rows of train (rows 8, 9) and 1 of 2 rows of train (rows 1)" in str(caught.value)
        assert "None of the rows was found" not in str(caught.value)
        score_missing(caught.value)
        assert set(cached_trainer(dict(options)).joins) == {"train", "seen", "eval_train"}

    def test_of_an_evaluation_after_training_began(self, few, cached_trainer, pair_rows):
        trainer = cached_trainer({"reference": few})
        trainer.train()
        new = Dataset.from_list(pair_rows[:1] + pair_rows[120:121])
        with pytest.raises(MissingLogpsError, match=r"1 of 2 rows of eval \(rows 1\)") as caught:
            trainer.evaluate(new)
        score_missing(caught.value)
        assert np.isfinite(trainer.evaluate(new)["eval_loss"])

    def test_none_found_hints_at_the_tokenizer(self, few, cached_trainer, pair_rows):
        with pytest.raises(MissingLogpsError, match=r"None of the rows was found\. .* check that the tokenizer"):
            cached_trainer({"train_dataset": Dataset.from_list(pair_rows[120:123]), "reference": few})

    def test_of_a_store_that_is_not_there_yet(self, cached_trainer, policy, tmp_path):
        """As in a notebook, with the same model after the command has run."""
        options = {"reference": tmp_path / "new", "model": policy("bfloat16")}
        with pytest.raises(MissingLogpsError, match=r"80 of 80 rows .*: there is no store at") as caught:
            cached_trainer(options)
        assert "--dtype bfloat16" in caught.value.command, "the policy's"
        score_missing(caught.value)
        cached_trainer(options).train()

    def test_of_ktos_first_run(self, policy, cached_kto_trainer, reference_folder, data_file, tmp_path):
        score_pairs(reference_folder, data_file, tmp_path / "kto-store")
        with mock.patch("tests.trainer_ext.conftest.score_missing"), pytest.raises(MissingLogpsError) as caught:
            cached_kto_trainer()
        assert "a first run always lacks values for these pairs" in str(caught.value)
        assert "chat template" not in str(caught.value)
        assert cached_kto_trainer().joins["train"].rows


def test_what_contradicts_a_stored_reference_is_refused(cached_trainer, policy, store):
    for options, changes, words in (
        ({"ref_model": policy()}, {}, "remove ref_model"),
        ({}, {"sync_ref_model": True}, "sync_ref_model=True changes the reference"),
        ({"reference": None}, {}, r'pass reference="\./logps"'),
        ({"reference": Reference(store, on_miss="compute"), "policy_starts_at_reference": False}, {}, "on_miss='compute'"),
    ):
        with pytest.raises(UsageError, match=words):
            cached_trainer(options, **changes)
    with pytest.raises(UsageError, match="on_miss='score' needs a running service"):
        Reference(store, on_miss="score")
    with pytest.raises(UsageError, match="use 'error', 'score' or 'compute'"):
        Reference(store, on_miss="guess")
    with pytest.raises(UsageError, match="use 'auto' or one of float32"):
        Reference(store, dtype="fp32")
    nameless = policy()
    nameless.config._name_or_path = ""
    with pytest.raises(UsageError, match="not known which model is the reference"):
        cached_trainer({"model": nameless})


def test_the_users_config_is_left_as_it_was(config, policy, dataset, tokenizer, store):
    args = config()
    CachedDPOTrainer(policy(), args=args, train_dataset=dataset, processing_class=tokenizer, reference=store)
    assert args.precompute_ref_log_probs is False


class OwnTrainer(DPOTrainer):
    """A user's own trainer."""

    steps = 0

    def compute_loss(self, *args, **kwargs):
        self.steps += 1
        return super().compute_loss(*args, **kwargs)


class CachedOwnTrainer(CachedReferenceMixin, OwnTrainer):
    pass


class FromJoinedRows(DPOTrainer):
    """The documented minimum for rows that `reflogp join` wrote."""

    def _precompute_ref_logps(self, dataset, *_):
        return dataset


@pytest.mark.slow
def test_a_users_own_subclass_a_patched_trainer_and_three_lines(
    policy, config, dataset, tokenizer, store, cached_trainer, trl_trainer, reference_folder, data_file, tmp_path, reflogp
):
    usual = cached_trainer()
    own = CachedOwnTrainer(policy(), args=config(), train_dataset=dataset, processing_class=tokenizer, reference=store)
    patched = patch(trl_trainer({"eval_dataset": dataset.select(range(4))}), reference=store)
    assert type(patched).__name__ == "CachedDPOTrainer" and not patched.ref_model
    joined = tmp_path / "joined.parquet"
    arguments = [reference_folder, data_file, "--store", store, "--max-length", "1024", "--output", joined]
    assert reflogp("join", *arguments)[0] == 0
    rows = Dataset.from_parquet(str(joined), cache_dir=str(tmp_path / "joined-cache"))
    args = config(precompute_ref_log_probs=True)
    plain = FromJoinedRows(policy(), args=args, train_dataset=rows, processing_class=tokenizer)
    for trainer in (usual, own, patched, plain):
        trainer.train()
        assert apart(trainer, usual) <= 1e-6
    assert own.steps == 2 and patched.step_zero.passed and set(patched.joins) == {"train", "eval"}


def test_a_patch_that_fails_leaves_the_trainer_as_it_was(trl_trainer, tmp_path):
    trainer = trl_trainer()
    with pytest.raises(MissingLogpsError):
        patch(trainer, reference=tmp_path / "nothing")
    assert type(trainer) is DPOTrainer and trainer.ref_model is not None
    with pytest.raises(UsageError, match="not a DPO or KTO trainer"):
        patch(object(), reference=tmp_path)
