"""Define ReferenceAudit, a TrainerCallback that checks a training run's reference log-probs.

All checks except `columns` are implemented in the other modules of this package. This module runs the checks and decides
whether a finding stops the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from typing import Any, Literal, get_args

import torch
from transformers import TrainerCallback

from reflogp.store import UsageError
from reflogp.store.texts import counted, short_repr
from reflogp.trainer.audit.forwards import ForwardCount
from reflogp.trainer.audit.metrics import GlobalMeans, read_report, reported_step_zero, verdict, write_report
from reflogp.trainer.audit.schedule import Schedule
from reflogp.trainer.audit.spot_check import SpotCheck, spot_check, sums_of_batch
from reflogp.trainer.audit.step_zero import StepZero, compared, differences
from reflogp.trainer.construction import NoReferenceModel, ReferenceDuringTraining
from reflogp.trainer.errors import AuditError, ReferenceLogpsError, StepZeroError
from reflogp.trainer.layouts import reference_columns
from reflogp.trainer.own_model import computes_references, no_own_reference
from reflogp.trainer.policy_weights import weights_of
from reflogp.trainer.ranks import gather, on_all_ranks
from reflogp.trainer.source import ReferenceSource

logger = logging.getLogger(__name__)

Check = Literal["columns", "forwards", "step_zero", "metrics", "schedule", "spot_check"]
CHECKS: tuple[Check, ...] = get_args(Check)
#: Maximum number of problems per check in the report.
_MOST_PROBLEMS = 20
#: Maximum number of problems in the audit's repr.
_SHOWN_PROBLEMS = 5


class ReferenceAudit(TrainerCallback):
    """A callback that checks a training run's reference log-probs, and checks that the run follows the trainer's settings.

    The audit stops a run only if the reference values are wrong or missing in a batch, or if the trainer keeps or runs a
    reference model. Any other problem is logged as a warning and recorded in reflogp_audit.json, and the run continues.

    - `columns` stops the run if the reference columns are missing from any process's collated batch, or contain NaN or infinite
      values.

    - `forwards` stops the run if the trainer keeps a reference model, or if a language model other than the policy and the
      reward models runs in a training step. The policy is expected to run one forward pass per micro-batch, or two if the
      batch has sequences for KTO's KL term. Additional passes of the policy stop the run if they run without gradients;
      otherwise, they are only reported. In trainers that generate text, the policy's passes are not checked.

    - `step_zero` stops the run before the first step if the policy's log-probs of the first batch differ from the joined
      log-probs by more than rounding errors can explain. If the policy's log-probs are NaN or infinite, the audit reports this
      but does not stop the run. The check is skipped if the policy does not start from the reference's weights, or if the
      policy's weights have changed since the trainer was created.

    - `metrics` reports logged metrics that are not means over all processes.

    - `schedule` reports a training step if it does not increase global_step by exactly one, if it does not contain exactly one
      optimizer step, or if it uses more micro-batches than gradient_accumulation_steps. The check also reports logs,
      evaluations and saves that are missing although the settings require them. Additional ones are allowed.

    - `spot_check` scores some random rows again when training begins, and stops the run if the results differ from the joined
      values by more than rounding errors can explain. The rows are scored by a service, by the policy with its adapter off, or
      by a policy that still has the reference's weights.

    The checks `columns` and `spot_check` do not run for trainers that do not read reference columns: the online trainers (such
    as RemoteRLOOTrainer) and the trainers for LLaMA-Factory and ms-swift.

    The audit writes its results to `output_dir/reflogp_audit.json`. For each dataset, the file also names the store, reference
    and snapshot that the joined values came from, and gives the fraction of the rows that have values.

    Args:
        on_finding: "fail" raises AuditError to stop the run; "warn" logs a warning instead.
        checks: names of the checks to run; all checks by default.
        step_zero_tolerance: maximum |policy - reference| for the sum of a completion's log-probs, in nats/√tokens. If None, the
            tolerance depends on the dtypes in which the policy and the reference compute, and is larger for mixtures of
            experts. With None, the run is also stopped if the two dtypes differ.
        spot_rows: maximum number of rows that `spot_check` scores again.

    Attributes:
        step_zero: result of the check `step_zero`, or None if this check has not run.
        findings: dict from the name of each check that found problems to the list of these problems.

    Examples:
        >>> from reflogp.trainer import ReferenceAudit
        >>> audit = ReferenceAudit(on_finding="warn", spot_rows=4)  # for audit=, or attach(trainer) for another trainer
        >>> audit
        ReferenceAudit(unfinished)
    """

    def __init__(
        self,
        on_finding: Literal["fail", "warn"] = "fail",
        checks: tuple[Check, ...] = CHECKS,
        step_zero_tolerance: float | None = None,
        spot_rows: int = 8,
    ) -> None:
        if on_finding not in ("fail", "warn"):
            raise UsageError(f"on_finding={on_finding!r}: use 'fail' or 'warn'")
        unknown = sorted(set(checks) - set(CHECKS))
        if unknown:
            raise UsageError(f"checks: unknown {', '.join(map(repr, unknown))}; choose from {', '.join(map(repr, CHECKS))}")
        self.on_finding = on_finding
        self.checks = frozenset(checks)
        self.step_zero: StepZero | None = None
        self.findings: dict[str, list[str]] = {}
        self._tolerance = step_zero_tolerance
        self._spot_rows = spot_rows
        self._trainer: Any = None
        self._spot: tuple[SpotCheck, StepZero | None] | None = None
        self._forwards: ForwardCount | None = None
        self._schedule: Schedule | None = None
        self._metrics = GlobalMeans()
        self._batches = 0
        self._passes = 0
        self._not_finite: torch.Tensor | None = None
        self._training = False
        self._finished = False
        self._stopped = False
        self._at_reference = False
        self._not_run: dict[str, str] = {}

    def __repr__(self) -> str:
        state = verdict(self.findings, self._stopped, self._finished)
        problems = (f"{check}: {problem}" for check, found in self.findings.items() for problem in found)
        step_zero = "" if self.step_zero is None else repr(self.step_zero)
        return short_repr("ReferenceAudit", state, step_zero, *islice(problems, _SHOWN_PROBLEMS))

    def attach(self, trainer: Any) -> ReferenceAudit:
        """Audit a trainer's runs: add this callback to the trainer, and wrap its `training_step`.

        The audit expects a TRL trainer's policy to start from the reference's weights. If the policy starts from different
        weights, set `trainer.policy_starts_at_reference = False`.
        """
        if self._trainer is not None:
            raise UsageError("this audit is already attached to a trainer; create a separate ReferenceAudit for each trainer")
        self._trainer = trainer
        if self.checks & {"step_zero", "spot_check"}:
            # Record the weights before adding this callback: `weights_of` adds a callback whose on_train_begin must run before
            # this callback's. For a trainer without reference columns, the policy is compared with its adapters on, so changes
            # of the adapters count too.
            weights_of(trainer, with_adapters=self._given is not None)
        trainer.add_callback(self)
        step = trainer.training_step

        def training_step(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            if not self._training:  # called by the user's own training loop
                return step(model, inputs, *args, **kwargs)
            self._before_step(model, inputs)
            try:
                return step(model, inputs, *args, **kwargs)
            finally:
                self._after_step(inputs)

        trainer.training_step = training_step
        self.write()
        return self

    # Training events.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training, self._finished = True, False
        every = {event: getattr(state, f"{event}_steps", None) for event in ("logging", "eval", "save")}
        self._schedule = Schedule(args, state.max_steps, state.global_step, {k: v for k, v in every.items() if v is not None})
        self._batches = self._passes = 0
        self._not_finite = None
        self._not_run.clear()
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if self._forwards is not None:
            self._forwards.remove()  # an earlier, interrupted train() left its hooks behind
        if "forwards" in self.checks:
            self._forwards = ForwardCount(policy, self._reward_models)
            self._forwards.watch_others()
            kept = getattr(self._trainer, "ref_model", None)
            if kept is not None and not isinstance(kept, NoReferenceModel):
                self._found("forwards", [f"the trainer keeps a reference model ({type(kept).__name__})"])
        # Compare the weights before any forward pass: a forward pass leaves FSDP's outermost weights unsharded, and weights
        # that are no longer sharded in the same way count as changed.
        if "step_zero" in self.checks and self.step_zero is None:
            self._at_reference = not self._not_at_reference
        if self._given is not None:
            for check in self.checks & {"columns", "spot_check"}:
                self._not_run[check] = "this trainer's reference values do not come from columns of its datasets"
        elif "spot_check" in self.checks:
            if computes_references(self._trainer):
                self._check_spots(policy)
            else:
                self._not_run["spot_check"] = "this trainer has no method for computing reference log-probs"
        self.write()

    def _before_step(self, model: Any, inputs: dict[str, Any]) -> None:
        assert self._schedule is not None
        self._schedule.micro_step()
        self._batches += 1
        if self._given is None:
            self._see_columns(model, inputs)
        if self._forwards is not None:
            self._forwards.begin()

    def _see_columns(self, model: Any, inputs: dict[str, Any]) -> None:
        first = self._batches == 1
        if "columns" in self.checks:
            self._check_columns(inputs, everywhere=first)
        if first and self.wants_first_batch and reference_columns(inputs):
            batch = self._trainer._prepare_inputs(inputs)
            self.check_first_batch(lambda: differences(*sums_of_batch(self._trainer, model, batch)))

    def _after_step(self, inputs: dict[str, Any]) -> None:
        if self._forwards is None:
            return
        self._forwards.end()
        self._passes += self._forwards.policy
        problems = [f"{name} ran {counted(times, 'time')} in a training step" for name, times in self._forwards.others.items()]
        if self._given is not None and self._given.of_generated_text:  # generation needs forward passes too
            self._found("forwards", problems)
            return
        kl_passes = int(any(name.lower().startswith("kl_") for name in inputs))  # TRL computes KTO's KL term without gradients
        words = (
            f"the policy ran {self._forwards.policy} forward passes for one micro-batch ({self._forwards.policy_without_grad} "
            f"without gradients); expected {1 + kl_passes} ({kl_passes} without gradients)"
        )
        as_a_reference = self._forwards.policy_without_grad > kl_passes
        self._found("forwards", problems + [words] * as_a_reference)
        if self._forwards.policy > 1 + kl_passes and not as_a_reference:
            self._report("forwards", [words])
        if not self._forwards.policy:
            self._not_run["forwards"] = (
                "the policy's forward passes cannot be counted: its `forward` is compiled or does not call its decoder"
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._schedule is not None:
            self._schedule.optimizer_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._schedule is not None:
            self._report("schedule", self._schedule.step_ended(state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not self._training or not logs or self._schedule is None:
            return
        if "train_loss" not in logs and not all(name == "epoch" or name.startswith("eval_") for name in logs):
            self._schedule.came("logging", state.global_step)
        if "loss" not in logs:  # logged by an evaluation or a callback, perhaps on only one process
            return
        if "columns" in self.checks and self._not_finite is not None and bool(self._not_finite):
            self._found("columns", ["a reference column has values that are not finite"])
        if "metrics" in self.checks:
            self._report("metrics", self._metrics.check(logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training and self._schedule is not None:
            self._schedule.came("eval", state.global_step)
            if self._forwards is not None:
                self._forwards.watch_others()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training and self._schedule is not None:
            self._schedule.came("save", state.global_step)
            self.write()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training, self._finished = False, True
        if self._forwards is not None:
            self._forwards.remove()
        if "metrics" in self.checks and not self._metrics.compared:
            self._not_run["metrics"] = "nothing was logged"
        if self._schedule is not None:
            self._report("schedule", self._schedule.missed())
        self.write()
        if self._trainer.accelerator.is_main_process:
            logger.info(self._summary_line())

    # The checks.

    def _check_columns(self, inputs: dict[str, Any], everywhere: bool) -> None:
        there = reference_columns(inputs)
        if everywhere:
            finite = all(bool(torch.isfinite(inputs[name]).all()) for name in there)
            seen = gather((sorted(there), finite))
            problems = []
            for number, (names, is_finite) in enumerate(seen):
                if not names:
                    problems.append(
                        f"the collated batch of process {number} has no reference columns, so the loss would need a "
                        "reference model: the columns were removed before or during collation"
                    )
                elif not is_finite:
                    problems.append(f"reference columns in the batch of process {number} have values that are not finite")
            self._found("columns", problems)
            return
        if not there:
            self._found("columns", ["a collated batch has no reference columns"])
        bad = torch.stack([~torch.isfinite(inputs[name]).all() for name in there]).any() if there else None
        if bad is not None:  # on_log reads the flag, because reading it at every step would stall the GPU
            self._not_finite = bad if self._not_finite is None else self._not_finite | bad.to(self._not_finite.device)

    @property
    def wants_first_batch(self) -> bool:
        """Return True if the `step_zero` check must run on the next batch."""
        if not self._training or self.step_zero is not None or self._schedule is None or not self._at_reference:
            return False
        return bool(self._trainer.state.global_step == self._schedule.first_step)

    def check_first_batch(self, seen: Callable[[], list[float]]) -> None:
        """Run the `step_zero` check.

        Args:
            seen: function that compares the policy's log-probs of this process's batch with the reference's, and returns the
                result of `step_zero.differences`.
        """
        with self._forwards.paused() if self._forwards is not None else nullcontext():
            found = gather(on_all_ranks("comparing the policy's log-probs of the first batch with the reference's", seen))
        if not any(sequences or not_finite for sequences, *_, not_finite in found):
            self._not_run["step_zero"] = "no completion token in any process's first batch counts towards the loss"
            return
        self._not_run.pop("step_zero", None)
        self.step_zero = self._compared(found, self._trainer.accelerator.unwrap_model(self._trainer.model))
        self._judge(self.step_zero, "the first batch", "step_zero")

    def _check_spots(self, policy: torch.nn.Module) -> None:
        found = on_all_ranks(
            "the spot check",
            lambda: spot_check(self._trainer, self._trainer.model_wrapped, self._spot_rows, self._trainer.args.seed),
        )
        seen = [part for parts in gather(found.seen) for part in parts]
        result = self._compared(seen, policy) if seen else None
        if result is None:
            self._not_run["spot_check"] = found.by
        if self._spot is None or result is not None:
            self._spot = (found, result)
        if result is not None and found.by == "service" and result.not_finite:
            sequences = counted(result.not_finite, "sequence")
            self._found("spot_check", [f"the service's log-probs of {sequences} are not finite"])
        elif result is not None:
            self._judge(result, f"rows {', '.join(map(str, found.rows))}", "spot_check", found.by)

    def _compared(self, seen: list[list[float]], policy: torch.nn.Module) -> StepZero:
        places = [record.where for record in self._joined.values()]
        if self._given is not None:
            places = [self._given.where]
        reference = places[0].reference_dtype if places else "unknown"
        source = getattr(self._trainer, "reference", None)
        advice = source.advice_for_dtype if isinstance(source, ReferenceSource) else None
        return compared(seen, self._tolerance, reference, policy, self._trainer.accelerator, advice)

    def _judge(self, seen: StepZero, what: str, check: Check, scorer: str = "policy") -> None:
        self.write()
        if seen.not_finite:
            self._report(
                check,
                [
                    f"the policy's log-probs of {counted(seen.not_finite, 'sequence')} in {what} are not finite, so they were "
                    "not compared; the reference's log-probs are finite"
                ],
            )
        try:
            seen.require(what, scorer, check)
            if self._tolerance is None and scorer == "policy":
                seen.require_one_dtype(check)
        except StepZeroError as error:
            # A callback may have changed the weights since training began.
            by_policy = self._spot is None or check != "spot_check" or self._spot[0].by == "policy"
            if by_policy and (why := self._not_at_reference):
                self._not_run[check] = why
                self.write()
                return
            self._found(check, [str(error)], error)

    # Properties of the trainer on which the checks depend.

    @property
    def _joined(self) -> dict[str, Any]:
        return getattr(self._trainer, "joins", {})

    @property
    def _given(self) -> ReferenceDuringTraining | None:
        kept = getattr(self._trainer, "ref_model", None)
        return kept if isinstance(kept, ReferenceDuringTraining) else None

    @property
    def _reward_models(self) -> list[torch.nn.Module]:
        """Return the reward functions that are torch modules. Besides the policy, only these models may run in a training
        step."""
        return [model for model in getattr(self._trainer, "reward_funcs", None) or [] if isinstance(model, torch.nn.Module)]

    @property
    def _not_at_reference(self) -> str:
        """Return the reason why the policy's current log-probs may differ from the reference's, or an empty string if they
        should be equal.

        The reason is also recorded in the report, to explain why the `step_zero` check did not run.
        """
        if not getattr(self._trainer, "policy_starts_at_reference", computes_references(self._trainer)):
            why = "the policy does not start from the reference's weights"
        else:
            why = no_own_reference(self._trainer)
        if why and "step_zero" in self.checks:
            self._not_run["step_zero"] = why
        return why

    # Stop the run or warn because of findings, and write the report.

    def _found(self, check: Check, problems: list[str], error: ReferenceLogpsError | None = None) -> None:
        """Record problems with reference values (wrong, missing or recomputed), and stop the run.

        If on_finding is "warn", log a warning instead of stopping the run.
        """
        if not problems or check not in self.checks:
            return
        if self.on_finding == "warn":
            self._report(check, problems)
            return
        self.findings.setdefault(check, []).extend(problems)
        self._stopped = True
        self.write()
        raise error or AuditError(_words(check, problems), check)

    def _report(self, check: Check, problems: list[str]) -> None:
        """Record problems without stopping the run. Each check warns only once, so that the log is not flooded."""
        if not problems or check not in self.checks:
            return
        known = self.findings.setdefault(check, [])
        is_first = not known
        known.extend(problems[: max(0, _MOST_PROBLEMS - len(known))])
        if is_first:
            self.write()
            logger.warning(_words(check, problems))

    def write(self) -> None:
        """Write the report in its current state, on the first process only."""
        trainer = self._trainer
        if trainer is None or not trainer.accelerator.is_main_process:
            return
        earlier = read_report(trainer.args.output_dir)
        write_report(trainer.args.output_dir, self.as_dict(earlier))

    def as_dict(self, earlier: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the report. If a resumed run has not repeated the `step_zero` check, the result in `earlier` is kept.

        Args:
            earlier: the report that is already in the output folder, if any.
        """
        spot, result = self._spot or (None, None)
        return {
            "verdict": verdict(self.findings, self._stopped, self._finished),
            "findings": self.findings,
            "checks": sorted(self.checks),
            "not_run": self._not_run,
            "joins": {name: record.as_dict() for name, record in self._joined.items()},
            "remote": None if self._given is None else self._given.as_dict(),
            "step_zero": reported_step_zero(self.step_zero, self._schedule, earlier),
            "spot_check": None
            if spot is None
            else {"by": spot.by, "rows": spot.rows, **(result.as_dict() if result is not None else {})},
            "forwards": None if self._forwards is None else {"micro_batches": self._batches, "policy_passes": self._passes},
            "metrics": {"logs_compared": self._metrics.compared, "worst_difference": self._metrics.worst},
            "schedule": self._schedule.as_dict() if self._schedule is not None else None,
        }

    def _summary_line(self) -> str:
        joined = "; ".join(
            f"{name}: {record.rows if record.rows is not None else 'a stream of'} rows from {record.where.store} snapshot "
            f"{record.where.snapshot}, reference {record.where.reference_id} ({record.where.reference_dtype})"
            for name, record in self._joined.items()
        )
        state = "; ".join(f"{check}: {problems[0]}" for check, problems in self.findings.items()) or "no problems found"
        return f"reflogp audit: {state} ({joined or 'no joined datasets'})"


def _words(check: str, problems: list[str]) -> str:
    return f"reference audit, check `{check}`: {'; '.join(problems)}"


def watching(trainer: Any, audit: ReferenceAudit | bool | None, step_zero_tolerance: float | None) -> ReferenceAudit | None:
    """Attach an audit to a trainer and return the audit. If `audit` is False, attach nothing and return None.

    If `audit` is None or True, attach a new `ReferenceAudit` with default settings. An audit that was created without a
    tolerance uses `step_zero_tolerance`.
    """
    if audit is False:
        return None
    if not isinstance(audit, ReferenceAudit):
        audit = ReferenceAudit()
    if audit._tolerance is None:
        audit._tolerance = step_zero_tolerance
    return audit.attach(trainer)
