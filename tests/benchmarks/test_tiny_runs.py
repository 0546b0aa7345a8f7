"""Every benchmark from end to end, with few rows and the smallest models."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

PAIRS = "examples/data/gsm8k_pairs.jsonl"
#: All but those that need a long job or 10,000 jobs.
SERVICE_STEPS = ["job_beside_command", "all_hits", "lookups", "online", "eight_callers"]
#: Arguments of each benchmark. Those without --out, or with --only, write no file.
RUNS = {
    "autocast": ["--data", f"{PAIRS}:2", "--shape", "tiny", "--out", "{out}"],
    "memory": ["--requests", "4", "--seconds", "0.1", "--only", "GET/v1/jobs/{job_id}", "--out", "{out}"],
    "memory_of_jobs": ["--jobs", "4", "--every", "4"],
    "online": ["--batch", "2", "--tokens", "4", "--steps", "3", "--rounds", "1", "--out", "{out}"],
    "scoring": ["--data", f"{PAIRS}:4", "--shape", "tiny", "--rounds", "1", "--trl-rows", "2", "--out", "{out}"],
    "service": ["--data", PAIRS, "--rows", "6", "--rounds", "1", "--only", *SERVICE_STEPS, "--out", "{out}"],
    "store": ["--rows", "2000", "--pairs", "500", "--out", "{out}"],
    "top_k": ["--rows", "2", "--shape", "tiny", "--k", "0", "4", "--rounds", "1", "--stored", "200", "--out", "{out}"],
    "trainer": ["--rows", "8", "--shape", "tiny", "--memory-shape", "tiny", "--rounds", "1", "--out", "{out}"],
    "vision": ["--rows", "2", "--shape", "tiny", "--image-side", "28", "--rounds", "1", "--out", "{out}"],
    "vision_join": ["--rows", "4", "--rounds", "1", "--out", "{out}"],
    "workers": ["--rows", "8", "--shape", "tiny", "--rounds", "1", "--out", "{out}"],
}
#: Benchmarks with tests of their own, and those that need vLLM in an environment of its own.
ELSEWHERE = {"gpu", "pipeline", "spread", "vllm_side"}


def numbers(content: Any) -> Iterator[float]:
    if isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from numbers(part)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield content


def test_every_benchmark_is_run():
    scripts = {file.stem for file in (REPOSITORY / "benchmarks").glob("*.py") if "__main__" in file.read_text()}
    assert scripts == RUNS.keys() | ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_measures_something(name: str, tmp_path: Path):
    arguments = [argument.replace("{out}", str(tmp_path)) for argument in RUNS[name]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REFLOGP_VLLM_PYTHON": "/nowhere"}
    command = [sys.executable, f"benchmarks/{name}.py", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    files = list(tmp_path.glob("*.json"))
    assert len(files) == ("--out" in arguments and "--only" not in arguments)
    for file in files:
        found = list(numbers(json.loads(file.read_text())))
        assert found and all(map(math.isfinite, found))
