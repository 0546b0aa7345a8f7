"""Name this machine for results and their file names, and write results."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any


def cpu_and_cores() -> str:
    """Return the processor's model and the number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def file_name(machine: str) -> str:
    """Return a machine's name as the stem of a file name."""
    return "".join(ch if ch.isalnum() else "-" for ch in machine.lower()).strip("-")


def write_results(folder: str, benchmark: str, results: dict[str, Any]) -> None:
    """Write `<folder>/<benchmark>-<machine>.json`, and print its path."""
    file = Path(folder) / f"{benchmark}-{file_name(results['machine'])}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {file}")
