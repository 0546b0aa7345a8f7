"""RunAudit on runs that do what they should not: each of OpenRLHF's old failures, played by hand, is found."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.store.windows import TrainerSettings
from reflogp.trainer import AuditError, JoinRecord, StepZeroError
from reflogp.trainer.openrlhf.audit import Cadence, RunAudit
from reflogp.trainer.values import Where

ACCUMULATION = 4


class Run:
    """The calls that CachedReferenceDPOTrainer makes, step by step, with whatever a test gets wrong.

    Args:
        logs_at, evaluates_at, saves_at: whether that happens at a step.
    """

    def __init__(
        self, folder, model, logs_at=lambda step: True, evaluates_at=lambda step: step % 3 == 0, saves_at=lambda step: False
    ):
        join = JoinRecord(Where("store", "id", "float32", 1), TrainerSettings(), rows=1)
        self.audit = RunAudit(folder, {"train": join}, "fail", None)
        self.engine = SimpleNamespace(global_steps=0)
        self.happens = {"log": logs_at, "evaluate": evaluates_at, "save": saves_at}
        args = SimpleNamespace(
            logger=SimpleNamespace(logging_steps=1),
            eval=SimpleNamespace(steps=3),
            ckpt=SimpleNamespace(save_steps=float("inf")),
        )
        self.trainer = SimpleNamespace(
            evaluate=lambda: None,
            strategy=SimpleNamespace(save_ckpt=lambda: None, save_model=lambda: None),
            _wandb=None,
            _tensorboard=SimpleNamespace(add_scalar=lambda name, value, step: None),
        )
        self.audit.begin(Cadence(args, ACCUMULATION, True, True, True), self.engine, model, first_step=0)

    def step(self, number, engine_steps=1, micro_batches=ACCUMULATION, **logged):
        for _ in range(micro_batches):
            self.audit.saw_loss(torch.tensor(0.5), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        self.engine.global_steps += engine_steps
        logs = {"loss": 0.5, "acc": 0.5, "chosen_reward": 0.5, "reject_reward": 0.5, "loss_mean": 0.25, "acc_mean": 1.0}
        logs = self.audit.over_all_processes({**logs, **logged})
        with self.audit.events(self.trainer, number):
            if self.happens["log"](number):
                self.trainer._tensorboard.add_scalar("train/loss", 0.5, number)
            if self.happens["evaluate"](number):
                self.trainer.evaluate()
                self.trainer._tensorboard.add_scalar("eval/eval_loss", 0.5, number)
            if self.happens["save"](number):
                self.trainer.strategy.save_ckpt()
        self.audit.step_ended(number)
        return logs


@pytest.fixture(scope="module")
def model(reference_folder):
    return AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)


@pytest.fixture
def run(model, tmp_path):
    return lambda **what: Run(tmp_path, model, **what)


def verdict(folder):
    return json.loads((folder / "reflogp_audit.json").read_text())["verdict"]


def test_a_run_that_does_as_it_should(run, tmp_path):
    good = run()
    assert verdict(tmp_path) == "unfinished"
    for number in range(1, 7):
        logs = good.step(number)
        assert (logs["loss_mean"], logs["acc_mean"]) == (0.5, 0.5), "the first process' own means are replaced"
    good.audit.end()
    assert verdict(tmp_path) == "passed"
    assert good.audit.as_dict()["metrics"]["worst_of_first_process"] == {"loss_mean": 0.25, "acc_mean": 0.5}


def test_logs_that_are_too_rare(run, tmp_path, caplog):
    """OpenRLHF 0.4.0: optimizer steps were counted, and logged where micro-batches would have been."""
    rare = run(logs_at=lambda step: step % ACCUMULATION == 0)
    for number in range(1, 9):
        rare.step(number)
    rare.audit.end()
    [words] = rare.audit.findings["schedule"]
    assert "no logging at step 1, 2, 3, 5, 6, …: this run has logging_strategy='steps', logging_steps=1" in words
    assert "no logging at step 1, 2" in caplog.text
    assert verdict(tmp_path) == "warned"


@pytest.mark.parametrize("event", ["evaluates_at", "saves_at"])
def test_events_at_a_step_that_nobody_asked_for_are_fine(event, run, tmp_path):
    extra = run(**{event: lambda step: step in (2, 3)})
    for number in range(1, 4):
        extra.step(number)
    extra.audit.end()
    assert verdict(tmp_path) == "passed"


@pytest.mark.parametrize(
    ("number", "what", "words"),
    [
        (2, {}, "global_step went from 0 to 2"),
        (1, {"engine_steps": 0}, "the optimizer took 0 steps"),
        (1, {"micro_batches": 5}, "5 micro-batches went into step 1"),
    ],
)
def test_steps_that_are_no_optimizer_steps(number, what, words, run, tmp_path, caplog):
    wrong = run()
    wrong.step(number, **what)
    assert words in wrong.audit.findings["schedule"][0]
    assert words in caplog.text
    assert verdict(tmp_path) == "warned"


def test_a_metric_that_is_not_the_mean(run, caplog):
    wrong = run()
    wrong.step(1, chosen_reward=0.7)
    words = "chosen_reward is logged as 0.7, but the mean over all processes is 0.5"
    assert wrong.audit.findings["metrics"] == [words]
    assert words in caplog.text


def test_a_model_that_runs_in_the_references_part(run, model, reference_folder):
    other = AutoModelForCausalLM.from_pretrained(reference_folder)
    watched, ids = run(), torch.tensor([[5, 6, 7]])
    with watched.audit.passes(1, "policy"):
        model(ids)
    with watched.audit.passes(0, "reference"):
        other(ids)
    with pytest.raises(AuditError, match=r"LlamaForCausalLM with .* ran 1 time while OpenRLHF obtained the reference's"):
        watched.step(1)
    watched = run()
    with watched.audit.passes(0, "reference"):
        model(ids)
    said = "forward passes of the policy while OpenRLHF obtained the reference's log-probs: 1; expected: 0"
    with pytest.raises(AuditError, match=said):
        watched.step(1)


def test_a_first_batch_that_differs(run, model, tmp_path):
    audit = run().audit
    audit.saw_first_batch([4, 1e-4, 1e-5, 0.0, 0], model)
    with pytest.raises(StepZeroError, match=r"differ from this run's reference log-probs by up to 0\.5 nats"):
        audit.saw_first_batch([4, 0.5, 0.1, -1.2, 0], model)
    assert verdict(tmp_path) == "failed"


def test_a_policy_that_is_not_finite_is_not_the_references_fault(run, model, tmp_path):
    audit = run().audit
    audit.saw_first_batch([3, 1e-4, 1e-5, 0.0, 1], model)
    audit.step_ended(1)
    assert "the policy's log-probs of 1 sequence" in audit.findings["step_zero"][0]
    assert verdict(tmp_path) == "warned"
