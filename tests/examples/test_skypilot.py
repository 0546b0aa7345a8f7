"""examples/clusters/skypilot.yaml: read by SkyPilot itself, and its shell run here, with a bucket of a real S3 server."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from reflogp.store import Store
from tests.conftest import PAIRS, REPOSITORY, write_rows
from tests.docs.workspace import parse
from tests.service.serving import wait_until
from tests.store.s3 import environment_of, s3_server
from tests.vllm.serving import free_port

TASK: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples" / "clusters" / "skypilot.yaml").read_text(encoding="utf-8"))
PYTHON = REPOSITORY / ".venv-skypilot" / "bin" / "python"
GIVEN = {"REFLOGP_STORE": "s3://logps/sft", "AWS_REGION": "us-east-1"}
SECRETS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}

#: Makes a task as `sky launch FILE --env … --secret …` does, and prints it.
READ = """
import json, sys
import sky
config, given, secrets = json.load(sys.stdin)
print(json.dumps(sky.Task.from_yaml_config(config, list(given.items()), list(secrets.items())).to_yaml_config()))
"""


@pytest.mark.skipif(not PYTHON.is_file(), reason="there is no .venv-skypilot: make setup-skypilot")
def test_skypilot_takes_the_file(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PYTHONPATH": ""}
    asked = json.dumps([TASK, GIVEN, SECRETS])
    done = subprocess.run([PYTHON, "-c", READ], input=asked, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout.splitlines()[-1])
    assert all(taken[name] == TASK[name] for name in ("run", "setup", "file_mounts"))
    assert taken["envs"] == {**TASK["envs"], **GIVEN}
    assert taken["secrets"] == {**TASK["secrets"], **SECRETS}
    choices = taken["resources"]["any_of"]
    assert {name: 1 for choice in choices for name in choice["accelerators"]} == TASK["resources"]["accelerators"]


def test_the_shell_is_valid_and_installs_what_the_package_has():
    for script in (TASK["setup"], TASK["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    requirement = shlex.split(TASK["setup"].splitlines()[-1])[-1]
    parse(f"pip install '{requirement}'")
    words = [line.strip().removesuffix(" &") for line in TASK["run"].splitlines()]
    commands = [line for line in words if line.startswith("reflogp ")]
    assert [line.split()[1] for line in commands] == ["serve", "submit"]
    for line in commands:
        parse(line)


@pytest.fixture
def machine(tmp_path, reference_folder) -> Iterator[dict[str, str]]:
    """The environment of the task's shell, and a folder in place of ~ with the first 12 pairs of the task's file."""
    home = tmp_path / "home"
    (home / "reflogp" / "bin").mkdir(parents=True)
    for target, source in TASK["file_mounts"].items():
        assert (REPOSITORY / source).samefile(PAIRS)
        place = home / target.removeprefix("~/")
        shutil.copy(REPOSITORY / source, place)
        write_rows(place, [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()[:12]])
    with s3_server() as reached, environment_of(reached):
        yield {
            **os.environ,
            **{name: value for name, value in (TASK["envs"] | TASK["secrets"]).items() if value is not None},
            **GIVEN,
            **reached,
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MODEL": str(reference_folder),
            "REFLOGP_PORT": str(free_port()),
            "REFLOGP_CACHE_DIR": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
            "REFLOGP_MARK": str(tmp_path),
        }
    environments = [process.info["environ"] or {} for process in psutil.process_iter(["environ"])]
    assert not [found for found in environments if found.get("REFLOGP_MARK") == str(tmp_path)]


@pytest.mark.slow
def test_a_machine_scores_and_the_next_one_finds_the_values(machine):
    """The first ends when the dataset is scored; the second has only the bucket, scores nothing and goes on serving."""
    command = ["bash", "-c", TASK["run"]]
    first = {**machine, "KEEP_SERVING": "no"}
    done = subprocess.run(command, env=first, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    store = Store(GIVEN["REFLOGP_STORE"])
    [reference] = store.references()
    lines = (Path(machine["HOME"]) / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    sequences = {json.dumps([row["prompt"], row[side]]) for row in map(json.loads, lines) for side in ("chosen", "rejected")}
    assert len(store[reference.reference_id].snapshot()) == len(sequences) > 12

    shutil.rmtree(Path(machine["HOME"]) / "reflogp-state")
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=machine, start_new_session=True, **streams) as job:
        try:
            wait_until(lambda: _ended_jobs(machine["REFLOGP_PORT"]) or job.poll() is not None, 300)
            [summary] = [found["summary"] for found in _ended_jobs(machine["REFLOGP_PORT"])]
            assert (summary["hits"], summary["scored"]) == (24, 0)
            time.sleep(2)
            assert job.poll() is None
        finally:
            os.killpg(job.pid, signal.SIGTERM)
            job.communicate(timeout=120)


def _ended_jobs(port: str) -> list[dict[str, Any]]:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v1/jobs", params={"state": "done"}, trust_env=False).json()["jobs"]
    except httpx.HTTPError:
        return []


@pytest.mark.slow
def test_a_service_that_cannot_start_ends_the_task(machine):
    wrong = {**machine, "MODEL": f"{machine['HOME']}/no-model"}
    done = subprocess.run(["bash", "-c", TASK["run"]], env=wrong, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and "no-model" in done.stderr
