"""reflogp_audit.json: what a run trained on, and what its audit saw."""

from __future__ import annotations

import importlib.metadata
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reflogp.store.whole_files import appears_whole

#: Written into the run's output folder.
AUDIT_FILE = "reflogp_audit.json"
#: Verdict of a run that has not ended, or was stopped by something else than the audit.
UNFINISHED = "unfinished"
_PACKAGES = ("reflogp", "trl", "openrlhf", "deepspeed", "transformers", "accelerate", "torch")


def write_report(output_dir: str, content: dict[str, Any]) -> Path:
    """Write the report; a reader sees the old one or the new one, whole."""
    file = Path(output_dir) / AUDIT_FILE
    content = {"written_at": datetime.now(UTC).isoformat(timespec="seconds"), **content, "versions": versions()}
    with appears_whole(file) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return file


def begin_report(output_dir: str, process: int) -> None:
    """Say of a run that is being built that it is not finished, so that an earlier one's verdict does not stand for it.

    Args:
        process: this one's number; the first writes.
    """
    if process == 0:
        write_report(output_dir, {"verdict": UNFINISHED, "step_zero": read_report(output_dir).get("step_zero")})


def verdict(findings: dict[str, list[str]], stopped: bool, finished: bool) -> str:
    """failed for a run that was stopped, warned where something was found, passed for a run that has ended, else unfinished."""
    if stopped:
        return "failed"
    return "warned" if findings else "passed" if finished else UNFINISHED


def read_report(output_dir: str) -> dict[str, Any]:
    """An earlier report of the same run; empty where there is none."""
    try:
        found = json.loads((Path(output_dir) / AUDIT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def versions() -> dict[str, str]:
    """Installed versions of what computed a run."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
