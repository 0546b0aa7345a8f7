"""A page of another site can do nothing, a signed-out browser neither; answers show no secret. Over HTTP, to real services."""

import itertools
import json
import re
import socket
from urllib.parse import quote

import httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from reflogp.client import Client, Uploaded
from reflogp.service.app import create_app
from reflogp.service.settings import ServerSettings
from tests.hostile_text import HOSTILE
from tests.service.serving import float32, running, settings_file

PROXIED = "logps.example.org"
TOKENS = {"reader": "token-of-reader", "boss": "token-of-boss"}
SCOPED = {"reader": (TOKENS["reader"], ["read"]), "boss": (TOKENS["boss"], ["admin"])}
UNSAFE = ["POST", "PUT", "PATCH", "DELETE"]
#: Headers of every answer, beside a Content-Security-Policy of its own.
HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
#: What a page can make a browser send: nothing, or one of the types of forms, without asking first; JSON where it may ask.
BODIES = [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/json"]
SIMPLE = BODIES[:4]
#: What a browser adds; {own} is the host and port that the service is asked by, {port} its port.
ELSEWHERE = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "http://127.0.0.1"},
    {"origin": "http://{own}.evil.example"},
    {"origin": "http://{own}@evil.example"},
    {"origin": "chrome-extension://{own}"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "something-new"},
    {"sec-fetch-site": "cross-site", "origin": "http://{own}"},
]
#: Names that lead to this machine and are not its own (DNS rebinding); the browser takes the page for one of ours.
REBOUND = ["evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "evil@127.0.0.1", "[::1", ""]
ELSEWHERE += [{"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"} for host in REBOUND]


@pytest.fixture(scope="module")
def opened(tmp_path_factory, reference_folder, warm_python):
    """A service without tokens."""
    folder = tmp_path_factory.mktemp("opened")
    file = settings_file(folder, folder / "store", {"ref": float32(reference_folder)}, dataset_uris=["s3://team/prefs/"])
    with running("--config", file, warm=warm_python) as service:
        yield service


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, reference_folder, warm_python):
    """A service with tokens and an allowed host."""
    folder = tmp_path_factory.mktemp("guarded")
    models, allowed = {"ref": float32(reference_folder)}, [PROXIED, "*.team.example"]
    file = settings_file(folder, folder / "store", models, SCOPED, allowed_hosts=allowed)
    with running("--config", file, warm=warm_python) as service:
        service.worker_ready(token=TOKENS["boss"])
        yield service


@pytest.fixture(scope="module")
def routes(tmp_path_factory):
    """Every (path, methods) of the app, pages and their files included."""
    folder = tmp_path_factory.mktemp("routes")
    app = create_app(ServerSettings(store=str(folder / "store"), state=folder / "state"))
    found = list(routes_of(app.router))
    documented = set(app.openapi()["paths"])
    assert documented <= {path for path, _ in found} and len(found) > 20
    return found


def routes_of(router):
    """Every (path, methods) of a router and of those that it includes."""
    for route in router.routes:
        inner = getattr(route, "original_router", None)  # newer versions of FastAPI keep what was included as it is
        if inner is not None:
            yield from routes_of(inner)
        else:
            yield route.path, set(route.methods)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {TOKENS[name]}"}


def sign_in(client: httpx.Client, name: str) -> dict[str, str]:
    """The cookies of a browser that has signed in."""
    origin = {"origin": str(client.base_url).rstrip("/")}
    assert client.post("/signin", data={"token": TOKENS[name]}, headers=origin).status_code == 303
    return dict(client.cookies)


def a_failed_job(url: str, token: str | None = None) -> str:
    """Id of a job that can be retried."""
    kind = {"content-type": "application/octet-stream"}
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"} if token else {}) as client:
        client.put("/v1/uploads/kept.jsonl", content=b'{"a": 1}\n', headers=kind).raise_for_status()
    with Client(url, token=token) as client:
        return client.watch(client.submit(Uploaded("kept.jsonl"), "ref").id).id


def filled(path: str, job: str) -> str:
    """A route's path about things that are there, so that a request that passes would change something."""
    return re.sub(r"{[^}]*}", "x", path.replace("{job_id}", job).replace("{name}", "kept.jsonl"))


def body_of(path: str) -> bytes:
    """A body that the route would take."""
    return {
        "/v1/jobs": b'{"reference": "ref", "dataset": {"upload": "kept.jsonl"}, "max_length": 77}',
        "/v1/score": b'{"sequences": [{"prompt_ids": [1, 5], "completion_ids": [7]}]}',
        "/v1/lookup": b'{"keys": []}',
        "/signin": b"token=" + TOKENS["boss"].encode(),
    }.get(path, b"{}")


def state_of(service, headers=None) -> list:
    """What an effect would change."""
    paths = ("/v1/jobs", "/v1/uploads", "/v1/references")
    return [httpx.get(service.url + path, headers=headers).json() for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["opened", "guarded, by a cookie", "guarded, by a token"])
def test_every_unsafe_request_of_another_site_is_refused(request, routes, which):
    """A new route is covered: the routes are those of the app."""
    service = request.getfixturevalue(which.split(",")[0])
    boss = bearer("boss") if "guarded" in which else {}
    job = a_failed_job(service.url, TOKENS["boss"] if boss else None)
    before = state_of(service, boss)
    own = service.url.removeprefix("http://")
    with httpx.Client(base_url=service.url, headers=boss if which.endswith("token") else None) as client:
        if which.endswith("cookie"):
            sign_in(client, "boss")
        requests = itertools.product([path for path, _ in routes], UNSAFE, ELSEWHERE)
        for (path, method, headers), kind in zip(requests, itertools.cycle(BODIES), strict=False):
            given = {name: value.format(own=own, port=own.rpartition(":")[2]) for name, value in headers.items()}
            given |= {"content-type": kind} if kind else {}
            query = "?reference=ref&cache_write=true" if path.startswith("/v1/") else ""
            answer = client.request(method, filled(path, job) + query, content=body_of(path), headers=given)
            what = (method, path, given, answer.status_code, answer.text)
            assert answer.status_code == 403, what
            assert "set-cookie" not in answer.headers and "access-control-allow-origin" not in answer.headers, what
        if which.endswith("cookie"):
            assert client.get("/v1/jobs").status_code == 200  # nobody was signed out
    assert state_of(service, boss) == before


def test_every_route_with_a_body_names_what_it_takes(opened, routes):
    """Without a content type, and for those of forms: 415. With the route's own the body is looked at."""
    client = httpx.Client(base_url=opened.url)
    spec = client.get("/openapi.json").json()
    job, before, seen = a_failed_job(opened.url), state_of(opened), 0
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            if "requestBody" not in operation:
                continue
            seen += 1
            url = f"{filled(path, job)}?reference=none"
            documented = list(operation["requestBody"]["content"])
            for kind in [*SIMPLE, "application/x-unheard-of", "", "application"]:
                headers = {} if kind is None else {"content-type": kind}
                answer = client.request(method, url, content=body_of(path), headers=headers)
                assert answer.status_code == 415, (method, path, kind, answer.text)
                assert documented[0] in answer.json()["next_step"] and documented[0] in answer.headers["accept"]
            assert "415" in operation["responses"]
            for kind in [*documented, documented[0].upper(), f"{documented[0]}; charset=utf-8"]:
                answer = client.request(method, url, content=b"", headers={"content-type": kind})
                assert answer.status_code not in (403, 415), (method, path, kind, answer.text)
    assert seen >= 4
    assert client.post("/signin", headers={"origin": opened.url}, content=b"token=x").status_code == 415
    assert state_of(opened) == before


def test_a_page_of_another_site_reads_nothing(opened, routes):
    """No part of ours becomes part of another page; a link of another page may open ours."""
    job = a_failed_job(opened.url)
    client = httpx.Client(base_url=opened.url)  # one for all: making one takes longer than a request
    for path, methods in routes:
        if "GET" not in methods:
            continue
        for site, mode, dest in itertools.product(
            ("cross-site", "same-site"), ("no-cors", "cors", "navigate"), ("script", "image", "iframe", "object", "empty")
        ):
            headers = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": dest}
            answer = client.get(filled(path, job), headers=headers)
            assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers, (path, headers)
        for host in ("evil.example", "127.0.0.1.evil.example"):
            assert client.get(filled(path, job), headers={"host": host}).status_code == 403
        opening = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        for headers in (opening, opening | {"sec-fetch-site": "none"}, {"sec-fetch-site": "same-origin"}, {}):
            assert client.get(filled(path, job), headers=headers).status_code != 403, (path, headers)
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = client.options("/v1/jobs", headers=preflight)
    assert answer.status_code >= 400 and not [name for name in answer.headers if name.startswith("access-control")]


def test_every_answer_has_safe_headers_and_the_callers_request_id(opened, guarded, routes):
    job, mine = a_failed_job(opened.url), {"x-request-id": "mine"}
    client, other = (httpx.Client(base_url=service.url, headers=mine) for service in (opened, guarded))
    answers = [client.get(filled(path, job)) for path, methods in routes if "GET" in methods]
    answers += [other.get(path) for path in ("/", "/v1/jobs", "/healthz", "/signin", "/openapi.json", "/nothing")]
    answers += [client.request(method, "/v1/lookup") for method in (*UNSAFE, "OPTIONS", "HEAD", "TRACE")]
    answers += [client.get("/", headers={"host": "evil.example"})]
    assert {answer.status_code for answer in answers} >= {200, 401, 403, 404, 405}
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy and "default-src" in policy and "unsafe" not in policy, answer.url
        for name, value in (HEADERS | mine).items():
            assert answer.headers.get_list(name) == [value], (answer.url, name)


def test_an_unexpected_error_has_safe_headers_too(tmp_path, monkeypatch):
    app = create_app(ServerSettings(store=str(tmp_path / "store"), state=tmp_path / "state"))

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a defect")

    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        answer = client.get("/broken")
    assert answer.status_code == 500 and "defect" not in answer.text
    assert all(answer.headers[name] == value for name, value in HEADERS.items())
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


# Honest callers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"user-agent": "Prometheus/3.1.0", "host": "10.4.7.11:8311"},
        {"host": "[fd00::17]:8311", "user-agent": "kube-probe/1.31"},
        {"host": "LOCALHOST."},
        {"host": f"{PROXIED.upper()}:443", "x-forwarded-proto": "https", "x-forwarded-for": "192.0.2.7"},
        {"host": "scorer.team.example"},
        {"host": PROXIED, "origin": f"https://{PROXIED}:443"},
        {"origin": f"https://{PROXIED}", "sec-fetch-site": "same-origin"},  # a proxy that names us by an address
        {"sec-fetch-site": "none"},
    ],
)
def test_honest_callers_pass(guarded, headers):
    with httpx.Client(base_url=guarded.url, headers={**bearer("boss"), **headers}) as client:
        assert client.get("/v1/references").status_code == 200
        assert client.get("/metrics").status_code == 200 and client.get("/readyz").status_code == 200
        asked = {"sequences": [{"prompt_ids": [1, 5], "completion_ids": [7]}]}
        assert client.post("/v1/score", params={"reference": "ref"}, json=asked).status_code == 200


def test_other_hosts_are_refused_where_some_are_allowed(guarded):
    for host in ("team.example", "evil.example", "logps.example.org.evil.example", "xteam.example", "a b", "a/b"):
        answer = httpx.get(f"{guarded.url}/healthz", headers={"host": host})
        assert answer.status_code == 403 and "allowed_hosts" in answer.json()["next_step"], host


def test_http_1_0_needs_no_host(opened):
    """As load balancers probe."""
    host, port = opened.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b" 200 " in connection.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize("names", [["*"], ["https://a.example"], ["a.example:80"], ["a.*"], [""]])
def test_allowed_hosts_that_are_no_names(names):
    with pytest.raises(ValidationError, match=r"list the service's host names|is not a host name"):
        ServerSettings(store="x", allowed_hosts=names)


# Signing out


def test_a_removed_token_signs_browsers_out(tmp_path, warm_python):
    file = settings_file(tmp_path, tmp_path / "store", {}, SCOPED)
    with running("--config", file, warm=warm_python) as service:
        with httpx.Client(base_url=service.url) as client:
            copied = sign_in(client, "reader")
            assert client.get("/v1/jobs").status_code == 200
        port = service.url.rpartition(":")[2]
    file = settings_file(tmp_path, tmp_path / "store", {}, {"boss": SCOPED["boss"]})
    with running("--config", file, "--port", port, warm=warm_python) as service:
        assert httpx.get(f"{service.url}/v1/jobs", cookies=copied).status_code == 401


# Secrets


SECRET = "s3cr3tsignature"


@pytest.mark.parametrize(
    "uri",
    [
        f"https://data.example.org/a.jsonl#{SECRET}",
        f"s3://team/a.jsonl?sig={SECRET}",
        f"ftp://user:{SECRET}@host/a.jsonl",
        f"https://data.example.org/\x1b[31m?sig={SECRET}",
    ],
)
def test_a_refused_uri_is_not_told_back(opened, uri):
    answer = httpx.post(f"{opened.url}/v1/jobs", json={"reference": "ref", "dataset": {"uri": uri}})
    assert answer.status_code in (403, 422) and SECRET not in answer.text
    assert not [line for line in opened.log if SECRET in line]


# What data says


#: Without halves of surrogates, which UTF-8 has no bytes for, and with a few of the tags.
WHOLE = [ch for ch in HOSTILE if not 0xD800 <= ord(ch) <= 0xDFFF and not 0xE0004 <= ord(ch) <= 0xE007E]


def harmless(text: str, allowed: str = "\n") -> bool:
    return not any(ch in text for ch in HOSTILE if ch not in allowed)


def test_hostile_characters_are_shown_as_text_and_forge_no_line(opened, tmp_path):
    """A job's title and columns of all hostile characters that JSON can carry: on pages, and in the log."""
    text = "".join(WHOLE)[:150]
    forged = "\n2026-01-01 00:00:00,000 INFO reflogp forged\n"
    file = tmp_path / "hostile.jsonl"
    file.write_text(json.dumps({f"{forged}{text}": 1, "b": 2}) + "\n")
    with Client(opened.url) as client:
        hostile_job = client.watch(client.submit(file, "ref", title=text + "<b>").id).id
    for path in ("/", f"/jobs/{hostile_job}"):
        text = httpx.get(opened.url + path).text
        assert "\\u202e" in text and "\\x1b" in text and "&lt;b&gt;" in text and harmless(text, "\n\t"), path
    lines = list(opened.log)
    assert [line for line in lines if hostile_job in line and "failed" in line]
    assert harmless("".join(lines)) and not [line for line in lines if line.startswith("2026-01-01")]


def test_problems_show_what_they_quote_as_text(opened):
    """Of a path, a query or a body; and no header of the answer is made of it."""
    for at in range(0, len(WHOLE), 10):
        quoted = f"a{''.join(WHOLE[at : at + 10])}b"
        path = quote(quoted, safe="")
        with httpx.Client(base_url=opened.url) as client:
            answers = [client.get(f"{place}{path}") for place in ("/v1/jobs/", "/v1/uploads/", "/jobs/", "/static/", "/")]
            asked = {"reference": quoted, "dataset": {"upload": "kept.jsonl"}}
            answers += [client.post("/v1/jobs", json=asked)]
            answers += [client.post("/v1/lookup", params={"reference": quoted}, json={"keys": []})]
            answers += [client.get("/", params={"state": quoted, "before": quoted})]
        for answer in answers:
            assert harmless(answer.text, "\n\t"), answer.text
            assert not any(ch in str(answer.headers) for ch in HOSTILE), answer.headers
