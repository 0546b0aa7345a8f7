"""What docker/ ships, as far as it needs no engine: its scripts at work, and its files against the code that they speak of."""

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from docker.start import secret, with_own_tokens
from reflogp.client import Client
from reflogp.service.settings import ServerSettings
from reflogp.store import Store
from tests.conftest import REPOSITORY
from tests.service.serving import running
from tests.store.rows import REFERENCE
from tests.store.s3 import environment_of, s3_server

DOCKER = REPOSITORY / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
DASHBOARD = json.loads((DOCKER / "grafana" / "dashboards" / "reflogp.json").read_text())
#: Where workers run is fixed by the image, and so is where it listens and where its state lies.
FIXED = {"state", "host", "port"}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a script of docker/ with its arguments."""
    return subprocess.run(
        [sys.executable, *command], cwd=DOCKER, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def content(file: str) -> str:
    return (DOCKER / file).read_text()


def test_a_secret_is_made_once(tmp_path):
    start = threading.Barrier(8)

    def make(_) -> str:
        start.wait()
        return secret(tmp_path / "token")

    with ThreadPoolExecutor(8) as threads:
        [made] = set(threads.map(make, range(8)))
    assert len(made) > 40
    assert [file.name for file in tmp_path.iterdir()] == ["token"]
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o444


def test_own_tokens_join_those_of_the_environment(tmp_path):
    for name in ("service", "monitoring"):
        (tmp_path / name).mkdir()
    team = {"name": "team", "sha256": "0" * 64, "scopes": ["read"]}
    tokens = with_own_tokens(json.dumps([team]), tmp_path)
    settings = ServerSettings(store="/store", host="0.0.0.0", tokens=json.loads(tokens))
    assert [(entry.name, entry.scopes) for entry in settings.tokens] == [
        ("team", {"read"}),
        ("service", {"admin"}),
        ("monitoring", {"read"}),
    ]
    token = (tmp_path / "service" / "token").read_text()
    assert settings.tokens[1].sha256 == hashlib.sha256(token.encode()).hexdigest()
    assert with_own_tokens(json.dumps([team]), tmp_path) == tokens  # the next start has the same ones


def test_the_demo_client_finds_what_it_uses():
    """It runs in an image only; what it imports is there."""
    from docker import submit_demo

    assert callable(submit_demo.main)


def test_tokens_that_are_no_list_are_said_to_be_none():
    told = run("start.py", "serve", REFLOGP_TOKENS="abc")
    assert told.returncode == 1 and told.stderr.startswith("REFLOGP_TOKENS: Expecting value")


def test_the_bucket_is_made_and_found_again(tmp_path):
    (tmp_path / "key").write_text("not-a-secret")
    with s3_server() as reached:
        environment = reached | {"AWS_SECRET_ACCESS_KEY_FILE": str(tmp_path / "key"), "REFLOGP_STORE": "s3://made-here/logps"}
        del environment["AWS_SECRET_ACCESS_KEY"]
        for said in ("created", "already exists"):
            done = run("make_bucket.py", **environment)
            assert (done.returncode, done.stdout) == (0, f"bucket made-here: {said}\n"), done.stderr
        with environment_of(reached):
            Store("s3://made-here/logps").create_table(REFERENCE)
        done = run("make_bucket.py", **{**environment, "REFLOGP_STORE": "/store"})
        assert done.returncode == 1 and "use the form s3://BUCKET/FOLDER" in done.stderr


@pytest.mark.slow
def test_health_check_panels_and_labels_of_a_service_that_works(tmp_path, pairs_file, reference_folder):
    with running("--store", tmp_path / "store", "--model", f"ref={reference_folder}") as service:
        service.worker_ready()
        port = service.url.rpartition(":")[2]
        assert run("healthy.py", REFLOGP_PORT=port).returncode == 0
        with Client(service.url) as client:
            assert client.watch(client.submit(pairs_file, "ref").id).state == "done"
            client.score("ref", [[1, 5, 9]], [[7, 2]])
            client.lookup("ref", [b"0" * 16])
        late = {"sequences": [{"prompt_ids": [at] * 400, "completion_ids": [2] * 50} for at in range(400)]}
        asked_for = {"reference": "ref", "deadline_ms": 10}
        assert httpx.post(f"{service.url}/v1/score", params=asked_for, json=late).status_code == 504
        exported = labels_by_sample(httpx.get(f"{service.url}/metrics").text)
    refused = run("healthy.py", REFLOGP_PORT=port)
    assert refused.returncode == 1 and "does not respond" in refused.stderr
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    in_family = re.compile(r"_(bucket|count|sum)$")
    shown = set()
    for expression in asked:
        names = re.findall(r"reflogp_\w+", expression)
        shown |= {in_family.sub("", name) for name in names}
        used = re.findall(r"by \(([^)]*)\)", expression) + re.findall(r"[{,](\w+)[=!]", expression)
        known = set().union(*(exported[name] for name in names))
        assert {label.strip() for group in used for label in group.split(",")} <= known, expression
    assert shown == {in_family.sub("", name) for name in exported}  # nothing is left out


def labels_by_sample(text: str) -> dict[str, set[str]]:
    """Names of samples -> their labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_panels_ask_the_data_source_that_is_provisioned():
    [source] = yaml.safe_load(content("grafana/provisioning/datasources/prometheus.yaml"))["datasources"]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090" and "prometheus" in COMPOSE["services"]
    [scrape] = yaml.safe_load(content("prometheus/prometheus.yaml"))["scrape_configs"]
    [where] = scrape["dns_sd_configs"]
    for name in ("reflogp", "reflogp-gpu"):
        assert COMPOSE["services"][name]["networks"]["default"]["aliases"] == where["names"]
        assert COMPOSE["services"][name]["ports"][0].endswith(f":{where['port']}")
    mounted = {volume.split(":")[1] for volume in COMPOSE["services"]["prometheus"]["volumes"]}
    assert str(Path(scrape["authorization"]["credentials_file"]).parent) in mounted


def test_compose_names_only_settings_that_there_are():
    named = {name.split("=")[0] for name in COMPOSE["x-settings"]}
    ours = {name.removeprefix("REFLOGP_").lower() for name in named if name.startswith("REFLOGP_")}
    assert {"store", "references", "tokens"} <= ours <= ServerSettings.model_fields.keys() - FIXED


def test_everything_is_pinned_confined_and_on_loopback_only():
    for name, service in COMPOSE["services"].items():
        image = re.sub(r"\$\{\w+:-([^}]+)\}", r"\1", service["image"])
        assert re.search(r":(cpu|cuda|v?\d[\w.]+|RELEASE\.[\w-]+)$", image), image
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert name == "s3" or (service["read_only"] and service["cap_drop"] == ["ALL"])
        assert all(re.sub(r"\$\{\w+:-([^}]+)\}", r"\1", port).startswith("127.0.0.1:") for port in service.get("ports", []))
    users = re.findall(r"^USER (\S+)", content("Dockerfile"), re.M)
    assert "10001:10001" in users and set(users) <= {"root", "10001:10001"}


def test_environment_files_speak_of_the_same_project():
    files = {name: dict(re.findall(r"^(\w+)=(.*)$", content(name), re.M)) for name in (".env", "s3.env")}
    assert files[".env"]["COMPOSE_PROJECT_NAME"] == files["s3.env"].pop("COMPOSE_PROJECT_NAME")
    taken = {name.split("=")[0] for name in COMPOSE["x-settings"]}
    assert files["s3.env"].keys() <= taken
    assert set(COMPOSE["services"]["bucket"]["environment"]) <= files["s3.env"].keys()
