"""Requests that mean harm, over HTTP, to a service with tokens and narrow bounds: all refused, none kills it."""

import gzip
import json

import httpx
import pytest

from reflogp.client import Client
from tests.conftest import write_rows
from tests.service.serving import float32, running, settings_file, token_rows, wait_until

SCOPES = {"reader": "read", "jobber": "jobs", "trainer": "online", "scorer": "score", "boss": "admin"}
TOKENS = {name: f"token-of-{name}" for name in SCOPES}
OF_JOBS, ONLINE = {"jobber", "scorer", "boss"}, {"trainer", "scorer", "boss"}


@pytest.fixture(scope="module")
def service(place, reference_folder, warm_python):
    bounds = {"max_body_bytes": 200_000, "max_json_bytes": 200_000, "max_upload_bytes": 300_000, "max_uploads_bytes": 400_000}
    bounds |= {"max_score_sequences": 100, "max_score_tokens": 10_000}
    tokens = {name: (token, [SCOPES[name]]) for name, token in TOKENS.items()}
    file = settings_file(place, place / "store", {"ref": float32(reference_folder)}, tokens, **bounds)
    with running("--config", file, warm=warm_python) as found:
        yield found


@pytest.fixture
def ask(service):
    """ask(method, path, token="boss", **options) -> answer; every refusal is a problem with a next step."""

    def send(method, path, token="boss", headers=None, **options):
        given = {"content-type": "application/octet-stream" if method == "PUT" else "application/json"}
        if token:
            given["authorization"] = f"Bearer {TOKENS[token]}"
        answer = httpx.request(method, service.url + path, headers={**given, **(headers or {})}, timeout=20, **options)
        if answer.is_error:
            assert answer.headers["content-type"] == "application/problem+json" and answer.json()["next_step"], answer.text
            assert "Traceback" not in answer.text
        return answer

    return send


def job(**dataset):
    return {"reference": "ref", "dataset": dataset}


def prompt(ids):
    return {"sequences": [{"prompt_ids": ids, "completion_ids": [1]}]}


@pytest.mark.parametrize(
    ("method", "path", "options", "statuses"),
    [
        ("PUT", "/v1/uploads/..%2f..%2fevil.jsonl", {"content": b"{}"}, (404, 422)),
        ("PUT", "/v1/uploads/a%00.jsonl", {"content": b"{}"}, (422,)),
        ("PUT", "/v1/uploads/long.jsonl", {"content": (b"x" * 65_536 for _ in range(6))}, (413,)),
        ("POST", "/v1/jobs", {"content": b"[" * 100_000}, (422,)),
        ("POST", "/v1/jobs", {"content": b"x" * 200_001}, (413,)),
        ("POST", "/v1/jobs", {"json": {**job(upload="a.jsonl"), "trust_remote_code": True}}, (422,)),
        ("POST", "/v1/jobs", {"json": {**job(upload="a.jsonl"), "priority": 10**30}}, (422,)),
        ("POST", "/v1/jobs", {"content": json.dumps({**job(upload="a.csv"), "ld_alpha": 0}).replace(": 0", ": 1e400")}, (422,)),
        ("POST", "/v1/jobs", {"json": {"reference": "/etc/passwd", "dataset": {"upload": "a.jsonl"}}}, (404,)),
        ("POST", "/v1/jobs?reference=nobody", {"content": b"{}", "headers": {"content-type": "text/csv"}}, (404,)),
        ("GET", "/v1/jobs?state=%27%3B%20drop%20table%20job", {}, (422,)),
        ("GET", "/v1/jobs/%27%20or%201=1/result", {}, (404,)),
        ("GET", "/v1/jobs/..%2f..%2fstate%2fjobs.sqlite/result", {}, (404,)),
        ("GET", "/static/..%2f..%2fsettings.py", {}, (404,)),
        ("POST", "/v1/score?reference=ref", {"json": prompt([-1])}, (422,)),
        ("POST", "/v1/score?reference=ref", {"json": prompt([2**40])}, (422,)),
        ("POST", "/v1/score?reference=ref", {"json": prompt([1] * 10_001)}, (413,)),
        ("POST", "/v1/score?reference=ref&temperature=inf", {"json": {"sequences": []}}, (422,)),
    ],
)
def test_requests_that_do_not_fit(ask, method, path, options, statuses):
    answer = ask(method, path, **options)
    assert answer.status_code in statuses, (answer.status_code, answer.text)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/jobs", set(SCOPES)),
        ("POST", "/v1/jobs", OF_JOBS),
        ("DELETE", "/v1/jobs/none", OF_JOBS),
        ("POST", "/v1/jobs/none/retry", OF_JOBS),
        ("PUT", "/v1/uploads/a.jsonl", OF_JOBS),
        ("DELETE", "/v1/uploads/a.jsonl", OF_JOBS),
        ("POST", "/v1/score?reference=ref", ONLINE),
        ("POST", "/v1/completions", ONLINE),
        ("GET", "/metrics", set(SCOPES)),
    ],
)
def test_who_may_what(ask, method, path, allowed):
    for token in TOKENS:
        assert (ask(method, path, token=token).status_code == 403) == (token not in allowed), token
    assert ask(method, path, token=None).status_code == 401
    for wrong in ("Bearer wrong", "Basic Z3Vlc3M6"):
        assert ask(method, path, token=None, headers={"authorization": wrong}).status_code == 401


@pytest.mark.slow
def test_a_bomb_in_a_dataset_is_a_failed_job_and_the_next_one_works(service, tmp_path):
    bomb, good = tmp_path / "bomb.jsonl.gz", write_rows(tmp_path / "good.jsonl", token_rows(1, seed=0))
    bomb.write_bytes(gzip.compress(b'{"prompt": "' + b"a" * 200_000_000, 9))
    assert bomb.stat().st_size < 300_000
    with Client(service.url, token=TOKENS["boss"]) as client:
        for file, state in ((bomb, "failed"), (good, "done")):
            job = client.watch(client.submit(file, "ref").id)
            assert job.state == state, job


def test_refusals_and_deletions_are_logged_with_the_tokens_name_and_no_secret(service, ask):
    for number, (method, token, headers, status, by) in enumerate(
        (
            ("POST", "reader", {}, 403, "token reader"),
            ("GET", None, {"authorization": "Bearer guessed-secret"}, 401, "no known token"),
            ("GET", "boss", {"sec-fetch-site": "cross-site"}, 403, "the request was made from a page on another site"),
        )
    ):
        assert ask(method, "/v1/jobs", token=token, headers={"x-request-id": f"r-{number}", **headers}).status_code == status
        line = f"{method} /v1/jobs refused with status {status}: {by} [request r-{number}]"
        wait_until(lambda line=line: any(line in said for said in service.log), 10)
    ask("PUT", "/v1/uploads/gone.jsonl", content=b"{}")
    assert ask("DELETE", "/v1/uploads/gone.jsonl", token="jobber", headers={"x-request-id": "r-9"}).status_code == 204
    wait_until(lambda: any("upload gone.jsonl deleted: token jobber [request r-9]" in said for said in list(service.log)), 10)
    assert not [line for line in service.log if "token-of" in line or "guessed-secret" in line]
