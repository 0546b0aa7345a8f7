"""A service whose store, ledger, disk and workers fail under it: jobs end right, and what waits for one holds up no other."""

import asyncio
import json
import os
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import httpx
import psutil
import pytest

from reflogp.client import Client, tables
from reflogp.service.ledger_file import StateLock
from reflogp.service.metrics import Metrics
from reflogp.service.online import OnlineScoring
from reflogp.service.problems import Problem
from reflogp.service.registry import ReferenceRegistry
from reflogp.service.settings import ServerSettings
from reflogp.service.threads import Threads
from reflogp.store import Store, sequence_keys
from reflogp.store.schema import ARROW_STREAM, stream_bytes
from reflogp.store.storage import open_filesystem
from reflogp.store.table import LogprobTable
from tests.conftest import write_rows
from tests.service.serving import float32, running, settings_file, token_rows, wait_for, wait_until
from tests.store.rows import REFERENCE, some_rows
from tests.store.s3 import Relay, environment_of, s3_server

BYTES = {"content-type": "application/octet-stream"}
#: Jobs take a while, and commit all the time.
SLOW = {"token_budget": 128, "commit_seconds": 0.1}
#: Bytes of uploads and fetched datasets together.
ROOM = 1_000_000


@pytest.fixture(scope="module")
def relay():
    """Passes on what a bucket is asked, or nothing."""
    with s3_server("team") as reach, Relay(int(reach["AWS_ENDPOINT_URL"].rpartition(":")[2])) as found:
        with environment_of(reach):
            filesystem = open_filesystem("s3://team")
            for number, (name, times) in enumerate({"small": 1, "slow": 1, "other": 1, "big-1": 400, "big-2": 400}.items()):
                rows = "".join(json.dumps(row) + "\n" for row in token_rows(3, seed=number)) * times
                with filesystem.open_output_stream(f"{name}.jsonl", compression=None, buffer_size=1 << 22) as sink:
                    sink.write(rows.encode())
        with environment_of({**reach, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{found.port}"}):
            yield found


@pytest.fixture(scope="module")
def service(place, reference_folder, relay):
    """A service with little patience; its uploads and fetched datasets have ROOM bytes."""
    settings = SLOW | {"ledger_seconds": 0.3, "worker_silence_seconds": 12.0, "worker_late_seconds": 3.0}
    settings |= {"dataset_uris": ["s3://team/"], "max_uploads_bytes": ROOM}
    with running("--config", settings_file(place, place / "store", {"ref": float32(reference_folder)}, **settings)) as found:
        answer = httpx.get(f"{found.url}/readyz")
        assert (answer.status_code, "worker 0 is starting" in answer.text) == (503, True)
        wait_until(lambda: ready(found.url))
        yield found


def ready(url: str) -> bool:
    return httpx.get(f"{url}/readyz").status_code == 200


def post(url: str, rows: list, **parameters) -> httpx.Response:
    body = "".join(json.dumps(row) + "\n" for row in rows)
    headers = {"content-type": "application/x-ndjson"}
    return httpx.post(f"{url}/v1/jobs", params={"reference": "ref", **parameters}, content=body, headers=headers, timeout=60)


def by_uri(url: str, uri: str, **more) -> str:
    asked = {"reference": "ref", "dataset": {"uri": uri}, **more}
    answer = httpx.post(f"{url}/v1/jobs", json=asked, timeout=60)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def require_refused(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json"), answer.text
    assert int(answer.headers["retry-after"]) > 0 and "ledger" in answer.json()["detail"]


def finished_unrecorded(place, client, job: str) -> bool:
    """The worker has done a job, and the ledger does not know it yet."""
    return (place / "state" / "results" / f"{job}.parquet").exists() and client.job(job).state == "running"


@pytest.mark.slow
def test_a_ledger_that_is_locked_for_long_ends_nothing(service, client, place):
    job = post(service.url, token_rows(40, seed=1)).json()["id"]
    wait_for(client, job, lambda found: found.progress.scored > 0)
    with closing(sqlite3.connect(place / "state" / "jobs.sqlite", isolation_level=None, timeout=30)) as other:
        other.execute("begin immediate")
        wait_until(lambda: not ready(service.url))
        assert "database is locked" in httpx.get(f"{service.url}/readyz").json()["detail"]
        require_refused(post(service.url, token_rows(1, seed=2)))
        require_refused(httpx.delete(f"{service.url}/v1/jobs/{job}"))
        wait_until(lambda: finished_unrecorded(place, client, job))
        assert "reflogp_ledger_works 0.0" in httpx.get(f"{service.url}/metrics").text
    ended = client.watch(job)
    assert (ended.state, ended.summary["rows"], ended.summary["scored"]) == ("done", 40, 0)  # it ran again: all is in the store
    wait_until(lambda: ready(service.url))
    assert client.watch(post(service.url, token_rows(1, seed=2)).json()["id"]).state == "done"


def test_a_full_disk_ends_nothing(service, client, place):
    """The kernel takes no byte more from the service; its worker can still write."""
    job = post(service.url, token_rows(200, seed=3)).json()["id"]
    wait_for(client, job, lambda found: found.progress.scored > 0)
    process = psutil.Process(service.process.pid)
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (0, before[1]))
    try:
        wait_until(lambda: not ready(service.url))
        require_refused(httpx.delete(f"{service.url}/v1/jobs/{job}"))
        assert post(service.url, token_rows(1, seed=4)).status_code in (503, 507)
        assert httpx.put(f"{service.url}/v1/uploads/a.jsonl", content=b"x" * 1000, headers=BYTES).status_code == 507
        assert not list((place / "state" / "uploads").glob(".partial*"))
        wait_until(lambda: finished_unrecorded(place, client, job))
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, before)
    assert client.watch(job).state == "done"
    wait_until(lambda: ready(service.url))


@pytest.mark.slow
def test_a_stopped_worker_is_noticed_and_replaced(service, client, place):
    [worker] = service.workers()
    job = post(service.url, token_rows(300, seed=5)).json()["id"]
    wait_for(client, job, lambda found: found.progress.scored > 0)
    doomed = post(service.url, token_rows(1, seed=6)).json()["id"]
    worker.suspend()
    wait_until(lambda: not ready(service.url), 11)
    assert "has not answered for" in httpx.get(f"{service.url}/readyz").json()["detail"]
    asked = {"sequences": [{"prompt_ids": [1, 5], "completion_ids": [7]}]}
    answer = httpx.post(f"{service.url}/v1/score", params={"reference": "ref"}, json=asked)
    assert answer.status_code == 503 and "has not answered for" in answer.json()["detail"]
    assert client.cancel(doomed).state == "cancelled"
    wait_until(lambda: not worker.is_running())
    assert client.watch(job).state == "done"
    assert ready(service.url) and service.workers() != [worker]
    assert any("the worker did not answer for" in line for line in service.log)


def test_a_slow_uri_holds_up_nobody(service, client, relay):
    relay.say("silence")
    slow, other = (by_uri(service.url, f"s3://team/{name}.jsonl", priority=50) for name in ("slow", "other"))
    wait_for(client, slow, lambda job: job.note is not None and "being fetched" in job.note)
    assert client.watch(post(service.url, token_rows(2, seed=7)).json()["id"]).state == "done"
    began = time.monotonic()
    client.cancel(other)
    assert client.watch(other).state == "cancelled" and time.monotonic() - began < 2
    assert client.job(slow).state == "queued"
    relay.say("mend")
    ended = client.watch(slow)
    assert (ended.state, ended.attempts, ended.note) == ("done", 1, None)


def test_fetched_datasets_and_uploads_share_their_room(service, client, place):
    folder = place / "state" / "uploads"
    big = client.watch(by_uri(service.url, "s3://team/big-1.jsonl"))
    assert big.state == "done", big.error
    [large] = [file for file in folder.iterdir() if file.stat().st_size > 200_000]
    size = ROOM - sum(file.stat().st_size for file in folder.iterdir() if file != large) - 50_000
    os.utime(large, (0, 0))  # it arrived long ago
    httpx.put(f"{service.url}/v1/uploads/filler.jsonl", content=b"x" * size, headers=BYTES).raise_for_status()
    assert not large.exists()  # nobody needed it, and it made room
    failed = client.watch(by_uri(service.url, "s3://team/big-2.jsonl"))
    assert failed.state == "failed" and "max_uploads_bytes" in failed.error, failed
    assert sum(file.stat().st_size for file in folder.iterdir()) < ROOM
    assert not list(folder.glob(".partial*"))
    assert client.watch(by_uri(service.url, "s3://team/small.jsonl")).state == "done"


def test_only_its_owner_can_open_a_state_folder_that_a_service_creates(tmp_path):
    StateLock(tmp_path / "new" / "state").close()
    assert (tmp_path / "new" / "state").stat().st_mode & 0o777 == 0o700
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)  # whatever the umask is
    StateLock(tmp_path / "shared").close()
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755


@pytest.mark.slow
def test_a_cancel_outlives_a_kill(serve, tmp_path):
    with serve(**SLOW) as service, Client(service.url) as client:
        wait_until(lambda: ready(service.url))
        job = client.submit(write_rows(tmp_path / "rows.jsonl", token_rows(500, seed=8)), "ref").id
        waiting = client.submit(write_rows(tmp_path / "next.jsonl", token_rows(2, seed=9)), "ref").id
        wait_for(client, job, lambda found: found.progress.scored > 0)
        [worker] = service.workers()
        worker.suspend()  # it does not hear of it
        assert httpx.delete(f"{service.url}/v1/jobs/{job}").status_code == 202
        service.kill()
        worker.kill()
    with serve(**SLOW) as service, Client(service.url) as client:
        wait_until(lambda: client.job(job).state == "cancelled")
        assert client.watch(waiting).state == "done"
        found = client.job(job)
        assert (found.state, found.attempts) == ("cancelled", 1)
        assert client.watch(client.retry(job).id).state == "done"


# A store that is away, or does not answer


@pytest.fixture(scope="module")
def remote(tmp_path_factory, reference_folder, relay, warm_python):
    """A service whose store is in the bucket."""
    folder, models = tmp_path_factory.mktemp("remote"), {"ref": float32(reference_folder)}
    file = settings_file(folder, "s3://team/logps", models, token_budget=64, commit_seconds=0.1)
    with running("--config", file, warm=warm_python) as service:
        service.worker_ready()
        yield service


@pytest.mark.slow
def test_a_job_whose_store_is_away_waits_and_goes_on(remote, relay, tmp_path):
    with Client(remote.url) as client:
        job = client.submit(write_rows(tmp_path / "rows.jsonl", token_rows(500, seed=3)), "ref").id
        wait_for(client, job, lambda found: found.progress.scored > 20)
        relay.say("cut")
        wait_for(client, job, lambda found: "the store cannot be used" in (found.note or ""), 120)
        relay.say("mend")
        ended = client.watch(job, timeout=180)
    assert (ended.state, ended.error) == ("done", None)
    assert ended.summary["hits"] > 0 and ended.summary["hits"] + ended.summary["scored"] == 1000


@pytest.mark.slow
def test_a_store_that_does_not_answer_holds_up_only_those_who_ask_it(remote, relay, tmp_path):
    with ThreadPoolExecutor(60) as askers, Client(remote.url) as client:
        rows = token_rows(40, seed=4)
        client.watch(client.submit(write_rows(tmp_path / "rows.jsonl", rows), "ref").id, check=True)
        keys = sequence_keys([row["prompt_ids"] for row in rows], [row["chosen_ids"] for row in rows])
        assert (client.lookup("ref", keys).lengths == 20).all()
        relay.say("silence")
        body = {"content": stream_bytes(tables.key_table(keys)), "headers": {"content-type": ARROW_STREAM}}
        for _ in range(30):
            askers.submit(httpx.get, f"{remote.url}/v1/references", timeout=200)
            askers.submit(httpx.post, f"{remote.url}/v1/lookup?reference=ref", timeout=200, **body)
        client.score("ref", [[5, 6]], [[7]], deadline=10)  # the first one finds out
        slowest, until = 0.0, time.monotonic() + 20
        while (began := time.monotonic()) < until:
            for path in ("/healthz", "/v1/jobs", "/readyz", "/metrics"):
                answer = httpx.get(remote.url + path, timeout=15)
                assert answer.status_code == 200 or path == "/readyz"
            client.score("ref", [rows[0]["prompt_ids"]], [rows[0]["chosen_ids"]], deadline=10)
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 3, slowest
        relay.say("mend")
        assert (client.lookup("ref", keys).lengths == 20).all()


# What one part waits for


def test_a_call_that_hangs_ends_for_its_caller_and_takes_no_thread_of_others():
    gate = threading.Event()

    async def calls():
        slow, other = Threads("the store", 2, 0.1), Threads("the ledger", 1)
        hanging = [slow.run(gate.wait) for _ in range(5)]
        outcomes = await asyncio.gather(*hanging, return_exceptions=True)
        assert [outcome.status for outcome in outcomes] == [503] * 5
        assert "the store has not answered within 0.1 seconds" in outcomes[0].detail
        assert await other.run(int, "7") == 7

    asyncio.run(calls())
    gate.set()


def test_lookups_of_different_references_do_not_wait_for_each_other(tmp_path, monkeypatch):
    references = [REFERENCE, replace(REFERENCE, reference_id="01" * 16)]
    for reference in references:
        Store(tmp_path / "store").create_table(reference).append(some_rows(0, 5)[1])
    found = ReferenceRegistry(ServerSettings(store=str(tmp_path / "store")))
    meeting = threading.Barrier(2, timeout=10)  # both are in the store at the same time, or nobody gets on
    snapshot_of = LogprobTable.snapshot

    def meet(table, number):
        meeting.wait()
        return snapshot_of(table, number)

    monkeypatch.setattr(LogprobTable, "snapshot", meet)
    with ThreadPoolExecutor(2) as threads:
        snapshots = list(threads.map(lambda reference: found.snapshot(reference.reference_id, None), references))
    assert [snapshot.stored_lengths(some_rows(0, 5)[0]).tolist() for snapshot in snapshots] == [[5] * 5] * 2


def test_online_requests_spread_over_devices_and_are_refused_only_if_all_are_full(tmp_path):
    settings = ServerSettings(store=str(tmp_path / "store"), max_queued_tokens=10_000)
    configuration = SimpleNamespace(capacity=1, pinned=None)

    def queued(count: int, *loaded: list[str]) -> list[int]:
        """So many requests of 1,000 tokens for model a at each worker; each worker has loaded some models."""
        about = {"broken": False, "late": False, "configuration": configuration}
        workers = [SimpleNamespace(number=at, loaded=models, **about) for at, models in enumerate(loaded)]
        online = OnlineScoring(settings, ReferenceRegistry(settings), Metrics(), SimpleNamespace(workers=workers))
        for number in range(count):
            online._pending[str(number)] = SimpleNamespace(worker=online._worker_for("a", 1_000), tokens=1_000)
        return [online.queued_tokens(worker) // 1_000 for worker in workers]

    assert queued(2, ["a"], [], ["b"]) == [2, 0, 0]  # a few stay where the model is
    counts = queued(50, ["a"], *([[]] * 7))
    assert sum(counts) == 50 and min(counts) > 0 and counts[0] == max(counts)
    assert sum(queued(20, ["a"], ["b"])) == 20
    with pytest.raises(Problem) as refused:
        queued(21, ["a"], ["b"])
    assert refused.value.status == 429
