"""X-Request-Id: from the client through the service into the logs of the service and of its workers, and back."""

import json
import random
import re
import string

import httpx
import pytest

from reflogp.client import Client, protocol
from tests.conftest import write_rows
from tests.service.serving import float32, running, settings_file, token_rows, wait_for, wait_until


@pytest.fixture(scope="module")
def service(reference_folder, tmp_path_factory, warm_python):
    folder = tmp_path_factory.mktemp("request-ids")
    file = settings_file(folder, folder / "store", {"ref": float32(reference_folder)}, dataset_roots=[str(folder)])
    write_rows(folder / "rows.jsonl", token_rows(3, 0))
    with running("--config", file, warm=warm_python) as service:
        service.folder = folder
        service.worker_ready()
        yield service


def lines_about(service, request: str) -> list[str]:
    return [line for line in service.log if f"[request {request}]" in line]


def test_every_answer_has_the_callers_id(service):
    """Also answers that no route gives: unknown paths, wrong methods, other hosts, bad bodies, pages."""
    for number, (method, path, more) in enumerate(
        [
            ("GET", "/healthz", {}),
            ("GET", "/v1/references", {}),
            ("GET", "/nothing-here", {}),
            ("PUT", "/v1/references", {}),
            ("POST", "/v1/jobs", {"json": {"dataset": 1}}),
            ("POST", "/v1/score", {"content": b"x", "headers": {"content-type": "text/plain"}}),
            ("GET", "/v1/references", {"headers": {"host": "elsewhere.example"}}),
            ("GET", "/", {}),
        ]
    ):
        headers = {**more.pop("headers", {}), "x-request-id": f"mine-{number}"}
        answer = httpx.request(method, service.url + path, headers=headers, **more)
        assert answer.headers.get_list("x-request-id") == [f"mine-{number}"], (method, path, answer)


def test_ids_that_could_not_be_searched_for_are_replaced(service):
    draw = random.Random(3)
    bad = ["", "a b", "a" * 129, "é".encode(), "x\ty", "[request y]", "a,b", "%0a"]
    bad += ["".join(draw.choices(string.punctuation.translate({ord(c): None for c in "._:-"}), k=5)) for _ in range(20)]
    seen = set()
    for word in bad:
        answer = httpx.get(
            f"{service.url}/healthz", headers=[(b"x-request-id", word if isinstance(word, bytes) else word.encode())]
        )
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"]), word
        seen.add(answer.headers["x-request-id"])
    assert len(seen) == len(bad)


def test_the_workers_log_names_the_request(service):
    with Client(service.url) as client:
        client.score("ref", [[5, 6, 7]], [[8, 9]], cache_read=False)
    body = {"sequences": [{"prompt_ids": [5, 6], "completion_ids": [7, 8]}]}
    answer = httpx.post(
        f"{service.url}/v1/score?reference=ref&cache_read=false", json=body, headers={"x-request-id": "trace-17"}
    )
    assert answer.status_code == 200, answer.text
    wait_until(lambda: lines_about(service, "trace-17"))
    [line] = lines_about(service, "trace-17")
    assert "reflogp.worker scored 1 sequence, 4 tokens" in line


def test_the_log_leads_from_a_submission_to_its_job(service):
    body = {"dataset": {"path": str(service.folder / "rows.jsonl")}, "reference": "ref", "format": "tokens"}
    answer = httpx.post(f"{service.url}/v1/jobs", json=body, headers={"x-request-id": "submit-5"})
    job = answer.raise_for_status().json()["id"]
    wait_until(lambda: lines_about(service, "submit-5"))
    assert any(f"[job {job}]" in line and "job submitted" in line for line in lines_about(service, "submit-5"))
    with Client(service.url) as client:
        wait_for(client, job, lambda found: found.state == "done")


def test_a_clients_attempts_have_one_id_and_its_error_names_it():
    call, other = protocol.Call("GET", "/v1/references"), protocol.Call("GET", "/v1/references")
    sent = [protocol.arguments(entry)["headers"]["x-request-id"] for entry in (call, call, other)]
    assert sent[0] == sent[1] != sent[2]
    body = {"detail": "it broke", "next_step": ""}
    for status, words in ((500, "it broke (request r-1)"), (503, "it broke (request r-1)"), (404, "it broke")):
        assert words in str(protocol.error_of(httpx.Response(status, headers={"x-request-id": "r-1"}, json=body)))
    assert "request" not in str(protocol.error_of(httpx.Response(404, headers={"x-request-id": "r-1"}, json=body)))


def test_json_logs_have_it(serve, tmp_path):
    write_rows(tmp_path / "rows.jsonl", token_rows(1, 1))
    with serve(log_format="json", dataset_roots=[str(tmp_path)]) as service:
        body = {"dataset": {"path": str(tmp_path / "rows.jsonl")}, "reference": "ref", "format": "tokens"}
        httpx.post(f"{service.url}/v1/jobs", json=body, headers={"x-request-id": "mine"}).raise_for_status()
        wait_until(lambda: any('"mine"' in line for line in service.log))
        found = [json.loads(line) for line in list(service.log) if line.startswith("{")]
    assert [entry["request"] for entry in found if entry["message"].startswith("job submitted")] == ["mine"]
