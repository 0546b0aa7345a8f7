"""tests/gpu and tools/gpu_first.sh on a CPU, as on a machine that has torch and transformers and little else."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.benchmarks.test_gpu import ENVIRONMENT, hiding
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow


GPU_TESTS = ("pytest", "-m", "gpu", "-rfEs", "-p", "no:cacheprovider", "tests/gpu")


def test_the_gpu_tests_are_skipped_with_a_reason_where_there_is_no_gpu():
    done = hiding(*GPU_TESTS, CUDA_VISIBLE_DEVICES="", REFLOGP_GPU_TESTS_DEVICE="cuda:0")
    assert done.returncode == 0, done.stdout
    assert "no CUDA device" in done.stdout and "passed" not in done.stdout


@pytest.mark.timeout(1800)
def test_the_gpu_tests_pass_on_a_cpu():
    done = hiding(*GPU_TESTS, REFLOGP_GPU_TESTS_DEVICE="cpu")
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 50, done.stdout


@pytest.mark.timeout(1200)
def test_gpu_first_leaves_the_results_of_every_step(tmp_path):
    script = REPOSITORY / "tools" / "gpu_first.sh"
    environment = ENVIRONMENT | {"OUT": str(tmp_path / "out"), "PYTHON": sys.executable}
    done = subprocess.run([script, "--device", "cpu"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    files = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    [quick, whole] = sorted((name for name in files if name.endswith(".json")), key=lambda name: "quick" not in name)
    assert set(files) == {"machine.txt", "clocks.csv", "quick.log", "tests.log", "benchmark.log", quick, whole}
    for name, log in ((quick, files["quick.log"]), (whole, files["benchmark.log"])):
        results = json.loads(files[name])
        found = results["shapes"]["tiny"]
        assert f"{results['product_tflops']['over_3_seconds']:.3g} over 3 seconds" in log
        assert f"{found['sides']['reflogp']['tokens_per_second']:,.0f} tokens/s in whole runs" in log
        assert "packed path, kernels [" in log and "rejected: " in log
        assert found["kernels"]["kernels"][0]["name"] in log
    assert list(json.loads(files[quick])["shapes"]["tiny"]["sides"]) == ["reflogp"]
    assert "online" in json.loads(files[whole])["shapes"]["tiny"]
    assert "1 passed" in files["tests.log"]
    assert "ended with status 0" in done.stdout
