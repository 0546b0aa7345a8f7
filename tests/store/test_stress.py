"""Test real processes that are killed at random, on a folder and on S3. `python -m tools.stress_store` is the long version."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("where", [[], ["--s3"]], ids=["folder", "s3"])
def test_nothing_is_lost_and_no_value_changes(where):
    sizes = ["--writers", "3", "--commits", "40", "--readers", "2", "--kills", "8"]
    command = [sys.executable, "-m", "tools.stress_store", *sizes, *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    account = json.loads(done.stdout.splitlines()[-1])
    assert account["lost"] == account["two_values"] == account["readers_failed"] == 0
    assert account["commits"] == 120
    assert account["kills"] >= 4
    assert account["lookups"] > 1000
