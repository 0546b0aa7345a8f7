"""The service over HTTP, as it runs: a process, a port, a real store."""

import itertools
import json
import re
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pytest

from reflogp.client import Client, ServiceUnreachableError, protocol
from reflogp.service.bodies import keys_of, sequences_of
from reflogp.service.problems import Problem
from reflogp.store import Store, UsageError
from tests.service.heavy_requests import ARROW_STREAM, stream_of
from tests.service.serving import float32, running, serving, settings_file, token_rows, wait_until
from tests.store.rows import REFERENCE, some_rows

TOKENS = {"reader": "token-of-a-reader", "boss": "token-of-a-boss"}
SCOPED = {"reader": (TOKENS["reader"], ["read"]), "boss": (TOKENS["boss"], ["admin"])}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with 1,000 sequences of one reference."""
    folder = tmp_path_factory.mktemp("serving") / "store"
    Store(folder).create_table(REFERENCE).append(some_rows(0, 1000)[1])
    return folder


@pytest.fixture(scope="module")
def url(store, warm_python):
    with serving("--store", store, warm=warm_python) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(store, tmp_path_factory, warm_python):
    """A service with tokens and narrow bounds."""
    bounds = {"max_body_bytes": 100_000, "max_json_bytes": 100_000, "max_lookup_keys": 5_000, "max_json_values": 1_000}
    file = settings_file(tmp_path_factory.mktemp("settings"), store, {}, SCOPED, **bounds)
    with serving("--config", file, warm=warm_python) as found:
        yield found


def test_a_lookup_gives_what_the_store_has_and_says_what_it_has_not(url):
    keys = some_rows(990, 20)[0]
    expected = some_rows(0, 1000)[1]["token_logps"].to_pylist()[990:]
    with Client(url) as client:
        found = client.lookup(REFERENCE.reference_id, keys, values=True)
        assert found.lengths.tolist() == [5] * 10 + [-1] * 10
        assert [v.tolist() for v in found.token_logps[:10]] == expected
        assert found.token_logps[10:] == [None] * 10
        assert np.allclose(found.sums[:10], [sum(v) for v in expected], atol=1e-6)
        assert np.isnan(found.sums[10:]).all()
        assert (found.reference_id, found.snapshot) == (REFERENCE.reference_id, 1)
        assert client.lookup(REFERENCE.reference_id, []).lengths.tolist() == []
        assert client.lookup(REFERENCE.reference_id, keys).token_logps is None
        [reference] = client.references()
    assert (reference.reference_id, reference.sequences, reference.snapshot) == (REFERENCE.reference_id, 1000, 1)


@pytest.mark.parametrize(
    ("module", "heavy"), [("reflogp.service.run", {"torch"}), ("reflogp.cli.jobs", {"torch", "transformers", "fastapi"})]
)
def test_neither_the_services_own_process_nor_the_client_imports_torch(module, heavy):
    """The service takes 175 MB without torch, and 520 with it."""
    code = f"import sys, {module}; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_json_for_people(url):
    keys = some_rows(998, 4)[0].to_pylist()
    body = {"keys": [key.hex() for key in keys], "values": True}
    answer = httpx.post(f"{url}/v1/lookup", params={"reference": REFERENCE.reference_id}, json=body).json()
    assert answer["scored_len"] == [5, 5, None, None]
    assert [value is None for value in answer["logp_sum"]] == [False, False, True, True]
    assert [len(values) if values else None for values in answer["token_logps"]] == [5, 5, None, None]


def test_what_is_committed_later_is_seen_and_a_damaged_log_is_an_error_until_it_is_mended(tmp_path, warm_python):
    table = Store(tmp_path / "store").create_table(REFERENCE)
    keys, rows = some_rows(0, 30)
    table.append(rows.slice(0, 10))
    with serving("--store", tmp_path / "store", warm=warm_python) as url, Client(url) as client:
        assert (client.lookup(REFERENCE.reference_id, keys).lengths > 0).sum() == 10
        table.append(rows.slice(10, 10))
        table.compact()
        later = client.lookup(REFERENCE.reference_id, keys)
        assert ((later.lengths > 0).sum(), later.snapshot) == (20, 3)
        assert (client.lookup(REFERENCE.reference_id, keys, snapshot=1).lengths > 0).sum() == 10
        table.append(rows.slice(20))
        entry = Path(table.uri) / "_delta_log" / f"{4:020}.json"
        whole = entry.read_bytes()
        entry.write_bytes(whole[:10])
        body = {"keys": [key.hex() for key in keys.to_pylist()]}
        answer = httpx.post(f"{url}/v1/lookup", params={"reference": REFERENCE.reference_id}, json=body)
        assert answer.status_code == 500 and "_delta_log is damaged" in answer.json()["detail"]
        [listed] = client.references()
        assert (listed.reference_id, listed.snapshot) == (REFERENCE.reference_id, None)
        entry.write_bytes(whole)
        assert (client.lookup(REFERENCE.reference_id, keys).lengths > 0).sum() == 30


def test_health_and_metrics(url):
    assert httpx.get(f"{url}/healthz").json()["status"] == "ok"
    assert httpx.get(f"{url}/readyz").json()["status"] == "ready"
    with Client(url) as client:
        client.lookup(REFERENCE.reference_id, some_rows(0, 7)[0])
    text = httpx.get(f"{url}/metrics").text
    assert 'reflogp_lookup_keys_total{found="yes"}' in text
    assert 'reflogp_request_seconds_count{route="/v1/lookup",status="200"}' in text


def test_a_store_that_went_away_is_not_ready(tmp_path, warm_python):
    Store(tmp_path / "store").create_table(REFERENCE).append(some_rows(0, 5)[1])
    with serving("--store", tmp_path / "store", warm=warm_python) as url:
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        (tmp_path / "store").write_text("not a folder")
        wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 503, 20)
        answer = httpx.get(f"{url}/readyz")
        assert answer.headers["content-type"] == "application/problem+json"
        assert httpx.get(f"{url}/healthz").status_code == 200


def test_json_that_would_be_too_long_is_refused_and_a_stream_is_not(guarded):
    keys = some_rows(0, 500)[0]
    asked = {"keys": [key.hex() for key in keys.to_pylist()], "values": True}
    headers = {"authorization": f"Bearer {TOKENS['reader']}"}
    answer = httpx.post(f"{guarded}/v1/lookup", params={"reference": REFERENCE.reference_id}, json=asked, headers=headers)
    assert answer.status_code == 413 and "Arrow stream" in answer.json()["next_step"]
    with Client(guarded, token=TOKENS["reader"]) as client:
        found = client.lookup(REFERENCE.reference_id, keys, values=True)
    assert [values.tolist() for values in found.token_logps] == some_rows(0, 1000)[1]["token_logps"].to_pylist()[:500]
    assert found.lengths.tolist() == [5] * 500 and found.snapshot == 1


def bomb() -> bytes:
    """A few kilobytes that stand for 160 MB of keys."""
    keys = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), 10_000_000, [None, pa.py_buffer(bytes(160_000_000))])
    return stream_of(pa.table({"key": keys}), compression="zstd")


def claim() -> bytes:
    """A record batch that claims more rows than it holds."""
    body = stream_of(pa.table({"key": pa.array([b"k" * 16] * 3, pa.binary(16))}))
    return body.replace(struct.pack("<q", 3), struct.pack("<q", 1 << 40))


def arrow(content: bytes) -> dict:
    return {"content": content, "headers": {"content-type": ARROW_STREAM}}


def keys_stream(keys, kind=None) -> bytes:
    return stream_of(pa.table({"key": pa.array(keys, kind or pa.binary(16))}))


KEY = "00" * 16
HOSTILE = {
    "an array": ({"json": [KEY]}, 422),
    "no keys": ({"json": {}}, 422),
    "a short key": ({"json": {"keys": ["00"]}}, 422),
    "not hexadecimal": ({"json": {"keys": ["zz" * 16]}}, 422),
    "an unknown field": ({"json": {"keys": [KEY], "model": "/etc/passwd"}}, 422),
    "too many keys": ({"json": {"keys": [KEY] * 10_001}}, 413),
    "deep nesting": ({"content": b"[" * 50_000}, 422),
    "a pickle": ({"content": b"\x80\x04N.", "headers": {"content-type": "application/x-pickle"}}, 415),
    "no stream": (arrow(b"nothing"), 400),
    "an empty stream": (arrow(b""), 400),
    "other columns": (arrow(stream_of(pa.table({"x": [1]}))), 422),
    "text keys": (arrow(stream_of(pa.table({"key": ["a"]}))), 422),
    "short keys": (arrow(keys_stream([b"a"], pa.binary())), 400),
    "null keys": (arrow(keys_stream([None])), 422),
    "a bomb": (arrow(bomb()), 422),
    "a false claim": (arrow(claim()), 400),
    "half a stream": (arrow(keys_stream([b"k" * 16] * 50)[:-300]), 400),
    "a long body": ({"content": bytes(100_001)}, 413),
    "an endless body": ({"content": (bytes(10_000) for _ in range(1000))}, 413),
}


def test_a_stream_with_any_one_byte_changed_is_refused_or_read():
    """pyarrow ends the process for some of them, unless the kinds of the stream's messages are looked at before."""
    lists = pa.array([[1, 2, 3], [4]], pa.list_(pa.int64()))
    sequences = stream_of(pa.table({"prompt_ids": lists, "completion_ids": lists}))
    for body, decode in (
        (keys_stream([b"k" * 16] * 3), lambda changed: keys_of(changed, 1_000)),
        (sequences, lambda changed: sequences_of(changed, 1_000, 1_000)),
    ):
        read = 0
        for at, value in itertools.product(range(len(body)), (0, 1, 0x7F, 0xFF)):
            changed = bytearray(body)
            changed[at] = value
            with suppress(Problem):
                read += len(decode(changed)) > 0
        assert 0 < read < 4 * len(body)


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_bodies_are_refused_with_a_problem(guarded, what):
    request, status = HOSTILE[what]
    headers = {"authorization": f"Bearer {TOKENS['reader']}", "content-type": "application/json"} | request.get("headers", {})
    try:
        answer = httpx.post(
            f"{guarded}/v1/lookup", params={"reference": REFERENCE.reference_id}, **{**request, "headers": headers}, timeout=20
        )
    except (httpx.WriteError, httpx.ReadError):  # the service hung up on what it would not read
        assert status == 413
    else:
        assert answer.status_code == status, answer.text
        assert answer.json()["detail"]
    assert httpx.get(f"{guarded}/healthz").status_code == 200


@pytest.mark.parametrize(
    ("parameters", "status"),
    [
        ({}, 422),
        ({"reference": "../../etc"}, 404),
        ({"reference": "x" * 300}, 422),
        ({"reference": "ff" * 16}, 404),
        ({"reference": REFERENCE.reference_id, "snapshot": "99"}, 404),
        ({"reference": REFERENCE.reference_id, "snapshot": "9" * 40}, 422),
    ],
)
def test_bad_parameters_are_refused_with_a_problem(url, parameters, status):
    answer = httpx.post(f"{url}/v1/lookup", params=parameters, json={"keys": [KEY]})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert set(answer.json()) == {"type", "title", "status", "detail", "next_step"}


def test_a_service_that_is_not_there(monkeypatch):
    monkeypatch.setattr("reflogp.client.protocol.LONGEST_PAUSE", 0.01)
    with pytest.raises(ServiceUnreachableError, match=r"the request to http://127\.0\.0\.1:9 failed"):
        Client("http://127.0.0.1:9").references()
    with pytest.raises(UsageError, match="http://"):
        Client("ftp://somewhere")


@pytest.mark.slow
def test_the_openapi_document_is_kept(store, tmp_path, reference_folder, warm_python):
    """Requests made up from it, good and bad, by schemathesis: no 5xx, no answer that it does not describe."""
    names = ("ref", "other")  # with one, `model` is not needed, and no schema knows its vocabulary
    file = settings_file(tmp_path, store, dict.fromkeys(names, float32(reference_folder)), SCOPED)
    with running("--config", file, warm=warm_python) as service:
        service.worker_ready(token=TOKENS["boss"])
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json"]
        command += ["--checks", "all", "--seed", "5", "--max-examples", "40", "--request-timeout", "20", "-H"]
        command += [f"Authorization: Bearer {TOKENS['boss']}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve"], "store"),
        (["serve", "--store", "x", "--host", "0.0.0.0"], "set tokens"),
        (["serve", "--store", "x", "--model", "nameless"], "NAME=PATH"),
        (["serve", "--store", "x", "--dtype", "float32"], "--dtype requires --model"),
        (["serve", "--store", "x", "--model", "a=/nowhere"], "nowhere"),
        (["serve", "--store", "x", "--config", "/nowhere.toml"], "does not exist"),
        (["serve", "--store", "ftp://x"], "the scheme is not supported"),
    ],
)
def test_bad_settings_are_one_sentence(reflogp, arguments, says):
    code, _, err = reflogp(*arguments)
    assert code in (1, 2) and says in err


# X-Request-Id: from the client through the service into the logs of the service and of its workers, and back


@pytest.fixture(scope="module")
def service(place, reference_folder, warm_python):
    """A service with a model, whose log is JSON."""
    file = settings_file(place, place / "store", {"ref": float32(reference_folder)}, log_format="json")
    with running("--config", file, warm=warm_python) as service:
        service.worker_ready()
        yield service


def lines_about(service, request: str) -> list[str]:
    return [line for line in list(service.log) if request in line]


def test_ids_that_could_not_be_searched_for_are_replaced(service):
    bad = [b"", b"a b", b"a" * 129, "é".encode(), b"x\ty", b"[request y]", b"a,b", b"%0a", b"<a>", b'"a"']
    seen = set()
    for word in bad:
        answer = httpx.get(f"{service.url}/healthz", headers=[(b"x-request-id", word)])
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"]), word
        seen.add(answer.headers["x-request-id"])
    assert len(seen) == len(bad)


def test_the_workers_log_names_the_request(service):
    with Client(service.url) as client:
        client.score("ref", [[5, 6, 7]], [[8, 9]], cache_read=False)
    body = {"sequences": [{"prompt_ids": [5, 6], "completion_ids": [7, 8]}]}
    headers = {"x-request-id": "trace-17"}
    answer = httpx.post(f"{service.url}/v1/score?reference=ref&cache_read=false", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    wait_until(lambda: lines_about(service, "trace-17"))
    [line] = lines_about(service, "trace-17")
    assert "reflogp.worker scored 1 sequence, 4 tokens" in line and "[request trace-17]" in line


def test_a_json_log_leads_from_a_submission_to_its_job(service):
    body = "".join(json.dumps(row) + "\n" for row in token_rows(1, seed=1))
    headers = {"content-type": "application/jsonl", "x-request-id": "submit-5"}
    answer = httpx.post(f"{service.url}/v1/jobs?reference=ref", content=body, headers=headers)
    job = answer.raise_for_status().json()["id"]
    wait_until(lambda: lines_about(service, "submit-5"))
    submitted = json.loads(lines_about(service, "submit-5")[0])
    assert submitted["message"].startswith("job submitted") and (submitted["job"], submitted["request"]) == (job, "submit-5")


def test_an_error_of_the_service_names_the_request():
    for status, words in ((500, "it broke (request r-1)"), (503, "it broke (request r-1)"), (404, "it broke")):
        answer = httpx.Response(status, headers={"x-request-id": "r-1"}, json={"detail": "it broke", "next_step": ""})
        assert str(protocol.error_of(answer)).partition(";")[0] == words
