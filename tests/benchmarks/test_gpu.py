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
import torch

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

#: What the benchmark's machine lacks.
HIDDEN = "deltalake,datasets,trl,ray,vllm,deepspeed,pydantic"
RATES = ("steady_tokens_per_second", "tokens_per_second")
NUMBERS = (*RATES, "seconds", "operations", "utilization", "utilization_of_burst", "error_rms", "prepare_s", "elapsed_s")
#: One thread: passes of 1,024 tokens, so that there are passes between the first and the last.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OUT")}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "REFLOGP_VLLM_PYTHON": "/no/such/python"}


def hiding(*program: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a Python file or pytest where the packages of HIDDEN are not found."""
    command = [sys.executable, "-m", "tests.without", HIDDEN, "--", *program]
    return subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT | environment, capture_output=True, text=True)


def run_benchmark(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, dict[str, Any]]:
    done = hiding("benchmarks/gpu.py", "--device", "cpu", "--shapes", "tiny", *arguments, OUT=str(folder))
    [file] = folder.glob("gpu-*.json")
    return done, json.loads(file.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, Any]:
    done, results = run_benchmark(tmp_path_factory.mktemp("results"), "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert results["installed"]["transformers"]
    return results | {"printed": done.stdout}


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
            assert len(entry["runs"]) == 2 and not entry["incomplete"]
            assert sum(entry["pass_seconds"]) == pytest.approx(entry["runs"][-1]["seconds"], rel=0.2, abs=0.02)
            assert entry["graphs_compiled"] == {"preparing": 0, "runs": 0}, "small models are not compiled on a CPU"
            rates = [f"{entry[rate]:,.0f} tokens/s" for rate in RATES]
            assert f"{name}: {rates[0]} steady, {rates[1]} in whole runs" in measured["printed"]
    assert {"transformers, padded", "transformers, padded, head on completions", "reflogp, by_branch"} <= set(sides)
    assert measured["shapes"]["tiny"]["ratio_to_best_padded"] > 0
    head = measured["shapes"]["tiny"]["head"]
    assert head["reflogp"]["milliseconds"] > 0
    assert all(set(entry) & {"milliseconds", "skipped"} for entry in head.values())


def test_kernels_are_listed_by_their_time_and_products_are_measured_alone(measured):
    products = measured["product_tflops"]
    assert 0 < products["over_3_seconds"] < 4 * products["burst"]
    kernels = measured["shapes"]["tiny"]["kernels"]
    rows = kernels["kernels"]
    assert 10 < len(rows) <= 22 and all(row["seconds"] > 0 and row["calls"] > 0 for row in rows)
    shares = [row["share"] for row in rows]
    assert shares == sorted(shares, reverse=True) and 0.9 < sum(shares) <= 1.001
    products = sum(row["share"] for row in rows if row["name"] in ("aten::mm", "aten::addmm", "aten::bmm"))
    assert kernels["products"] == pytest.approx(products, abs=0.01)
    assert 0 <= kernels["attention"] < 0.5
    assert 0.3 < kernels["busy"] < 1.1 and kernels["seconds"] > 0
    assert all(row["name"][:90] in measured["printed"] for row in rows)


def test_online_requests_have_percentiles_alone_and_beside_a_job(measured):
    online = measured["shapes"]["tiny"]["online"]
    assert online["job_tokens_per_second"] > 0
    for by_length in (online["alone"], online["beside_a_job"]):
        assert set(by_length) == {"512 tokens", "64 tokens"}
        for row in by_length.values():
            assert row["count"] > 0 and row["first_ms"] > 0 and 0 < row["p50_ms"] <= row["p99_ms"]
            assert row["graphs_compiled"] == {"first": 0, "others": 0}
            assert f"p50 {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms" in measured["printed"]
    assert online["alone"]["64 tokens"]["p50_ms"] < online["alone"]["512 tokens"]["p50_ms"]
    for length, row in online["beside_a_job"].items():
        assert row["p50_ms"] > online["alone"][length]["p50_ms"], "a request waits for the job's pass"


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


def test_compiled_graphs_are_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import gpu_measures

    function = torch.compile(lambda numbers: numbers + 1, backend="eager", dynamic=False)
    before = gpu_measures.graphs_compiled()
    function(torch.zeros(3))
    function(torch.ones(3))
    assert gpu_measures.graphs_compiled() == before + 1
    function(torch.zeros(4))
    assert gpu_measures.graphs_compiled() == before + 2


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
