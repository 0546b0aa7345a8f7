"""The audit finds what it is there to find, in real runs, and nothing in a right one."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import DPOTrainer

from reflogp.store import ReferenceNotFoundError, UsageError
from reflogp.trainer import (
    AuditError,
    CachedDPOTrainer,
    CachedReferenceMixin,
    MissingLogpsError,
    ReferenceAudit,
    ReferenceSource,
    StepZeroError,
)
from reflogp.trainer.audit.metrics import apart, write_report
from reflogp.trainer.audit.schedule import Schedule
from tests.trainer_ext.conftest import damaged_copy, losses, score_pairs
from tests.trainer_ext.distributed_run import launch


class Pruning(DPOTrainer):
    """Loses the columns on the way to the loss, as TRL 0.12 did, and runs the reference again."""

    def _set_signature_columns_if_needed(self):
        self._signature_columns = ["prompt_ids", "chosen_ids", "rejected_ids"]

    def _compute_loss(self, model, inputs, return_outputs):
        if "ref_chosen_logps" not in inputs:
            inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = self.compute_ref_log_probs(model, inputs)
        return super()._compute_loss(model, inputs, return_outputs)


class ScoringAgain(DPOTrainer):
    """Has the columns, and makes a second pass all the same."""

    def _compute_loss(self, model, inputs, return_outputs):
        with torch.no_grad():
            model(inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return super()._compute_loss(model, inputs, return_outputs)


@pytest.fixture
def audited(policy, config, dataset, tokenizer, source):
    """audited(trainer class, trainer options, **config changes)"""

    def make(trainer_class, options=None, **changes):
        mixed = type("Cached", (CachedReferenceMixin, trainer_class), {})
        arguments = {"train_dataset": dataset, "processing_class": tokenizer, "reference": source, **(options or {})}
        return mixed(policy(), args=config(**changes), **arguments)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer_class", "check", "words"),
    [
        (Pruning, "columns", "no reference columns"),
        (ScoringAgain, "forwards", "2 forward passes for one micro-batch"),
    ],
)
def test_a_trainer_that_does_not_use_its_columns(trainer_class, check, words, audited, tmp_path):
    trainer = audited(trainer_class)
    with pytest.raises(AuditError, match=words) as caught:
        trainer.train()
    assert caught.value.check == check
    written = json.loads((tmp_path / "run" / "reflogp_audit.json").read_text())
    assert written["verdict"] == "failed"
    assert words in written["findings"][check][0]

    warned = audited(trainer_class, {"audit": ReferenceAudit(on_finding="warn")})
    warned.train()
    assert len(losses(warned)) == 2
    assert warned.audit.as_dict()["verdict"] == "warned"

    others = tuple(sorted({"columns", "forwards", "step_zero", "metrics", "schedule", "spot_check"} - {check, "forwards"}))
    audited(trainer_class, {"audit": ReferenceAudit(checks=others)}).train()


def test_another_model_that_runs_in_a_training_step(audited, policy):
    reference = policy()

    class Scoring(DPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs):
            with torch.no_grad():
                reference(inputs["input_ids"])
            return super()._compute_loss(model, inputs, return_outputs)

    with pytest.raises(AuditError, match=r"LlamaForCausalLM with [\d,]+ parameters ran 1 time in a training step"):
        audited(Scoring).train()


@pytest.mark.slow
def test_any_trainer_can_be_watched(trl_trainer, tmp_path):
    trainer = trl_trainer()
    audit = ReferenceAudit().attach(trainer)
    trainer.train()
    assert audit.as_dict()["verdict"] == "passed"
    assert audit.as_dict()["not_run"] == {}
    assert audit.as_dict()["metrics"]["logs_compared"] == 2
    hollow = trl_trainer()
    off = [value - 300 for value in hollow.train_dataset["ref_chosen_logps"]]
    hollow.train_dataset = hollow.train_dataset.remove_columns("ref_chosen_logps").add_column("ref_chosen_logps", off)
    ReferenceAudit().attach(hollow)
    with pytest.raises(StepZeroError):
        hollow.train()
    beside = trl_trainer(precompute_ref_log_probs=False)
    ReferenceAudit().attach(beside)
    with pytest.raises(AuditError, match="keeps a reference model"):
        beside.train()
    with pytest.raises(UsageError, match="already attached to a trainer"):
        audit.attach(beside)


def test_an_earlier_verdict_does_not_stand_for_a_run_that_failed(cached_trainer, pair_rows, tmp_path):
    cached_trainer().train()
    file = tmp_path / "run" / "reflogp_audit.json"
    assert json.loads(file.read_text())["verdict"] == "passed"
    with pytest.raises(MissingLogpsError):
        cached_trainer({"train_dataset": Dataset.from_list(pair_rows[200:204])})
    assert json.loads(file.read_text())["verdict"] == "unfinished"


@pytest.mark.parametrize("resumes", [True, False])
def test_only_a_resumed_run_keeps_the_folders_earlier_step_zero(cached_trainer, tmp_path, resumes):
    settings = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    cached_trainer(max_steps=1, **settings).train()
    file = tmp_path / "run" / "reflogp_audit.json"
    compared = json.loads(file.read_text())["step_zero"]
    assert compared["sequences"] > 0
    again = cached_trainer(max_steps=2, **settings)
    again.policy_starts_at_reference = resumes
    again.train(resume_from_checkpoint=resumes)
    reported = json.loads(file.read_text())
    assert reported["verdict"] == "passed"
    assert again.audit.step_zero is None
    assert reported["step_zero"] == (compared if resumes else None)
    assert "step_zero" in reported["not_run"]


def test_arguments_that_are_none(policy, config, dataset):
    with pytest.raises(UsageError, match=r"CachedDPOTrainer needs .*reference=ReferenceSource"):
        CachedDPOTrainer(policy(), None, config(), None, dataset)
    with pytest.raises(UsageError, match="unknown 'colums'"):
        ReferenceAudit(checks=("colums",))


def test_an_audit_can_be_off(cached_trainer):
    trainer = cached_trainer({"audit": False})
    trainer.train()
    assert trainer.audit is None


class TestWrongStores:
    """Each is caught before a step is made."""

    def test_other_weights(self, cached_trainer, policy, store, source):
        other = policy()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        with pytest.raises(StepZeroError, match="weights other than"):
            cached_trainer({"model": other}).train()

    def test_another_template(self, cached_trainer, tokenizer, dataset):
        template = tokenizer.chat_template
        try:
            tokenizer.chat_template = template.replace("user", "human") if "user" in template else "x" + template
            with pytest.raises(MissingLogpsError):
                cached_trainer()
        finally:
            tokenizer.chat_template = template

    def test_another_dtype(self, cached_trainer, store, reference_folder):
        with pytest.raises(ReferenceNotFoundError):
            cached_trainer({"reference": ReferenceSource(store, model=str(reference_folder), dtype="bfloat16")})

    def test_values_of_another_dtype_under_this_one(self, cached_trainer, store, source, tmp_path):
        """As a store of bfloat16 values that says float32: 8 bits of mantissa on each token."""
        bad = damaged_copy(store, tmp_path / "bad", lambda v: torch.tensor(v).to(torch.bfloat16).float().numpy())
        with pytest.raises(StepZeroError, match="in another dtype, although the store says float32"):
            cached_trainer({"reference": ReferenceSource(bad, reference_id=source.reference_id)}).train()

    def test_shuffled_values(self, cached_trainer, store, source, tmp_path):
        """Each sequence's values in another order leave its sum right; other sequences' values do not."""
        generator, kept = np.random.default_rng(0), []

        def another(values):
            kept.append(values)
            other = kept[generator.integers(len(kept))]
            return np.resize(other, len(values)).astype(np.float32)

        bad = damaged_copy(store, tmp_path / "bad", another)
        with pytest.raises(StepZeroError):
            cached_trainer({"reference": ReferenceSource(bad, reference_id=source.reference_id)}).train()

    def test_rows_that_the_first_batch_has_not(self, cached_trainer, store, source, tmp_path):
        """The gate sees the first batch; the spot check any rows."""
        seen = iter(range(10_000))
        bad = damaged_copy(store, tmp_path / "bad", lambda v: v - 0.05 * (next(seen) % 2))
        audit = ReferenceAudit(checks=("spot_check",), spot_rows=16)
        with pytest.raises(StepZeroError, match=r"the policy's log-probs of rows \d"):
            cached_trainer({"reference": ReferenceSource(bad, reference_id=source.reference_id), "audit": audit}).train()

    @pytest.mark.slow
    def test_a_right_one_is_not_refused(self, cached_trainer, policy, reference_folder, data_file, tmp_path):
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            score_pairs(reference_folder, data_file, tmp_path / "store", dtype=name)
            source = ReferenceSource(tmp_path / "store", model=str(reference_folder), dtype=name)
            for seed in range(2):
                trainer = cached_trainer({"reference": source, "model": policy().to(dtype)}, seed=seed, max_steps=1)
                trainer.train()
                assert trainer.audit.as_dict()["verdict"] == "passed"


def arguments(**changes):
    """What a schedule reads of TrainingArguments."""
    settings = {"gradient_accumulation_steps": 1, "logging_strategy": "steps", "logging_steps": 10, "logging_first_step": False}
    settings |= {"eval_strategy": "no", "eval_steps": None, "eval_delay": 0, "save_strategy": "steps", "save_steps": 500}
    return SimpleNamespace(**{**settings, **changes})


def run(schedule, steps, micro=1):
    problems = []
    for step in range(schedule.global_step + 1, schedule.global_step + 1 + steps):
        for _ in range(micro):
            schedule.micro_step()
        schedule.optimizer_step()
        problems += schedule.step_ended(step)
    return problems


class TestSchedule:
    def test_logs_32_times_too_rare(self):
        """OpenRLHF 0.4.0: logged at optimizer steps that are multiples of the micro-batches in one as well."""
        schedule = Schedule(arguments(gradient_accumulation_steps=32), 300, 0)
        assert not run(schedule, 320, micro=32)
        schedule.came("logging", 320)
        [problem] = schedule.missed()
        assert "no logging at step 10, 20, 30" in problem

    def test_a_checkpoint_every_two_steps(self):
        """TRL RLOO before 0.13: global_step was counted twice, and saves came at random."""
        schedule = Schedule(arguments(), 1000, 0)
        schedule.micro_step()
        schedule.optimizer_step()
        assert schedule.step_ended(2) == ["global_step went from 0 to 2 in one step"]
        for step in range(4, 502, 2):
            schedule.came("save", step - 1)
            schedule.step_ended(step)
        assert "no save at step 500: this run has save_strategy='steps', save_steps=500" in schedule.missed()[1]

    def test_steps_of_the_optimizer_that_nobody_counts(self):
        schedule = Schedule(arguments(), 100, 0)
        schedule.micro_step()
        schedule.optimizer_step()
        schedule.optimizer_step()
        assert "the optimizer took 2 steps" in schedule.step_ended(1)[0]

    def test_more_micro_batches_than_the_settings_say(self):
        assert (
            "5 micro-batches went into step 1" in run(Schedule(arguments(gradient_accumulation_steps=4), 9, 0), 1, micro=5)[0]
        )

    def test_what_settings_allow(self):
        schedule = Schedule(arguments(logging_steps=0.25, logging_first_step=True, eval_strategy="epoch"), 8, 0)
        assert not run(schedule, 7, micro=1)
        for event, step in (("logging", 1), ("logging", 6), ("eval", 7), ("eval", 5), ("save", 3)):
            schedule.came(event, step)
        [problem] = schedule.missed()
        assert "no logging at step 2, 4" in problem

    def test_a_resumed_run_keeps_its_checkpoints_steps(self):
        """transformers loads them with the trainer's state, whatever the settings say now."""
        schedule = Schedule(arguments(logging_steps=1, save_steps=2), 9, 0, {"logging": 3, "save": 500})
        assert not run(schedule, 4)
        schedule.came("logging", 3)
        assert not schedule.missed()

    @pytest.mark.slow
    def test_a_real_run_with_everything(self, cached_trainer, dataset):
        events = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2}
        trainer = cached_trainer(
            {"eval_dataset": dataset.select(range(4))},
            max_steps=7,
            gradient_accumulation_steps=2,
            logging_first_step=True,
            **events,
        )
        trainer.train()
        assert trainer.audit.as_dict()["schedule"] == {
            "first_step": 0,
            "global_step": 7,
            "optimizer_steps": 7,
            "micro_steps": 14,
            "logs": 4,
            "evaluations": 4,
            "saves": 3,
        }


@pytest.mark.slow
def test_metrics_of_one_process_shown_as_everybodys(reference_folder, data_file, store, tmp_path):
    """TRL before 0.14: each process logged its own rewards, and the first one's were shown. Told, and the run goes on."""
    settings = {"model": str(reference_folder), "data": str(data_file), "source": str(store), "rank_local_metrics": True}
    _, ranks, printed = launch(settings, tmp_path)
    assert all(len(seen["logs"]) == 3 for seen in ranks)
    assert all("on this process but" in seen["audit"]["findings"]["metrics"][0] for seen in ranks)
    assert "on this process but" in printed
    assert json.loads((tmp_path / "run" / "reflogp_audit.json").read_text())["verdict"] == "warned"


def test_an_audit_without_a_tolerance_has_the_trainers(cached_trainer):
    for audit, tolerance in ((ReferenceAudit(), 7.0), (ReferenceAudit(step_zero_tolerance=0.5), 0.5)):
        trainer = cached_trainer({"step_zero_tolerance": 7.0, "audit": audit}, max_steps=1)
        trainer.train()
        assert trainer.audit.step_zero.tolerance == tolerance


def test_equal_metrics_never_disagree_and_the_report_is_json_even_with_infinite_numbers(tmp_path):
    for value in (0.5, math.inf, -math.inf, math.nan):
        assert apart(value, value) == 0
    assert apart(math.inf, 1.0) == apart(math.nan, 1.0) == math.inf
    file = write_report(str(tmp_path), {"metrics": {"worst_difference": math.inf}, "sums": [math.nan, (-math.inf, 2.5)]})
    written = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert written["metrics"] == {"worst_difference": "inf"} and written["sums"] == ["nan", ["-inf", 2.5]]
