"""Requests that mean harm, over HTTP, to a service with tokens and narrow bounds: all refused, none kills it."""

import gzip
import json
import socket
import time

import httpx
import pytest

from tests.service.serving import float32, running, settings_file, wait_until

SCOPES = {"reader": ["read"], "jobber": ["jobs"], "trainer": ["online"], "scorer": ["score"], "boss": ["admin"]}
TOKENS = {name: f"token-of-{name}" for name in SCOPES}
OF_JOBS, ONLINE = {"jobber", "scorer", "boss"}, {"trainer", "scorer", "boss"}


@pytest.fixture(scope="module")
def service(place, reference_folder, warm_python):
    bounds = {"max_body_bytes": 200_000, "max_json_bytes": 200_000, "max_upload_bytes": 300_000, "max_uploads_bytes": 400_000}
    bounds |= {"max_score_sequences": 100, "max_score_tokens": 10_000}
    tokens = {name: (token, SCOPES[name]) for name, token in TOKENS.items()}
    file = settings_file(place, place / "store", {"ref": float32(reference_folder)}, tokens, **bounds)
    with running("--config", file, warm=warm_python) as found:
        yield found


@pytest.fixture
def ask(service):
    """ask(method, path, token="boss", **options) -> answer; every refusal is a problem with a next step."""

    def send(method, path, token="boss", headers=None, **options):
        kind = "application/octet-stream" if method == "PUT" else "application/json"
        headers = {**({"authorization": f"Bearer {TOKENS[token]}"} if token else {}), "content-type": kind, **(headers or {})}
        answer = httpx.request(method, service.url + path, headers=headers, timeout=20, **options)
        if answer.is_error:
            assert answer.headers["content-type"] == "application/problem+json" and answer.json()["next_step"], answer.text
            assert "Traceback" not in answer.text
        return answer

    return send


def job(**dataset):
    return {"reference": "ref", "dataset": dataset}


@pytest.mark.parametrize(
    ("method", "path", "options", "statuses"),
    [
        ("PUT", "/v1/uploads/..%2f..%2fevil.jsonl", {"content": b"{}"}, (404, 422)),
        ("PUT", "/v1/uploads/.evil.jsonl", {"content": b"{}"}, (422,)),
        ("PUT", "/v1/uploads/a%00.jsonl", {"content": b"{}"}, (422,)),
        ("PUT", "/v1/uploads/big.jsonl", {"content": b"x" * 300_001}, (413,)),
        ("POST", "/v1/jobs", {"content": b"[" * 100_000}, (422,)),
        ("POST", "/v1/jobs", {"content": b"\xff\xfe\x00"}, (422,)),
        ("POST", "/v1/jobs", {"content": b"x" * 200_001}, (413,)),
        ("POST", "/v1/jobs", {"json": {**job(upload="a.jsonl"), "trust_remote_code": True}}, (422,)),
        ("POST", "/v1/jobs", {"json": {**job(upload="a.jsonl"), "model": "/etc"}}, (422,)),
        ("POST", "/v1/jobs", {"json": {**job(upload="a.jsonl"), "priority": 10**30}}, (422,)),
        ("POST", "/v1/jobs", {"content": json.dumps({**job(upload="a.csv"), "ld_alpha": 0}).replace(": 0", ": 1e400")}, (422,)),
        ("POST", "/v1/jobs", {"json": {"reference": "/etc/passwd", "dataset": {"upload": "a.jsonl"}}}, (404,)),
        ("POST", "/v1/jobs?reference=nobody", {"content": b"{}", "headers": {"content-type": "text/csv"}}, (404,)),
        ("POST", "/v1/jobs", {"content": b"a", "headers": {"content-type": "application/x-python-pickle"}}, (415,)),
        ("GET", "/v1/jobs?state=%27%3B%20drop%20table%20job", {}, (422,)),
        ("GET", "/v1/jobs/%27%20or%201=1/result", {}, (404,)),
        ("GET", "/v1/jobs/..%2f..%2fstate%2fjobs.sqlite/result", {}, (404,)),
        ("GET", "/static/..%2f..%2fsettings.py", {}, (404,)),
        ("GET", "/static/../../settings.py", {}, (404,)),
        ("GET", "/nothing", {}, (404,)),
        ("DELETE", "/v1/lookup", {}, (405,)),
        ("POST", "/v1/score?reference=ref", {"json": {"sequences": [{"prompt_ids": [-1], "completion_ids": [1]}]}}, (422,)),
        ("POST", "/v1/score?reference=ref", {"json": {"sequences": [{"prompt_ids": [2**40], "completion_ids": [1]}]}}, (422,)),
        (
            "POST",
            "/v1/score?reference=ref",
            {"json": {"sequences": [{"prompt_ids": [1] * 10_001, "completion_ids": [1]}]}},
            (413,),
        ),
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
        ("GET", "/v1/uploads", set(SCOPES)),
        ("POST", "/v1/jobs", OF_JOBS),
        ("DELETE", "/v1/jobs/none", OF_JOBS),
        ("POST", "/v1/jobs/none/retry", OF_JOBS),
        ("PUT", "/v1/uploads/a.jsonl", OF_JOBS),
        ("DELETE", "/v1/uploads/a.jsonl", OF_JOBS),
        ("POST", "/v1/score?reference=ref", ONLINE),
        ("POST", "/v1/completions", ONLINE),
        ("GET", "/v1/models", set(SCOPES)),
        ("GET", "/metrics", set(SCOPES)),
    ],
)
def test_who_may_what(ask, method, path, allowed):
    for token in TOKENS:
        assert (ask(method, path, token=token).status_code == 403) == (token not in allowed), token
    assert ask(method, path, token=None).status_code == 401
    for wrong in ("Bearer wrong", "Basic Z3Vlc3M6"):
        assert ask(method, path, token=None, headers={"authorization": wrong}).status_code == 401


def raw(service, data: bytes, wait: float = 5) -> bytes:
    """What comes back for some bytes."""
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        try:
            connection.sendall(data)
            return connection.recv(65536)
        except (TimeoutError, ConnectionError):
            return b""


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X%d: a\r\n" % n for n in range(10_000)) + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\nzz\r\n",
    ],
)
def test_heads_that_are_none_or_long(service, head):
    statuses = raw(service, head).split(b"\r\n")[0].split(b" ")[1:2]
    assert statuses in ([b"400"], [b"401"], []) or (len(head) > 50_000 and statuses in ([b"303"], [b"404"], [b"431"]))
    assert httpx.get(f"{service.url}/healthz").status_code == 200


def test_a_body_that_never_ends(service, place):
    token = f"Authorization: Bearer {TOKENS['boss']}\r\n".encode()
    token += b"Content-Type: application/octet-stream\r\n"
    endless = b"PUT /v1/uploads/long.jsonl HTTP/1.1\r\nHost: a\r\n" + token + b"Transfer-Encoding: chunked\r\n\r\n"
    assert b" 413 " in raw(
        service, endless + b"4000\r\n" + b"x" * 0x4000 + b"\r\n" + (b"10000\r\n" + b"y" * 0x10000 + b"\r\n") * 40
    )
    assert not [file for file in (place / "state" / "uploads").iterdir() if "partial" in file.name]


@pytest.mark.slow
def test_a_bomb_in_a_dataset_is_a_failed_job_and_the_next_one_works(ask, tmp_path):
    bomb = gzip.compress(b'{"prompt": "' + b"a" * 200_000_000, 9)
    assert len(bomb) < 300_000
    ask("PUT", "/v1/uploads/bomb.jsonl.gz", content=bomb)
    good = b'{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4]}\n'
    ask("PUT", "/v1/uploads/good.jsonl", content=good)
    for name, state in (("bomb.jsonl.gz", "failed"), ("good.jsonl", "done")):
        number = ask("POST", "/v1/jobs", json=job(upload=name)).json()["id"]
        while (found := ask("GET", f"/v1/jobs/{number}").json())["state"] in ("queued", "running"):
            time.sleep(0.05)
        assert found["state"] == state, found


def test_refusals_and_deletions_are_logged_with_the_tokens_name(service, ask):
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


def test_no_secret_is_logged(service, ask):
    ask("GET", "/v1/jobs")
    ask("GET", "/v1/jobs", token=None, headers={"authorization": "Bearer guessed-secret"})
    assert not [line for line in service.log if "token-of" in line or "guessed-secret" in line]
