"""Audit an OpenRLHF run in the same way as `ReferenceAudit` audits a TRL run.

Every process checks its own part of each batch. If one process finds a reason to stop, all processes stop in the same step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from reflogp.store.texts import counted
from reflogp.trainer.audit.forwards import ForwardCount
from reflogp.trainer.audit.metrics import apart, read_report, reported_step_zero, verdict, write_report
from reflogp.trainer.audit.schedule import Schedule
from reflogp.trainer.audit.step_zero import StepZero, compared
from reflogp.trainer.errors import AuditError, ReferenceLogpsError, StepZeroError
from reflogp.trainer.join import JoinRecord
from reflogp.trainer.ranks import Rank, gather

logger = logging.getLogger(__name__)

CHECKS = ("forwards", "metrics", "schedule", "step_zero")
#: Metrics that OpenRLHF logs only for a step's last micro-batch.
_OF_THE_LAST = ("loss", "acc", "chosen_reward", "reject_reward")
#: Dict from each metric that is a mean over all micro-batches of a step to the metric of which it is the mean.
_MEANS = {"loss_mean": "loss", "acc_mean": "acc"}
#: Allowed relative difference between a logged metric and its mean over all processes, to account for rounding to float32.
_ROUNDING = 1e-4


class RunAudit:
    """An audit that checks an OpenRLHF run's stored reference log-probs, and checks that the run follows the trainer's
    settings.

    The audit stops a run if the stored values are wrong, or if an unexpected forward pass runs. Any other problem is logged as
    a warning and written to the report.

    - `forwards` stops the run if the policy runs more than one forward pass per micro-batch, or if another language model runs
      while OpenRLHF gets the log-probs of the policy or of the reference. If the policy runs fewer forward passes than
      expected, the audit only reports this.

    - `step_zero` stops the run before the first step if the policy's log-probs of the first batch differ from the stored
      log-probs by more than rounding errors can explain. If the policy's log-probs are NaN or infinite, the audit reports this
      but does not stop the run.

    - `metrics` reports logged values that are not means over all processes. OpenRLHF takes `loss_mean` and `acc_mean` from the
      first process only. The audit replaces them with means over all processes. For each of the two metrics, the report
      contains the largest relative difference between the first process's value and the mean over all processes.

    - `schedule` reports each training step in which global_step does not increase by exactly one, or in which the optimizer
      does not take exactly one step. It also reports logs, evaluations and checkpoints that are missing although the settings
      require them.

    Args:
        output_dir: folder in which to write reflogp_audit.json.
        joins: dict from the name of each dataset to a record of how its values were looked up. The report contains these
            records.
        on_finding: "fail" stops the run for the reasons given above; "warn" only logs a warning.
        step_zero_tolerance: maximum |policy - reference| for the sum of a completion's log-probs, in nats/√tokens. If None, the
            tolerance depends on the dtypes of policy and reference, and on the type of model. In that case, the run is also
            stopped if the reference log-probs were computed in a different dtype than the one in which the policy computes.

    Attributes:
        step_zero: result of the comparison before the first step, or None if nothing was compared.
        findings: dict from the name of each check that found problems to a list of these problems (at most 20).
    """

    def __init__(
        self, output_dir: Path, joins: dict[str, JoinRecord], on_finding: str, step_zero_tolerance: float | None
    ) -> None:
        self.step_zero: StepZero | None = None
        self.findings: dict[str, list[str]] = {}
        self._folder, self._joins, self._on_finding, self._tolerance = str(output_dir), joins, on_finding, step_zero_tolerance
        self._not_run: dict[str, str] = {}
        self._problems: dict[str, list[str]] = {}
        self._reports: dict[str, list[str]] = {}
        self._stopped = False
        self._schedule: Schedule | None = None
        self._forwards: ForwardCount | None = None
        self._engine: Any = None
        self._engine_steps = 0
        self._micro_batches: list[torch.Tensor] = []
        self._logs_compared = 0
        self._worst_log = 0.0
        self._worst_of_first = dict.fromkeys(_MEANS, 0.0)
        self._passes = 0
        self._finished = False
        self.write()

    # The trainer calls the following methods.

    def begin(self, settings: Any, engine: Any, policy: torch.nn.Module, first_step: int) -> None:
        """Start watching a run.

        Args:
            settings: the trainer's settings, as an object with the attributes that `Schedule` reads.
            engine: the DeepSpeed engine, which counts optimizer steps.
            policy: the policy model, without DeepSpeed's wrapper.
            first_step: global step at which the run was started or resumed.
        """
        self._schedule = Schedule(settings, max_steps=-1, first_step=first_step)
        self._engine, self._engine_steps = engine, int(engine.global_steps)
        self._forwards = ForwardCount(policy)
        self._forwards.watch_others()
        if settings.logging_strategy == "no":
            self._not_run["metrics"] = "OpenRLHF logs only to wandb and TensorBoard, but both are off"

    @contextmanager
    def passes(self, expected: int, who: str) -> Iterator[None]:
        """Check that the policy runs `expected` forward passes within the block, and that no other language model runs.

        Args:
            expected: the number of forward passes that the policy should run.
            who: "policy" or "reference", depending on whose log-probs OpenRLHF gets within the block. Only messages use it.
        """
        assert self._forwards is not None, "passes() was called outside fit()"
        self._forwards.begin()
        yield
        self._forwards.end()
        self._passes += self._forwards.policy
        problems = [
            f"{name} ran {counted(times, 'time')} while OpenRLHF obtained the {who}'s log-probs"
            for name, times in self._forwards.others.items()
        ]
        words = (
            f"forward passes of the policy while OpenRLHF obtained the {who}'s log-probs: {self._forwards.policy}; "
            f"expected: {expected}"
        )
        self._note("forwards", problems + [words] * (self._forwards.policy > expected))
        self._report("forwards", [words] * (self._forwards.policy < expected))

    def saw_first_batch(self, seen: list[float], policy: torch.nn.Module) -> None:
        """Run the `step_zero` check. If it fails, raise StepZeroError on all processes, unless on_finding is "warn".

        Args:
            seen: what `differences` (in audit/step_zero.py) returned for this process's first batch.
            policy: the policy model, without DeepSpeed's wrapper.
        """
        reference = next(iter(self._joins.values())).where.reference_dtype
        self.step_zero = compared(gather(seen), self._tolerance, reference, policy, None)
        if self.step_zero.not_finite:
            sequences = counted(self.step_zero.not_finite, "sequence")
            words = f"the policy's log-probs of {sequences} in the first batch are not finite, so they were not compared"
            self._report("step_zero", [f"{words}; the reference's log-probs are finite"])
        try:
            self.step_zero.require("the first batch")
            if self._tolerance is None:
                self.step_zero.require_one_dtype()
        except StepZeroError as error:
            self._note("step_zero", [str(error)])
            self._settle(error)

    def skip_step_zero(self, why: str) -> None:
        self._not_run["step_zero"] = why

    def saw_loss(self, loss: torch.Tensor, chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor) -> None:
        """Record a training micro-batch's loss and rewards, as DPOLoss returned them."""
        assert self._schedule is not None
        self._schedule.micro_step()
        accuracy = (chosen_rewards > rejected_rewards).float().mean()
        seen = torch.stack([loss.detach(), accuracy, chosen_rewards.mean(), rejected_rewards.mean()])
        self._micro_batches.append(seen.float())

    def over_all_processes(self, logs: dict[str, float]) -> dict[str, float]:
        """Run the `metrics` check on a step's logs. Return the logs with `loss_mean` and `acc_mean` replaced by means over all
        processes."""
        mine = torch.stack(self._micro_batches).double().cpu()
        means = torch.tensor(gather(torch.stack([mine[-1], mine.mean(0)]).tolist()), dtype=torch.float64)
        last, step = means.mean(0)
        expected = dict(zip(_OF_THE_LAST, last.tolist(), strict=True))
        whole = dict(zip(_OF_THE_LAST, step.tolist(), strict=True))
        problems = []
        for name in _OF_THE_LAST:
            off = apart(logs[name], expected[name])
            self._worst_log = max(self._worst_log, off)
            if off > _ROUNDING:
                problems.append(
                    f"{name} is logged as {logs[name]:.6g}, but the mean over all processes is {expected[name]:.6g}"
                )
        self._report("metrics", problems)
        self._logs_compared += 1
        for name, of in _MEANS.items():
            self._worst_of_first[name] = max(self._worst_of_first[name], apart(logs[name], whole[of]))
        return {**logs, **{name: whole[of] for name, of in _MEANS.items()}}

    @contextmanager
    def events(self, trainer: Any, step: int) -> Iterator[None]:
        """Within the block, record whether the trainer logs, evaluates or saves a checkpoint."""
        assert self._schedule is not None
        happened: set[str] = set()

        def noting(event: str, call: Any) -> Any:
            def noted(*args: Any, **kwargs: Any) -> Any:
                if event != "logging" or _is_of_training(args[0]):
                    happened.add(event)
                return call(*args, **kwargs)

            return noted

        watched = [
            (trainer, "evaluate", "eval"),
            (trainer.strategy, "save_ckpt", "save"),
            (trainer.strategy, "save_model", "save"),
        ]
        watched += [(trainer._wandb, "log", "logging")] if trainer._wandb is not None else []
        watched += [(trainer._tensorboard, "add_scalar", "logging")] if trainer._tensorboard is not None else []
        with ExitStack() as patches:
            for owner, name, event in watched:
                patches.enter_context(mock.patch.object(owner, name, noting(event, getattr(owner, name))))
            yield
        for event in sorted(happened):
            self._schedule.came(event, step)

    def step_ended(self, step: int) -> None:
        """Check the optimizer step that has just ended. If any process has a finding that stops the run, raise AuditError on
        all processes."""
        assert self._schedule is not None
        self._micro_batches.clear()
        steps = int(self._engine.global_steps)
        for _ in range(steps - self._engine_steps):
            self._schedule.optimizer_step()
        self._engine_steps = steps
        self._report("schedule", self._schedule.step_ended(step))
        self._settle()

    def end(self) -> None:
        """End the audit of a run that has completed all its steps, and write the final report."""
        assert self._schedule is not None and self._forwards is not None
        self._forwards.remove()
        self._finished = True
        if not self._logs_compared:
            self._not_run.setdefault("metrics", "nothing was logged")
        self._report("schedule", self._schedule.missed())
        self._settle()
        self.write()
        if Rank.here().rank == 0:
            state = "; ".join(f"{check}: {problems[0]}" for check, problems in self.findings.items()) or "no problems found"
            joined = "; ".join(
                f"{name}: {counted(record.rows or 0, 'row')} with values of reference {record.where.reference_id} from "
                f"snapshot {record.where.snapshot} of {record.where.store}"
                for name, record in self._joins.items()
            )
            logger.info("reflogp audit: %s (%s)", state, joined)

    # The following methods collect the findings, stop the run or warn because of them, and write the report.

    def _note(self, check: str, problems: list[str]) -> None:
        """Record problems that stop the run unless on_finding is "warn": wrong stored values, or unexpected forward passes."""
        if problems:
            self._problems.setdefault(check, []).extend(problems)

    def _report(self, check: str, problems: list[str]) -> None:
        """Record problems that do not stop a run."""
        if problems:
            self._reports.setdefault(check, []).extend(problems)

    def _settle(self, error: ReferenceLogpsError | None = None) -> None:
        """Gather the problems that all processes have recorded since the last call of this method, and add them to `findings`.

        If one of these problems stops the run, raise `error` on all processes, or an AuditError if `error` is None. Otherwise,
        log a warning with the problems of those checks that had no problems before.
        """
        gathered = gather((self._problems, self._reports))
        self._problems, self._reports = {}, {}
        found, reported = _merged(part for part, _ in gathered), _merged(part for _, part in gathered)
        new = {check: words for check, words in {**reported, **found}.items() if check not in self.findings}
        for check, words in [*found.items(), *reported.items()]:
            known = self.findings.setdefault(check, [])
            known.extend(problem for problem in words if len(known) < 20)
        self._stopped = bool(found) and self._on_finding == "fail"
        if found or reported:
            self.write()
        if self._stopped:
            raise error or AuditError(_message(found), next(iter(found)))
        if new:
            logger.warning(_message(new))

    def write(self) -> None:
        """Write the report in its current state, on the first process only."""
        if Rank.here().rank == 0:
            write_report(self._folder, self.as_dict(read_report(self._folder)))

    def as_dict(self, earlier: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the report. If a resumed run has not repeated the `step_zero` check, the result in `earlier` is kept.

        Args:
            earlier: the report that is already in the output folder, if any.
        """
        return {
            "verdict": verdict(self.findings, self._stopped, self._finished),
            "findings": self.findings,
            "checks": list(CHECKS),
            "not_run": self._not_run,
            "joins": {name: record.as_dict() for name, record in self._joins.items()},
            "step_zero": reported_step_zero(self.step_zero, self._schedule, earlier),
            "forwards": {"policy_passes": self._passes},
            "metrics": {
                "logs_compared": self._logs_compared,
                "worst_difference": self._worst_log,
                "worst_of_first_process": self._worst_of_first,
            },
            "schedule": self._schedule.as_dict() if self._schedule is not None else None,
        }


class Cadence:
    """OpenRLHF's settings under the names that `Schedule` reads.

    Each property reads the current setting, because OpenRLHF's fit() changes the settings after this object is created:
    fit() replaces an interval of -1 with the number of steps that -1 stands for (infinity for ckpt.save_steps).
    """

    def __init__(self, args: Any, accumulation: int, writes_logs: bool, evaluates: bool, saves: bool) -> None:
        self.gradient_accumulation_steps = accumulation
        self.logging_strategy = "steps" if writes_logs else "no"
        self.eval_strategy = "steps" if evaluates else "no"
        self._args, self._saves = args, saves

    @property
    def logging_steps(self) -> int:
        return int(self._args.logger.logging_steps)

    @property
    def eval_steps(self) -> int:
        return int(self._args.eval.steps)

    @property
    def save_steps(self) -> float:
        return float(self._args.ckpt.save_steps)

    @property
    def save_strategy(self) -> str:
        return "steps" if self._saves and math.isfinite(self.save_steps) else "no"


def _merged(parts: Iterable[dict[str, list[str]]]) -> dict[str, list[str]]:
    """Merge the findings of several processes, and list each problem only once."""
    merged: dict[str, list[str]] = {}
    for problems in parts:
        for check, words in problems.items():
            known = merged.setdefault(check, [])
            known.extend(problem for problem in words if problem not in known)
    return merged


def _message(found: dict[str, list[str]]) -> str:
    return "reference audit, " + "; ".join(f"check `{check}`: {'; '.join(words)}" for check, words in found.items())


def _is_of_training(logged: Any) -> bool:
    """Return True if what is logged (a metric's name for TensorBoard, a dictionary of metrics for wandb) is from a training
    step, not from an evaluation."""
    return any(str(name).startswith("train/") for name in ([logged] if isinstance(logged, str) else logged))
