"""Check TRL's logged metrics, and read and write reflogp_audit.json.

reflogp_audit.json records what a run was trained on and what its audit found.

Logged metrics are expected to be means over all processes.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reflogp.store.files import write_atomically
from reflogp.trainer.audit.schedule import Schedule
from reflogp.trainer.audit.step_zero import StepZero
from reflogp.trainer.ranks import gather

#: Metrics whose names contain one of these strings may differ between processes. They are times, rates, memory sizes and
#: operation counts, including those of ms-swift.
_OWN = ("runtime", "per_second", "memory", "flos", "step_time", "train_speed")
#: Two metrics count as equal if `apart` returns at most this value.
_ROUNDING = 1e-4


class GlobalMeans:
    """Checks whether logged training metrics are means over all processes.

    Attributes:
        compared: number of logs that `check` has checked.
        worst: largest relative difference between a metric on this process and its mean over all processes.
    """

    def __init__(self) -> None:
        self.compared = 0
        self.worst = 0.0

    def check(self, logs: dict[str, float]) -> list[str]:
        """Return the metrics of this process that are not means over all processes. All processes must call this together.

        Args:
            logs: the logged metrics of this process, by name.
        """
        mine = {name: float(value) for name, value in logs.items() if _is_shared(name, value)}
        everyone = gather(mine)
        problems = []
        for name, value in mine.items():
            values = [logged[name] for logged in everyone if name in logged]
            off = apart(value, sum(values) / len(values))
            self.worst = max(self.worst, off)
            if off > _ROUNDING:
                mean = sum(values) / len(values)
                problems.append(f"{name} is {value:.6g} on this process but {mean:.6g} on average over all processes")
        self.compared += 1
        return problems


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
