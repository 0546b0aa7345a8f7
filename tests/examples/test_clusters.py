"""examples/clusters: the manifests against Kubernetes' own schemas, the Slurm scripts as they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from kubernetes_validate import validate

from reflogp.service.settings import ServerSettings
from reflogp.store import Store
from tests.conftest import REPOSITORY, write_rows
from tests.scoring.stored_rows import rows_of
from tests.service.serving import token_rows

CLUSTERS = REPOSITORY / "examples" / "clusters"
#: The oldest release of Kubernetes with support from its vendors, and the newest that the validator knows.
RELEASES = ("1.31", "1.37")
#: What the image (docker/Dockerfile, docker/start.py) writes to and reads.
IMAGE_FOLDERS = {"/store", "/state", "/cache", "/models", "/tmp", "/secrets/service", "/secrets/monitoring"}
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text(encoding="utf-8")))


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [document for document in DOCUMENTS if document["kind"] == kind]


[PODS] = [document["spec"]["template"] for document in of_kind("Deployment")]
[CONTAINER] = PODS["spec"]["containers"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_manifests_are_what_kubernetes_takes(release):
    for document in DOCUMENTS:
        validate(document, release, strict=True)


def test_what_the_manifests_name_exists():
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    volumes = {volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName") for volume in PODS["spec"]["volumes"]}
    assert set(mounts.values()) >= IMAGE_FOLDERS and mounts.keys() == volumes.keys()
    assert set(filter(None, volumes.values())) == {claim["metadata"]["name"] for claim in of_kind("PersistentVolumeClaim")}
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert "REFLOGP_PORT=8311" in (REPOSITORY / "docker" / "Dockerfile").read_text() and ports == {"http": 8311}
    [service] = of_kind("Service")
    probes = [CONTAINER[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {*probes, *(port["targetPort"] for port in service["spec"]["ports"])} <= ports.keys()
    assert service["spec"]["selector"] == PODS["metadata"]["labels"]


def test_a_service_named_reflogp_sets_no_setting(monkeypatch):
    """Kubernetes gives pods REFLOGP_PORT=tcp://… for it, unless the pod says not to."""
    assert PODS["spec"]["enableServiceLinks"] is False
    monkeypatch.setenv("REFLOGP_PORT", "tcp://10.0.0.1:8311")
    with pytest.raises(ValueError, match="port"):
        ServerSettings()


def test_the_manifests_settings_are_settings_of_the_service(monkeypatch):
    for entry in CONTAINER["env"]:
        assert entry["name"].removeprefix("REFLOGP_").lower() in ServerSettings.model_fields
        monkeypatch.setenv(entry["name"], entry["value"])
    settings = ServerSettings()
    assert (settings.references["sft"].model, str(settings.store)) == ("/models/sft", "/store")


TRAIN = """
import json, os, sys
from reflogp.client import Client
with Client(os.environ["REFLOGP_URL"]) as client:
    scores = client.score("ref", [[5, 6, 7]], [[8, 9]])
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
print(json.dumps({"values": len(scores.token_logps[0]), "gpus": gpus, "kept": sorted(set(os.environ) & {"REFLOGP_TOKENS"})}))
sys.exit(int(sys.argv[1]))
"""


def run(script: str, *words: object, seconds: float, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a script where programs in `folder` are found first."""
    own = {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command, given = [CLUSTERS / script, *map(str, words)], {**os.environ, **own, **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 3])
def test_a_service_beside_a_training_run(status, reference_folder, tmp_path):
    """The run finds the service and its token, has the other GPUs, and gives the job its exit status; nothing is left."""
    on_cpu = {"REFLOGP_ON_CPU": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    settings = {"REFLOGP_STORE": f"{tmp_path}/logps", "REFLOGP_DTYPE": "float32"}
    words = (reference_folder, sys.executable, "-c", TRAIN, status)
    done = run("slurm-service.sh", *words, seconds=300, folder=tmp_path, **on_cpu, **settings)
    assert done.returncode == status, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"values": 2, "gpus": "", "kept": []}
    assert not list(tmp_path.glob("tmp.*"))
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not any(f"{tmp_path}/logps" in command for command in commands)


@pytest.mark.slow
def test_a_service_that_cannot_start_ends_the_job_with_its_log(tmp_path):
    done = run("slurm-service.sh", tmp_path / "no-model", "true", seconds=120, folder=tmp_path, REFLOGP_ON_CPU="1")
    assert done.returncode == 1 and "no-model" in done.stderr


@pytest.mark.parametrize(
    ("gpus", "words"), [("", ["model", "true"]), ("0", ["model", "true"]), ("0,1", ["model"]), ("0,1", [])]
)
def test_a_job_that_cannot_share_its_gpus_ends_at_once(gpus, words, tmp_path):
    done = run("slurm-service.sh", *words, seconds=60, folder=tmp_path, CUDA_VISIBLE_DEVICES=gpus)
    assert done.returncode == 2
    assert ("need a GPU each" if len(words) == 2 else "usage:") in done.stderr


#: In place of Slurm's programs, which need daemons: they take the options that the script gives, and refuse others.
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames nodes-of-the-job" ] || exit 2
printf '127.0.0.1\\nlocalhost\\n'
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
    case $1 in
        --nodes=1 | --ntasks=1 | --overlap | --nodelist=127.0.0.1 | --nodelist=localhost) shift ;;
        *) echo "srun: unrecognized option '$1'" >&2; exit 2 ;;
    esac
done
exec "$@"
"""


@pytest.mark.slow
def test_a_dataset_on_all_nodes(reference_folder, tmp_path):
    """Two Ray nodes on this machine, started as the script starts them; the values are in the store, and nothing is left."""
    for name, content in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    data = write_rows(tmp_path / "rows.jsonl", token_rows(12, 5))
    job = {"SLURM_JOB_NODELIST": "nodes-of-the-job", "SLURM_JOB_ID": str(os.getpid()), "CUDA_VISIBLE_DEVICES": ""}
    words = (reference_folder, data, "--format", "tokens", "--store", tmp_path / "logps", "--dtype", "float32")
    # A short name, for the paths of Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as ray_folder:
        own = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": ray_folder, "REFLOGP_MARK": str(tmp_path)}
        try:
            done = run("slurm-score.sh", *words, seconds=400, folder=tmp_path, **job, **own)
        finally:
            for process in psutil.process_iter(["environ"]):  # which Slurm would end with the job
                if (process.info["environ"] or {}).get("REFLOGP_MARK") == str(tmp_path):
                    process.kill()
    assert done.returncode == 0, done.stderr[-3000:]
    [reference] = Store(tmp_path / "logps").references()
    assert len(rows_of(tmp_path / "logps", reference.reference_id)) == 24
