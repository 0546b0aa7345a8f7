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
from tests.store.s3 import environment_of, s3_server
from tests.vllm.serving import free_port

FILE = REPOSITORY / "examples" / "clusters" / "skypilot.yaml"
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


def task() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


@pytest.mark.skipif(not PYTHON.is_file(), reason="there is no .venv-skypilot: make setup-skypilot")
def test_skypilot_takes_the_file(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PYTHONPATH": ""}
    asked = json.dumps([task(), GIVEN, SECRETS])
    command = [PYTHON, "-c", READ]
    done = subprocess.run(command, input=asked, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout.splitlines()[-1])
    assert taken["run"] == task()["run"] and taken["setup"] == task()["setup"]
    assert taken["envs"] == {**task()["envs"], **GIVEN}
    assert taken["secrets"] == {**task()["secrets"], **SECRETS}
    assert taken["file_mounts"] == task()["file_mounts"]
    choices = taken["resources"]["any_of"]
    assert {name: 1 for choice in choices for name in choice["accelerators"]} == task()["resources"]["accelerators"]


def test_the_shell_is_valid_and_installs_what_the_package_has():
    for script in (task()["setup"], task()["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    requirement = shlex.split(task()["setup"].splitlines()[-1])[-1]
    parse(f"pip install '{requirement}'")
    words = [line.strip().removesuffix(" &") for line in task()["run"].splitlines()]
    commands = [line for line in words if line.startswith("reflogp ")]
    assert [line.split()[1] for line in commands] == ["serve", "submit"]
    for line in commands:
        parse(line)


@pytest.fixture
def machine(tmp_path, reference_folder) -> Iterator[dict[str, str]]:
    """The environment of the task's shell, and a folder in place of ~ with the first 12 pairs of the task's file."""
    home = tmp_path / "home"
    (home / "reflogp" / "bin").mkdir(parents=True)
    for target, source in task()["file_mounts"].items():
        assert (REPOSITORY / source).samefile(PAIRS)
        place = home / target.removeprefix("~/")
        shutil.copy(REPOSITORY / source, place)
        write_rows(place, [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()[:12]])
    with s3_server() as reached, environment_of(reached):
        yield {
            **os.environ,
            **{name: value for name, value in (task()["envs"] | task()["secrets"]).items() if value is not None},
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
    assert not [process for process in psutil.process_iter(["environ"]) if _is_marked(process, str(tmp_path))]


def _is_marked(process: psutil.Process, mark: str) -> bool:
    return (process.info["environ"] or {}).get("REFLOGP_MARK") == mark


@pytest.mark.slow
def test_a_machine_scores_and_the_next_one_finds_the_values(machine):
    """The first ends when the dataset is scored; the second has only the bucket, scores nothing and goes on serving."""
    command = ["bash", "-c", task()["run"]]
    first = {**machine, "KEEP_SERVING": "no"}
    done = subprocess.run(command, env=first, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    store = Store(GIVEN["REFLOGP_STORE"])
    [reference] = store.references()
    lines = (Path(machine["HOME"]) / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    sequences = {json.dumps([row["prompt"], row[side]]) for row in map(json.loads, lines) for side in ("chosen", "rejected")}
    assert len(store[reference.reference_id].snapshot()) == len(sequences) > 12

    shutil.rmtree(Path(machine["HOME"]) / "reflogp-state")
    url = f"http://127.0.0.1:{machine['REFLOGP_PORT']}"
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=machine, start_new_session=True, **streams) as job:
        try:
            deadline = time.monotonic() + 300
            while not (ended := _ended_jobs(url)):
                assert job.poll() is None and time.monotonic() < deadline
                time.sleep(0.5)
            [summary] = [found["summary"] for found in ended]
            assert (summary["hits"], summary["scored"]) == (24, 0)
            time.sleep(2)
            assert job.poll() is None
        finally:
            os.killpg(job.pid, signal.SIGTERM)
            job.communicate(timeout=120)


def _ended_jobs(url: str) -> list[dict[str, Any]]:
    try:
        return httpx.get(f"{url}/v1/jobs", params={"state": "done"}, trust_env=False).json()["jobs"]
    except httpx.HTTPError:
        return []


@pytest.mark.slow
def test_a_service_that_cannot_start_ends_the_task(machine):
    wrong = {**machine, "MODEL": f"{machine['HOME']}/no-model"}
    done = subprocess.run(["bash", "-c", task()["run"]], env=wrong, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "no-model" in done.stderr
