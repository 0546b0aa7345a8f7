"""examples/clusters: the manifests against Kubernetes' own schemas, the Slurm scripts as they run."""

from __future__ import annotations

import json
import os
import shutil
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


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text(encoding="utf-8")))


def deployment() -> dict[str, Any]:
    [found] = [document for document in documents() if document["kind"] == "Deployment"]
    return found["spec"]["template"]["spec"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_manifests_are_what_kubernetes_takes(release):
    for document in documents():
        validate(document, release, strict=True)


def test_what_the_manifests_name_exists():
    pod = deployment()
    [container] = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) >= IMAGE_FOLDERS
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    claims = {document["metadata"]["name"] for document in documents() if document["kind"] == "PersistentVolumeClaim"}
    assert {
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    } == claims
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    [service] = [document for document in documents() if document["kind"] == "Service"]
    assert all(port["targetPort"] in ports for port in service["spec"]["ports"])
    assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} <= set(ports)
    assert "REFLOGP_PORT=8311" in (REPOSITORY / "docker" / "Dockerfile").read_text() and ports == {"http": 8311}
    [pods] = [document["spec"]["template"] for document in documents() if document["kind"] == "Deployment"]
    assert service["spec"]["selector"] == pods["metadata"]["labels"]


def test_a_service_named_reflogp_sets_no_setting(monkeypatch):
    """Kubernetes gives pods REFLOGP_PORT=tcp://… for it, unless the pod says not to."""
    assert deployment()["enableServiceLinks"] is False
    monkeypatch.setenv("REFLOGP_PORT", "tcp://10.0.0.1:8311")
    with pytest.raises(ValueError, match="port"):
        ServerSettings()


def test_the_manifests_settings_are_settings_of_the_service(monkeypatch):
    [container] = deployment()["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    names = {name.removeprefix("REFLOGP_").lower() for name in given}
    assert names <= set(ServerSettings.model_fields)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = ServerSettings()
    assert settings.references["sft"].model == "/models/sft"
    assert str(settings.store) == "/store"


TRAIN = """
import json, os, sys
from reflogp.client import Client
with Client(os.environ["REFLOGP_URL"]) as client:
    scores = client.score("ref", [[5, 6, 7]], [[8, 9]])
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
print(json.dumps({"values": len(scores.token_logps[0]), "gpus": gpus, "kept": sorted(set(os.environ) & {"REFLOGP_TOKENS"})}))
sys.exit(int(sys.argv[1]))
"""


def environment(folder: Path) -> dict[str, str]:
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "REFLOGP_CACHE_DIR": str(folder / "cache"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 3])
def test_a_service_beside_a_training_run(status, reference_folder, tmp_path):
    """The run finds the service and its token, has the other GPUs, and gives the job its exit status; nothing is left."""
    found = {
        **environment(tmp_path),
        "REFLOGP_STORE": str(tmp_path / "logps"),
        "REFLOGP_DTYPE": "float32",
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(tmp_path),
        "REFLOGP_ON_CPU": "1",
    }
    command = [str(CLUSTERS / "slurm-service.sh"), str(reference_folder), sys.executable, "-c", TRAIN, str(status)]
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"values": 2, "gpus": "", "kept": []}
    assert not list(tmp_path.glob("tmp.*"))
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if f"{tmp_path}/logps" in (process.info["cmdline"] or [])
    ]


@pytest.mark.slow
def test_a_service_that_cannot_start_ends_the_job_with_its_log(tmp_path):
    command = [str(CLUSTERS / "slurm-service.sh"), str(tmp_path / "no-model"), "true"]
    done = subprocess.run(
        command, env={**environment(tmp_path), "REFLOGP_ON_CPU": "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "no-model" in done.stderr


@pytest.mark.parametrize(
    ("gpus", "words"), [("", ["model", "true"]), ("0", ["model", "true"]), ("0,1", ["model"]), ("0,1", [])]
)
def test_a_job_that_cannot_share_its_gpus_ends_at_once(gpus, words, tmp_path):
    command = [str(CLUSTERS / "slurm-service.sh"), *words]
    found = {**environment(tmp_path), "CUDA_VISIBLE_DEVICES": gpus}
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=60, check=False)
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
    found = {**environment(tmp_path), "SLURM_JOB_NODELIST": "nodes-of-the-job", "SLURM_JOB_ID": str(os.getpid())}
    found |= {"RAY_AUTH_MODE": "disabled", "REFLOGP_MARK": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    ray_folder = tempfile.mkdtemp(prefix="r")  # short, for the paths of Ray's sockets
    found["RAY_TMPDIR"] = ray_folder
    command = [str(CLUSTERS / "slurm-score.sh"), str(reference_folder), str(data), "--format", "tokens"]
    command += ["--store", str(tmp_path / "logps"), "--dtype", "float32"]
    try:
        done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        [reference] = Store(tmp_path / "logps").references()
        assert len(rows_of(tmp_path / "logps", reference.reference_id)) == 24
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)
        for process in marked(tmp_path):
            process.kill()


def marked(folder: Path) -> list[psutil.Process]:
    """Processes that the script started, which Slurm would end with the job."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("REFLOGP_MARK") == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found
