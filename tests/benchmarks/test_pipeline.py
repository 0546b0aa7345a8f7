"""benchmarks/pipeline.py from end to end, with few pairs and a quick clock."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.slow
def test_every_side_says_how_long_its_device_was_idle(pairs_file):
    command = [sys.executable, "benchmarks/pipeline.py", "--data", str(pairs_file), "--pairs", "60", "--seconds", "1"]
    done = subprocess.run([*command, "--sides", "score", "job", "--online", "--json"], cwd=REPOSITORY, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    measured = json.loads(done.stdout.splitlines()[-1])["1 s a pass"]
    for side in measured.values():
        assert side["scored"] == 120 and 0 <= side["idle_share"] < 1 and side["passes"] >= 1
    assert measured["job"]["online"]["requests"] >= 1
    assert measured["score"]["tokens"] <= measured["job"]["tokens"], "online requests are passes too"
