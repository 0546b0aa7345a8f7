"""The image and compose.yaml on a real Docker engine. Run by `make test-docker`.

What a build needs that is the machine's own comes from the environment: REFLOGP_BASE_IMAGE, REFLOGP_INDEX_URL,
REFLOGP_TORCH_INDEX_URL, REFLOGP_PIP_CERT and REFLOGP_BUILD_NETWORK, as compose.yaml takes them.
"""

import json
import os
import re
import shutil
import subprocess
import time

import httpx
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.client import Client
from tests.conftest import REPOSITORY, plain_token_logps, write_rows
from tests.service.serving import token_rows, wait_for, wait_until
from tests.vllm.serving import free_port

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3600)]
#: Builds fetch libraries; a start makes a model, on a machine that may be busy.
BUILD_SECONDS, START_SECONDS = 3000, 600


class Project:
    """compose.yaml under a project name of its own, with volumes of its own."""

    def __init__(self) -> None:
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
        standalone = shutil.which("docker-compose")
        assert plugin or standalone, "neither `docker compose` nor docker-compose is installed"
        self.name = f"reflogp-test-{os.getpid()}"
        self._command = ["docker", "compose"] if plugin else [standalone]
        self._command += ["--file", str(REPOSITORY / "docker" / "compose.yaml"), "--project-name", self.name]
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._environment = {**os.environ, "REFLOGP_PUBLISH": f"127.0.0.1:{port}"}

    def compose(self, *arguments: str, timeout: float = 300, check: bool = True) -> str:
        """Run a compose command; gives what it prints on stdout."""
        done = subprocess.run(
            [*self._command, *arguments], env=self._environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0 or not check, f"{arguments}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def container(self, service: str = "reflogp") -> str:
        return self.compose("ps", "-q", service).strip()

    def up(self) -> None:
        """Start, and wait until it is ready."""
        self.compose("up", "--detach", "--no-build", timeout=START_SECONDS)
        wait_until(lambda: inspected(self.container())["State"]["Health"]["Status"] == "healthy", START_SECONDS)

    def token(self, name: str) -> str:
        return self.compose("exec", "-T", "reflogp", "cat", f"/secrets/{name}/token").strip()

    def client(self) -> Client:
        return Client(self.url, self.token("service"))


def docker(*arguments: str) -> str:
    """Run docker; gives what it prints."""
    done = subprocess.run(["docker", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode == 0, f"{arguments}: {done.stdout}"
    return done.stdout


def inspected(container: str) -> dict:
    return json.loads(docker("inspect", container))[0]


@pytest.fixture(scope="module")
def project():
    """Built, never started; all of it but the image is removed in the end."""
    found = Project()
    found.compose("build", timeout=BUILD_SECONDS)
    try:
        yield found
    finally:
        found.compose("--profile", "demo", "down", "--volumes", "--timeout", "60")


@pytest.fixture(scope="module")
def started(project, tmp_path_factory, request):
    """Started for the first time, one row scored; prints how long that takes, and the image's size."""
    file = write_rows(tmp_path_factory.mktemp("first") / "row.jsonl", token_rows(1, seed=0, length=60))
    begun = time.monotonic()
    project.up()
    ready = time.monotonic() - begun
    with project.client() as client:
        job = client.watch(client.submit(file, "demo").id)
    assert (job.state, job.progress.scored) == ("done", 2), job.error
    scored = time.monotonic() - begun
    size = int(docker("image", "inspect", "--format", "{{.Size}}", inspected(project.container())["Image"]))
    told = f"image: {size / 1e6:,.0f} MB; from up to ready {ready:.1f} s, to the first scored row {scored:.1f} s"
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{told}")
    return project


def test_callers_need_a_token(started):
    assert httpx.get(f"{started.url}/readyz").status_code == 200
    for path in ("/v1/references", "/metrics"):
        assert httpx.get(started.url + path).status_code == 401
    bearer = {"authorization": f"Bearer {started.token('monitoring')}"}
    assert "reflogp_workers_ready" in httpx.get(f"{started.url}/metrics", headers=bearer).text
    assert httpx.post(f"{started.url}/v1/jobs", headers=bearer, json={}).status_code == 403


def test_it_is_confined(started):
    state = inspected(started.container())
    assert state["Config"]["User"] == "10001:10001" and state["HostConfig"]["ReadonlyRootfs"]
    status = started.compose("exec", "-T", "reflogp", "cat", "/proc/1/status", "/proc/self/status")
    assert set(re.findall(r"^CapEff:\s*(\w+)", status, re.M)) == {"0" * 16}
    assert set(re.findall(r"^NoNewPrivs:\s*(\d)", status, re.M)) == {"1"}
    for folder in ("/", "/opt/reflogp", "/opt/venv", "/models"):
        with pytest.raises(AssertionError, match="Read-only file system"):
            started.compose("exec", "-T", "reflogp", "touch", f"{folder}/file")


def test_no_layer_has_a_secret_or_what_a_build_needed(started):
    image = inspected(started.container())["Image"]
    said = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image) + docker("image", "inspect", image)
    for name in ("PIP_CERT", "PIP_INDEX_URL", "TORCH_INDEX_URL", "TOKEN", "PASSWORD", "SECRET"):
        assert name not in said
    certificates = ("find", "/opt", "/build", "/cache", "-name", "ca-certificates.crt")
    assert not started.compose("exec", "-T", "reflogp", *certificates, check=False).strip()
    assert docker("run", "--rm", "--entrypoint", "find", image, "/secrets", "/store", "/state", "-type", "f") == ""


def test_a_job_survives_a_kill_of_the_container(started, tmp_path):
    rows = token_rows(6_000, seed=1, length=60)
    with started.client() as client:
        job = client.submit(write_rows(tmp_path / "rows.jsonl", rows), "demo").id
        wait_for(client, job, lambda found: found.progress.scored >= 500)
        time.sleep(6)  # values are committed every five seconds
        assert client.job(job).state == "running"
    container = started.container()
    docker("kill", container)
    assert inspected(container)["State"]["ExitCode"] == 137
    started.up()
    assert started.container() == container
    with started.client() as client:
        ended = client.watch(job, timeout=1200)
        assert ended.state == "done", ended.error
        assert 0 < ended.summary["hits"] < 12_000 and ended.summary["hits"] + ended.summary["scored"] == 12_000
        result = pq.read_table(client.result(job, tmp_path / "result.parquet"))
    assert result["row"].to_pylist() == list(range(6_000)) and result["error"].null_count == 6_000
    docker("cp", f"{container}:/cache/demo-model", str(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    for at in (0, 999, 1999):
        for side in ("chosen", "rejected"):
            expected = sum(plain_token_logps(model, rows[at]["prompt_ids"], rows[at][f"{side}_ids"]))
            assert result[f"ref_{side}_logps"][at].as_py() == pytest.approx(expected, abs=5e-3)


def test_sigterm_commits_what_a_job_has(started, tmp_path):
    with started.client() as client:
        job = client.submit(write_rows(tmp_path / "rows.jsonl", token_rows(2000, seed=2, length=60)), "demo").id
        scored = wait_for(client, job, lambda found: found.progress.scored >= 200).progress.scored
    container = started.container()
    started.compose("stop", timeout=120)
    state = inspected(container)["State"]
    assert state["ExitCode"] == 143  # by the SIGTERM; 137 would be the engine's kill after stop_grace_period
    assert "Application shutdown complete" in docker("logs", "--tail", "5", container)
    started.up()
    with started.client() as client:
        ended = client.watch(job, timeout=1200)
        assert ended.state == "done" and ended.summary["hits"] >= scored


def test_the_demo_client_prints_values(started):
    said = started.compose("--profile", "demo", "run", "--rm", "-T", "demo", timeout=600)
    assert "300 rows, 600 sequences" in said
    assert len(re.findall(r"^ +\d +-\d+\.\d{3} +-\d+\.\d{3}$", said, re.M)) == 5


def test_compose_accepts_every_profile(project):
    profiles = [part for name in ("gpu", "s3", "monitoring", "demo") for part in ("--profile", name)]
    config = project.compose(*profiles, "config", "--services").split()
    assert set(config) == {"reflogp", "reflogp-gpu", "s3-key", "s3", "bucket", "prometheus", "grafana", "demo"}
