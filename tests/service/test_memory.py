"""What requests may take: memory of the service and of its worker, on every route; and time that nobody uses.

Bodies are made by heavy_requests.py. Peaks are the kernel's own, of the service's own process.
"""

import asyncio
import http.client
import socket
import threading
import time

import httpx
import numpy as np
import pyarrow as pa
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from reflogp.client import Client
from reflogp.service.problems import Problem
from reflogp.service.request_memory import RequestMemory, Reservation
from reflogp.store import Store, StoreError, sequence_keys
from tests.conftest import write_rows
from tests.service.heavy_requests import ARROW_STREAM, Bounds, Peak, heavy_requests, long_rows, send, settle, stream_of
from tests.service.serving import float32, running, settings_file, token_rows, wait_until
from tests.store.rows import REFERENCE, some_rows

MIB = 1 << 20
BOUNDS = Bounds(size=6 * MIB, json=1 * MIB, keys=200_000, sequences=512, tokens=256 << 10)
REQUEST_MEMORY = 64 * MIB
#: What four requests of any route may add to the service at rest: the memory of requests, and beside it what allocators keep,
#: buffers of connections and threads.
MOST_GROWTH = REQUEST_MEMORY + 72 * MIB
#: What four of the largest score requests may add to a worker: token ids, masks, values and answers.
MOST_WORKER_GROWTH = 64 * MIB


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def long_key(place):
    """A key of a store whose rows have 20,000 values each."""
    keys, rows = long_rows(64, 20_000)
    Store(place / "store").create_table(REFERENCE).append(rows)
    return keys[7].as_py()


def bounds_of_settings() -> dict:
    return {
        "max_body_bytes": BOUNDS.size,
        "max_json_bytes": BOUNDS.json,
        "max_lookup_keys": BOUNDS.keys,
        "max_score_sequences": BOUNDS.sequences,
        "max_score_tokens": BOUNDS.tokens,
        "request_memory_bytes": REQUEST_MEMORY,
        "max_uploads_bytes": 1 << 30,
    }


@pytest.fixture(scope="module")
def service(place, long_key, reference_folder):
    file = settings_file(place, place / "store", {"ref": float32(reference_folder)}, pinned="ref", **bounds_of_settings())
    with running("--config", file) as found:
        found.worker_ready()
        yield found


@pytest.fixture(scope="module")
def at_rest(service, job):
    """Bytes that the service holds before the first heavy request."""
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
def requests(long_key, job):
    return heavy_requests(BOUNDS, long_key, job)


def routes(place) -> set[tuple[str, str]]:
    """(method, path) of every route of the app."""
    from reflogp.service.app import create_app
    from reflogp.service.settings import ServerSettings

    app = create_app(ServerSettings(store=str(place / "other"), state=place / "other-state"))
    found, left = set(), list(app.routes)
    while left:
        route = left.pop()
        if (router := getattr(route, "original_router", None)) is not None:
            left += router.routes
            continue
        assert isinstance(route, APIRoute | Route), f"{route} is no route that this test knows: give it cases"
        found |= {(method, route.path) for method in route.methods - {"HEAD"}}
    assert ("POST", "/v1/score") in found
    return found


@pytest.mark.slow
def test_every_route_has_heavy_requests(place, requests):
    assert routes(place) <= set(requests)


def names() -> list[tuple[str, str]]:
    return list(heavy_requests(BOUNDS, bytes(16), "x"))


@pytest.mark.slow
@pytest.mark.parametrize("route", names(), ids=" ".join)
def test_four_heavy_requests_at_once_take_bounded_memory(service, at_rest, requests, route):
    pid = service.process.pid
    for name, heavy in requests[route].items():
        settle(pid)
        with Peak(pid) as peak:
            statuses = send(service.url, route[0], heavy, count=4)
        assert set(statuses) <= {0, *heavy.statuses}, (name, statuses)
        grown = peak.bytes[pid] - at_rest
        assert grown < MOST_GROWTH, f"{name}: {grown >> 20} MiB"
    assert httpx.get(f"{service.url}/readyz").status_code == 200


def test_a_worker_takes_bounded_memory_under_the_largest_requests(service, requests):
    [worker] = service.workers()
    for name in ("as many tokens as allowed, with masks", "the same in bytes", "values that no list holds"):
        with Peak(worker.pid) as peak:
            assert set(send(service.url, "POST", requests["POST", "/v1/score"][name], count=12)) <= {200, 429, 503}
        assert peak.grown() < MOST_WORKER_GROWTH, f"{name}: {peak.grown() >> 20} MiB"
    assert [child.pid for child in service.workers()] == [worker.pid]


def test_the_loop_answers_while_large_json_is_decoded(service, requests):
    """The longest JSON that is decoded at all; before, the loop stood still for it."""
    heavy = requests["POST", "/v1/score"]["JSON of as many tokens as fit"]
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


def test_requests_wait_in_order_and_small_ones_pass():
    async def run():
        memory = RequestMemory(64 * MIB)
        first, second, third, small = (Reservation(memory) for _ in range(4))
        await first.reserve(50 * MIB)
        waits = [asyncio.create_task(second.reserve(40 * MIB)), asyncio.create_task(third.reserve(5 * MIB))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await small.reserve(1 * MIB)
        assert not any(task.done() for task in waits)  # the third would fit, but the second asked before
        first.release()
        await asyncio.gather(*waits)
        for reservation in (second, third, small, first):
            reservation.release()
            reservation.release()
        assert memory.used == 0

    asyncio.run(run())


def test_who_waits_for_memory_and_goes_away_leaves_nothing():
    async def run():
        memory = RequestMemory(64 * MIB)
        first, second, third = (Reservation(memory) for _ in range(3))
        await first.reserve(50 * MIB)
        gone, stays = asyncio.create_task(second.reserve(40 * MIB)), asyncio.create_task(third.reserve(5 * MIB))
        await asyncio.sleep(0.01)
        gone.cancel()
        await stays
        first.release()
        third.release()
        assert memory.used == 0 and second.bytes == 0

    asyncio.run(run())


def test_what_no_request_may_take_and_what_others_hold(monkeypatch):
    monkeypatch.setattr("reflogp.service.request_memory._PATIENCE_SECONDS", 0.05)

    async def run():
        memory = RequestMemory(64 * MIB)
        first, second = Reservation(memory), Reservation(memory)
        with pytest.raises(Problem) as caught:
            await first.reserve(60 * MIB)
        assert caught.value.status == 413 and "split the request" in caught.value.next_step
        await first.reserve(50 * MIB)
        with pytest.raises(Problem) as caught:
            await second.reserve(20 * MIB)
        assert caught.value.status == 503 and int(caught.value.headers["Retry-After"]) > 0
        await second.reserve(3 * MIB)  # a small one
        with pytest.raises(Problem):
            second.resize(20 * MIB)
        first.resize(10 * MIB)
        second.resize(20 * MIB)
        assert memory.used == 30 * MIB
        first.release()
        second.release()
        assert memory.used == 0

    asyncio.run(run())


def test_reservations_add_up_whatever_happens():
    """Random requests reserve, grow, shrink, wait, are cancelled and end: never more than there is, nothing left behind."""

    async def run(seed: int):
        draw = np.random.default_rng(seed)
        memory = RequestMemory(64 * MIB)

        async def request(sizes: list[int], pause: float) -> None:
            reservation = Reservation(memory)
            try:
                await reservation.reserve(sizes[0])
                for size in sizes[1:]:
                    await asyncio.sleep(pause)
                    reservation.resize(size)
                    assert memory.small.used <= memory.small.size and memory.large.used <= memory.large.size
            except Problem as problem:
                assert problem.status in (413, 503)
            finally:
                reservation.release()

        tasks = [
            asyncio.create_task(request((2 ** draw.uniform(8, 26, 3)).astype(int).tolist(), draw.uniform(0, 0.004)))
            for _ in range(200)
        ]
        await asyncio.sleep(0.01)
        for task in tasks[::7]:
            task.cancel()
        await asyncio.wait(tasks)
        assert memory.used == 0
        assert all(task.cancelled() or task.exception() is None for task in tasks)

    for seed in range(5):
        asyncio.run(run(seed))


# Connections


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A service with room for 50 requests, and short deadlines."""
    folder = tmp_path_factory.mktemp("narrow")
    bounds = {"max_connections": 50, "head_seconds": 2, "answer_idle_seconds": 2, "request_memory_bytes": 64 * MIB}
    Store(folder / "store").create_table(REFERENCE).append(long_rows(64, 20_000)[1])
    with running("--config", settings_file(folder, folder / "store", {}, **bounds)) as found:
        yield found


BEGINNINGS = {
    "nothing": b"",
    "a head without an end": b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ",
    "a body that nobody reads": b"POST /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n",
    "an endless chunked body": b"POST /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n",
    "a second head": b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /healthz HTTP/1.1\r\nX-A: ",
}


@pytest.mark.slow
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_who_sends_a_byte_at_a_time_keeps_nobody_out_and_is_ended(narrow, beginning):
    dribbling = [socket.create_connection(address(narrow.url)) for _ in range(200)]
    for connection in dribbling:
        connection.sendall(BEGINNINGS[beginning])
    over = set()
    stop = time.monotonic() + 60
    while len(over) < len(dribbling):
        for number, connection in enumerate(dribbling):
            try:
                connection.sendall(b"a" if beginning != "nothing" else b"")
                connection.settimeout(0.0001)
                if number not in over and connection.recv(65536) == b"":
                    over.add(number)
            except TimeoutError:
                pass
            except OSError:
                over.add(number)
        assert httpx.get(f"{narrow.url}/healthz", timeout=20).status_code == 200
        assert time.monotonic() < stop, f"{len(dribbling) - len(over)} connections are still open"
    for connection in dribbling:
        connection.close()


@pytest.mark.parametrize("path", ["/healthz", "/v1/lookup?reference=none"])
def test_who_sends_a_long_body_that_no_route_reads_sees_the_answer(narrow, path):
    """To close the connection at once would lose the answer of clients that send first and read later."""
    body, headers = bytes(64 * MIB), {"content-type": "application/json"}

    async def ask() -> int:
        async with httpx.AsyncClient() as client:
            return (await client.post(narrow.url + path, content=body, headers=headers)).status_code

    plain = http.client.HTTPConnection(*address(narrow.url))
    for _ in range(5):
        assert httpx.post(narrow.url + path, content=body, headers=headers).status_code in (405, 413)
        assert asyncio.run(ask()) in (405, 413)
        plain.request("POST", path, body, headers)
        assert plain.getresponse().status in (405, 413)
        plain.close()


@pytest.mark.slow
def test_an_answer_that_nobody_reads_is_ended_and_gives_its_memory_back(narrow):
    """More than the memory of all requests is asked for by callers who do not read; others are answered in the end."""
    keys = long_rows(64, 20_000)[0].to_pylist()
    question = stream_of(pa.table({"key": pa.array(keys * 20, pa.binary(16))}))  # 100 MB of values
    head = (
        f"POST /v1/lookup?reference={REFERENCE.reference_id}&values=true HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: {ARROW_STREAM}\r\nContent-Length: {len(question)}\r\n\r\n"
    )
    idle = [socket.create_connection(address(narrow.url)) for _ in range(6)]
    for connection in idle:
        connection.sendall(head.encode() + question)
    with Client(narrow.url) as client:
        found = client.lookup(REFERENCE.reference_id, keys, values=True)
    assert [len(values) for values in found.token_logps] == [20_000] * 64
    for connection in idle:
        connection.close()


@pytest.mark.slow
def test_a_body_that_stands_still_is_ended_and_gives_its_memory_back(tmp_path):
    from reflogp.service import bodies

    bounds = {"request_memory_bytes": 64 * MIB, "max_json_bytes": 2 * MIB}
    with running("--config", settings_file(tmp_path, tmp_path / "store", {}, **bounds)) as service:
        held = [socket.create_connection(address(service.url)) for _ in range(8)]
        for connection in held:
            connection.sendall(
                b"POST /v1/lookup?reference=sft HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                b"Content-Type: application/json\r\nContent-Length: 2000000\r\n\r\n{"
            )
        start = time.monotonic()
        wait_until(lambda: asks(service.url) != 503, seconds=bodies._SLOW_START_SECONDS + 30)
        assert time.monotonic() - start < bodies._BODY_SECONDS
        answers = []
        for connection in held:
            connection.settimeout(60)
            answers.append(int(connection.recv(65536).split()[1]))
            connection.close()
    assert set(answers) == {408, 503}  # one has the memory and sends nothing, the others wait for it


def asks(url: str) -> int:
    """Status of a lookup that needs as much memory as those that stand still."""
    body = b'{"keys":[],"values":true' + b" " * 1_999_000 + b"}"
    headers = {"content-type": "application/json"}
    return httpx.post(f"{url}/v1/lookup?reference={'ab' * 16}", content=body, headers=headers, timeout=60).status_code


# What a worker keeps for the store


def test_values_that_a_slow_store_does_not_take_are_dropped_and_not_piled_up(monkeypatch, tmp_path, caplog):
    from reflogp.scoring.torch_engine import Sequence
    from reflogp.service.worker import write_back as late_writes

    monkeypatch.setattr(late_writes, "_MOST_TOKENS", 1000)
    monkeypatch.setattr(late_writes, "_SECONDS", 0.01)
    goes_on = threading.Event()

    def slow(reference_id: str):
        assert goes_on.wait(60)
        return REFERENCE

    store = Store(tmp_path / "store")
    writes = late_writes.WriteBack(store, slow)
    draw = np.random.default_rng(3)
    for _ in range(20):
        prompts = draw.integers(10, 900, (4, 15))
        scored = [(Sequence(prompt[:5], prompt[5:]), np.zeros(10, np.float32)) for prompt in prompts]
        writes.put(REFERENCE.reference_id, {"engine": "test"}, scored)
        assert writes._tokens <= 1000
    assert "did not store" in caplog.text
    goes_on.set()
    wait_until(lambda: writes._tokens == 0)
    writes.close()
    assert store[REFERENCE].totals()[1] == 1000 // 60 * 4


def test_values_are_stored_after_an_unexpected_error(monkeypatch, tmp_path, caplog):
    from reflogp.scoring.torch_engine import Sequence
    from reflogp.service.worker import write_back

    monkeypatch.setattr(write_back, "_SECONDS", 0.01)
    answers = iter([RuntimeError("a bug"), StoreError("the disk is full"), REFERENCE])

    def reference_of(reference_id: str):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    store = Store(tmp_path / "store")
    writes = write_back.WriteBack(store, reference_of)
    for first in (1, 2, 3):
        prompt, completion = np.array([first]), np.array([7, 8])
        writes.put(REFERENCE.reference_id, {"engine": "test"}, [(Sequence(prompt, completion), np.full(2, -first, np.float32))])
        wait_until(lambda: writes._tokens == 0)
    writes.close()
    assert "could not store 1 scored sequence: the disk is full" in caplog.text
    assert "RuntimeError: a bug" in caplog.text
    keys = sequence_keys([np.array([first]) for first in (1, 2, 3)], [np.array([7, 8])] * 3)
    one, two, three = store[REFERENCE].snapshot(None).token_logps(keys)
    assert one is None
    assert two is None
    assert three.tolist() == [-3, -3]
