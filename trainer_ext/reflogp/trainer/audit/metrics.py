"""Check TRL's logged metrics, and read and write reflogp_audit.json.

reflogp_audit.json records what a run was trained on and what its audit found.

Logged metrics are expected to be means over all processes and to agree with the joined columns.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from reflogp.store.files import write_atomically
from reflogp.trainer.audit.schedule import Schedule
from reflogp.trainer.audit.step_zero import StepZero
from reflogp.trainer.ranks import gather

#: Metrics whose names contain one of these strings may differ between processes. They are times, rates, memory sizes and
#: operation counts, including those of ms-swift.
_OWN = ("runtime", "per_second", "memory", "flos", "step_time", "train_speed")
#: Two metrics count as equal if `apart` returns at most this value.
_ROUNDING = 1e-4


@dataclass
class Disagreements:
    """The problems found in one log of training metrics.

    Attributes:
        reference: problems indicating that the loss did not read the joined columns.
        reported: problems that do not stop the run: metrics that are not means over all processes, and policy log-probs that
            are not finite.
    """

    reference: list[str] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)


class GlobalMeans:
    """Means of the joined columns over the batches since the previous log, for comparison with the metrics in the next log.

    Attributes:
        compared: number of logs that `check` has checked.
        worst: largest relative difference between a metric on this process and its mean over all processes.
    """

    def __init__(self) -> None:
        self.compared = 0
        self.worst = 0.0
        self._references: list[torch.Tensor] = []

    def saw(self, batch: dict[str, Any]) -> None:
        """Record the means of ref_chosen_logps and ref_rejected_logps in one micro-batch."""
        columns = [batch.get("ref_chosen_logps"), batch.get("ref_rejected_logps")]
        means = [column.double().mean() for column in columns if isinstance(column, torch.Tensor)]
        if len(means) == len(columns):
            self._references.append(torch.stack(means))

    def forget(self) -> None:
        """Discard the recorded means. Call this method after each log of TRL's metrics, even if a callback requested the
        log. TRL's trainers clear their metrics when they log them, so the next log does not cover the earlier batches."""
        self._references.clear()

    def check(self, logs: dict[str, float], beta: float | None) -> Disagreements:
        """Return the problems in a log of training metrics. All processes must call this method together.

        Args:
            logs: the logged metrics of this process, by name.
            beta: the trainer's beta. If None or 0, the means of the joined columns are not checked.
        """
        mine = {name: float(value) for name, value in logs.items() if _is_shared(name, value)}
        everyone = gather(mine)
        found = Disagreements()
        for name, value in mine.items():
            values = [logged[name] for logged in everyone if name in logged]
            off = apart(value, sum(values) / len(values))
            self.worst = max(self.worst, off)
            if off > _ROUNDING:
                found.reported.append(
                    f"{name} is {value:.6g} on this process but {sum(values) / len(values):.6g} on average over all processes"
                )
        # Check the means over all processes, even if this process logged other values, so that all processes find the same
        # problems.
        on_all_ranks = {name: sum(logged[name] for logged in everyone) / len(everyone) for name in _in_all(everyone)}
        self._check_references(on_all_ranks, beta, found)
        self.compared += 1
        return found

    def _check_references(self, logs: dict[str, float], beta: float | None, found: Disagreements) -> None:
        """Check that the mean reference log-prob implied by a log equals the mean of the joined column over all processes.

        The implied mean is the logged log-prob minus (logged reward / beta).
        """
        count = len(self._references)
        seen = [float(value) for value in torch.stack(self._references).mean(0)] if count else None
        self.forget()
        per_process = gather((count, seen))
        if not beta or any(means is None or number != count for number, means in per_process):
            return  # logs that cover different batches cannot be compared with one mean over all processes
        for at, side in enumerate(("chosen", "rejected")):
            if f"rewards/{side}" not in logs or f"logps/{side}" not in logs:
                continue
            joined = sum(means[at] for _, means in per_process if means) / len(per_process)
            logged = logs[f"logps/{side}"] - logs[f"rewards/{side}"] / beta
            if math.isfinite(joined) and not math.isfinite(logs[f"logps/{side}"]):
                found.reported.append(
                    f"the policy's log-probs are no longer finite (logps/{side} is {logs[f'logps/{side}']}); the "
                    "reference's log-probs are finite"
                )
            elif apart(logged, joined) > _ROUNDING:
                found.reference.append(
                    f"rewards/{side} and logps/{side} imply a mean reference log-prob of {logged:.6g}, but the joined "
                    f"column's mean over all processes is {joined:.6g}: perhaps the loss does not use the joined column"
                )


def _in_all(everyone: list[dict[str, float]]) -> set[str]:
    return set.intersection(*(set(logged) for logged in everyone))


def _is_shared(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and not any(own in name for own in _OWN)


def apart(left: float, right: float) -> float:
    """Return |left - right| / max(1, |right|) for two metrics.

    The result is 0 if the metrics are equal or both NaN. Otherwise, it is infinite if one of them is NaN or infinite.
    """
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    off = abs(left - right) / max(1.0, abs(right))
    return math.inf if math.isnan(off) else off


#: File name of the audit report in the run's output folder.
AUDIT_FILE = "reflogp_audit.json"
#: Verdict on a run that has not ended, or that was stopped by something other than the audit.
UNFINISHED = "unfinished"
_PACKAGES = ("reflogp", "trl", "openrlhf", "deepspeed", "transformers", "accelerate", "torch")


def write_report(output_dir: str, content: dict[str, Any]) -> Path:
    """Write the report atomically: a reader sees either the complete old report or the complete new report.

    JSON has no NaN or infinite numbers. Such numbers are written as the strings "nan", "inf" and "-inf".
    """
    file = Path(output_dir) / AUDIT_FILE
    content = {"written_at": datetime.now(UTC).isoformat(timespec="seconds"), **content, "versions": versions()}
    with write_atomically(file) as partial:
        partial.write_text(json.dumps(_as_json(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return file


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def begin_report(output_dir: str, process: int) -> None:
    """Write a report with the verdict "unfinished" when a run begins, so that the report of an earlier run in the same folder
    is not mistaken for the new run's. Keep the earlier report's `step_zero` result until training begins, because the new run
    may turn out to be resumed (see `reported_step_zero`).

    Args:
        output_dir: the run's output folder.
        process: rank of this process; only process 0 writes the report.
    """
    if process == 0:
        write_report(output_dir, {"verdict": UNFINISHED, "step_zero": read_report(output_dir).get("step_zero")})


def reported_step_zero(
    found: StepZero | None, schedule: Schedule | None, earlier: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the `step_zero` result for a run's report.

    A resumed run usually does not repeat the check, so the result in the earlier report of its output folder is kept. A run
    that begins at step 0 is a new run, and the earlier report is about another one.

    Args:
        found: result of the run's own check, or None if the check has not run.
        schedule: the run's schedule, or None if training has not begun.
        earlier: the report that is already in the output folder, if any.
    """
    if found is not None:
        return found.as_dict()
    if schedule is not None and schedule.first_step == 0:
        return None
    return (earlier or {}).get("step_zero")


def verdict(findings: dict[str, list[str]], stopped: bool, finished: bool) -> str:
    """Return "failed" if the audit stopped the run, "warned" if there are findings but the audit did not stop the run, "passed"
    if the run has ended without findings, and "unfinished" otherwise."""
    if stopped:
        return "failed"
    return "warned" if findings else "passed" if finished else UNFINISHED


def read_report(output_dir: str) -> dict[str, Any]:
    """Return the report in the run's output folder, or an empty dict if there is none or if it cannot be read."""
    try:
        found = json.loads((Path(output_dir) / AUDIT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that a run's results depend on."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
