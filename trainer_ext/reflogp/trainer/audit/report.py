"""Read and write reflogp_audit.json: what a run trained on, and what its audit found."""

from __future__ import annotations

import importlib.metadata
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reflogp.store.whole_files import write_atomically

#: Name of the report in the run's output folder.
AUDIT_FILE = "reflogp_audit.json"
#: Verdict of a run that has not ended, or that something other than the audit stopped.
UNFINISHED = "unfinished"
_PACKAGES = ("reflogp", "trl", "openrlhf", "deepspeed", "transformers", "accelerate", "torch")


def write_report(output_dir: str, content: dict[str, Any]) -> Path:
    """Write the report; a reader sees either the complete old one or the complete new one."""
    file = Path(output_dir) / AUDIT_FILE
    content = {"written_at": datetime.now(UTC).isoformat(timespec="seconds"), **content, "versions": versions()}
    with write_atomically(file) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return file


def begin_report(output_dir: str, process: int) -> None:
    """Mark a run that is being built as unfinished, so that an earlier run's verdict is not taken for this one's.

    Args:
        output_dir: the run's output folder.
        process: this process' number; only the first writes.
    """
    if process == 0:
        write_report(output_dir, {"verdict": UNFINISHED, "step_zero": read_report(output_dir).get("step_zero")})


def verdict(findings: dict[str, list[str]], stopped: bool, finished: bool) -> str:
    """Return "failed" for a stopped run, "warned" if there are findings, "passed" for an ended run, else "unfinished"."""
    if stopped:
        return "failed"
    return "warned" if findings else "passed" if finished else UNFINISHED


def read_report(output_dir: str) -> dict[str, Any]:
    """Return an earlier report of the same run; empty if there is none."""
    try:
        found = json.loads((Path(output_dir) / AUDIT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that compute a run."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
