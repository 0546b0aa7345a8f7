"""What requests may take: memory of the service and of its worker; and time that nobody uses.

Bodies are made by heavy_requests.py. Peaks are the kernel's own, of the service's own process.
"""

import threading
import time

import httpx
import numpy as np
import pytest

from reflogp.client import Client
from reflogp.store import Store
from tests.conftest import write_rows
from tests.service.heavy_requests import ROUTES, Bounds, Peak, long_rows, send, settle
from tests.service.serving import float32, running, settings_file, token_rows, wait_until
from tests.store.rows import REFERENCE, some_rows

MIB = 1 << 20
BOUNDS = Bounds(size=6 * MIB, json=1 * MIB, keys=200_000, sequences=512, tokens=256 << 10)
#: What four requests of any route may add to the service at rest.
MOST_GROWTH = 136 * MIB
#: What four of the largest score requests may add to a worker: token ids, masks, values and answers.
MOST_WORKER_GROWTH = 64 * MIB


@pytest.fixture(scope="module")
def long_key(place):
    """A key of a store whose rows have 20,000 values each."""
    keys, rows = long_rows(64, 20_000)
    Store(place / "store").create_table(REFERENCE).append(rows)
    return keys[7].as_py()


@pytest.fixture(scope="module")
def service(place, long_key, reference_folder):
    bounds = {"max_body_bytes": BOUNDS.size, "max_json_bytes": BOUNDS.json, "max_lookup_keys": BOUNDS.keys}
    bounds |= {"max_score_sequences": BOUNDS.sequences, "max_score_tokens": BOUNDS.tokens}
    bounds |= {"max_large_requests": 1, "max_uploads_bytes": 1 << 30, "pinned": "ref"}
    file = settings_file(place, place / "store", {"ref": float32(reference_folder)}, **bounds)
    with running("--config", file) as found:
        found.worker_ready()
        yield found


@pytest.fixture(scope="module")
def at_rest(service, job, long_key):
    """Bytes that the service holds before the first heavy request, and after a small one that opens the store."""
    with Client(service.url) as client:
        assert client.lookup(REFERENCE.reference_id, [long_key], values=True).lengths.tolist() == [20_000]
    with Peak(service.process.pid) as peak:
        httpx.get(f"{service.url}/readyz")
    return peak.bytes[service.process.pid]


@pytest.fixture(scope="module")
def job(service, place):
    with Client(service.url) as client:
        done = client.watch(client.submit(write_rows(place / "rows.jsonl", token_rows(20, seed=1)), "ref").id)
        assert done.state == "done"
        return done.id


@pytest.fixture(scope="module")
def scores(long_key, job):
    return ROUTES["POST", "/v1/score"](BOUNDS, long_key, job)


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_four_heavy_requests_at_once_take_bounded_memory(service, at_rest, long_key, job, route):
    pid = service.process.pid
    for name, heavy in ROUTES[route](BOUNDS, long_key, job).items():
        settle(pid)
        with Peak(pid) as peak:
            statuses = send(service.url, route[0], heavy, count=4)
        assert set(statuses) <= {0, *heavy.statuses}, (name, statuses)
        grown = peak.bytes[pid] - at_rest
        assert grown < MOST_GROWTH, f"{name}: {grown >> 20} MiB"
    assert httpx.get(f"{service.url}/readyz").status_code == 200


def test_a_worker_takes_bounded_memory_under_the_largest_requests(service, scores):
    [worker] = service.workers()
    for name in ("as many tokens as allowed, with masks", "the same in bytes", "values that no list holds"):
        with Peak(worker.pid) as peak:
            assert set(send(service.url, "POST", scores[name], count=12)) <= {200, 429, 503}
        assert peak.grown() < MOST_WORKER_GROWTH, f"{name}: {peak.grown() >> 20} MiB"
    assert [child.pid for child in service.workers()] == [worker.pid]


def test_the_loop_answers_while_large_json_is_decoded(service, scores):
    """The longest JSON that is decoded at all; before, the loop stood still for it."""
    heavy = scores["JSON of as many tokens as fit"]
    busy = threading.Thread(target=send, args=(service.url, "POST", heavy, 12))
    busy.start()
    took = []
    with httpx.Client() as client:
        while busy.is_alive():
            start = time.perf_counter()
            assert client.get(f"{service.url}/healthz").status_code == 200
            took.append(time.perf_counter() - start)
    assert float(np.median(took)) < 0.25


# What honest callers ask for


def test_honest_large_requests_are_answered_and_right(service, place):
    keys, rows = some_rows(5_000, 30_000, values=10)
    Store(place / "store")[REFERENCE].append(rows)
    expected = rows["token_logps"].to_pylist()
    many = [keys] * 10  # 300,000 keys, where 200,000 are allowed
    with Client(service.url) as client:
        lengths = client.lookup(REFERENCE.reference_id, [key for part in many for key in part.to_pylist()]).lengths
        found = client.lookup(REFERENCE.reference_id, keys, values=True)
        prompts, completions = np.full((1_500, 40), 5), np.full((1_500, 160), 6)  # 300,000 tokens, where 262,144 are allowed
        scores = client.score("ref", prompts, completions)
    assert lengths.tolist() == [10] * 300_000
    assert [values.tolist() for values in found.token_logps] == expected
    assert len(scores.token_logps) == 1_500 and all(len(values) == 160 for values in scores.token_logps)
    assert all(values.tolist() == scores.token_logps[0].tolist() for values in scores.token_logps[1:])


# The memory of all requests under way


def test_values_that_a_slow_store_does_not_take_are_dropped_and_not_piled_up(monkeypatch, tmp_path, caplog):
    from reflogp.scoring.torch_engine import Sequence
    from reflogp.service.worker import write_back as late_writes

    monkeypatch.setattr(late_writes, "_MOST_NUMBERS", 1700)
    monkeypatch.setattr(late_writes, "_SECONDS", 0.01)
    goes_on = threading.Event()

    store = Store(tmp_path / "store")

    def slow(reference_id: str):
        assert goes_on.wait(60)
        return store.values_table(REFERENCE)

    writes = late_writes.WriteBack(slow)
    draw = np.random.default_rng(3)
    for _ in range(20):
        prompts = draw.integers(10, 900, (4, 15))
        scored = [(Sequence(prompt[:5], prompt[5:]), np.zeros(10, np.float32)) for prompt in prompts]
        writes.put(REFERENCE.reference_id, {"engine": "test"}, scored)
        assert writes._numbers <= 1700
    assert "did not store" in caplog.text
    goes_on.set()
    wait_until(lambda: writes._numbers == 0)
    writes.close()
    assert store[REFERENCE].totals()[1] == 1700 // 100 * 4
