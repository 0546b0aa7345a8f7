"""benchmarks/gpu.py from end to end on a CPU, as on a machine that has torch and transformers and little else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

#: What the benchmark's machine lacks. transformers itself needs httpx, for a hub that nobody asks.
HIDDEN = "deltalake,datasets,trl,ray,vllm,pydantic,httpx!huggingface_hub"
NUMBERS = ("seconds", "tokens_per_second", "utilization", "operations", "error_rms", "prepare_s", "elapsed_s")


def run_benchmark(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.without", HIDDEN, "--", "benchmarks/gpu.py", "--device", "cpu", "--shapes", "tiny"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--out", str(folder), *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    [file] = folder.glob("gpu-*.json")
    return done, json.loads(file.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, Any]:
    done, results = run_benchmark(tmp_path_factory.mktemp("results"))
    assert done.returncode == 0, done.stderr
    assert results["installed"]["transformers"]
    return results


def test_every_side_has_its_figures_or_a_reason(measured):
    sides = measured["shapes"]["tiny"]["sides"]
    chosen = sides["reflogp"]["self_check"]["kernels"]
    for name, entry in sides.items():
        if name == "vLLM, prompt_logprobs=0":
            assert entry == {"skipped": "not installed"}
        elif name in [f"reflogp, {kernel}" for kernel in chosen]:
            assert entry == {"skipped": "reflogp chose this kernel itself"}
        elif name == "reflogp, cpu_blocks" and "skipped" in entry:
            assert "not for this device" in entry["skipped"]
        else:
            assert all(entry[number] > 0 for number in NUMBERS), (name, entry)
            assert len(entry["runs"]) == 3 and not entry["incomplete"]
            assert sum(entry["passes"]["seconds"]) == pytest.approx(entry["runs"][-1]["seconds"], rel=0.2, abs=0.02)
    assert {"transformers, padded", "transformers, padded, head on completions", "reflogp, by_branch"} <= set(sides)
    assert measured["shapes"]["tiny"]["ratio_to_best_padded"] > 0
    head = measured["shapes"]["tiny"]["head"]
    assert head["reflogp"]["milliseconds"] > 0
    assert all(set(entry) & {"milliseconds", "skipped"} for entry in head.values())


def test_the_sides_compute_the_same_log_probs(measured):
    """Half-precision rounding of a model with near uniform log-probs; whole nats would be another token's."""
    sides = measured["shapes"]["tiny"]["sides"]
    for name in ("reflogp", "transformers, padded", "transformers, padded, head on completions"):
        assert sides[name]["error_rms"] < 0.05, name
    assert sides["reflogp"]["error_rms"] <= sides["transformers, padded"]["error_rms"]


@pytest.mark.parametrize("minutes", ["0", "0.001"], ids=["before the model is made", "after it"])
def test_what_there_is_no_time_for_is_skipped_by_name(minutes, tmp_path):
    done, results = run_benchmark(tmp_path, "--minutes", minutes)
    assert done.returncode == 1, "the engine's own figure is missing"
    sides = results["shapes"]["tiny"]["sides"]
    assert {"reflogp", "transformers, padded", "reflogp, by_branch", "vLLM, prompt_logprobs=0"} <= set(sides)
    for entry in sides.values():
        assert entry["skipped"] in ("no time left", "not installed", "not installed, or not for this device")


def test_the_gpu_tests_are_collected_on_such_a_machine():
    """Where there is no GPU they are skipped, with the reason."""
    command = [
        sys.executable,
        "-m",
        "tests.without",
        HIDDEN,
        "--",
        "pytest",
        "-m",
        "gpu",
        "-rs",
        "tests/gpu",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("REFLOGP_GPU_TESTS_DEVICE", None)
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "no CUDA device" in done.stdout and "passed" not in done.stdout


def test_a_hidden_package_is_not_there(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import importlib.util\nassert importlib.util.find_spec('deltalake') is None\nimport httpx")
    done = subprocess.run(
        [sys.executable, "-m", "tests.without", HIDDEN, "--", str(program)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert "No module named 'httpx'" in done.stderr


def test_drawn_pairs_have_ultrafeedbacks_lengths(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import pairs as lengths

    drawn = lengths.drawn_pairs(2_000_000, 151_936)
    assert 2_000_000 <= drawn.tokens < 2_010_000
    assert drawn.rows == lengths.drawn_pairs(2_000_000, 151_936).rows
    prompts, chosen, rejected = (np.array([len(row[part]) for row in drawn.rows]) for part in range(3))
    for found, percentiles in ((prompts, lengths.PROMPT_TOKENS), (np.r_[chosen, rejected], lengths.COMPLETION_TOKENS)):
        assert np.percentile(found, [20, 50, 80]) == pytest.approx([percentiles[at] for at in (3, 6, 9)], rel=0.15)
    assert np.corrcoef(chosen, rejected)[0, 1] == pytest.approx(lengths.COMPLETIONS_CORRELATION, abs=0.1)
