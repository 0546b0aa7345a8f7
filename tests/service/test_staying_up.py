"""A service whose ledger, disk and workers fail under it: jobs end right, and it is ready again."""

import json
import os
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from reflogp.client import Client
from reflogp.service.ledger_file import StateLock
from reflogp.store.storage import open_filesystem
from tests.conftest import write_rows
from tests.service.serving import float32, running, settings_file, token_rows, wait_for, wait_until
from tests.store.s3 import Relay, environment_of, s3_server

BYTES = {"content-type": "application/octet-stream"}
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
    settings = {"token_budget": 128, "commit_seconds": 0.1, "ledger_seconds": 0.3}
    settings |= {"worker_silence_seconds": 12.0, "worker_late_seconds": 3.0}
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


def refused(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json"), answer.text
    assert int(answer.headers["retry-after"]) > 0 and "ledger" in answer.json()["detail"]


def finished_unrecorded(place, client, job: str) -> bool:
    """The worker has done a job, and the ledger does not know it yet."""
    return (place / "state" / "results" / f"{job}.parquet").exists() and client.job(job).state == "running"


@pytest.mark.slow
def test_a_ledger_that_is_locked_for_long_ends_nothing(service, client, place):
    job = post(service.url, token_rows(40, seed=1)).json()["id"]
    wait_for(client, job, lambda found: found.progress.scored > 0)
    with locked(place / "state" / "jobs.sqlite"):
        wait_until(lambda: not ready(service.url))
        assert "database is locked" in httpx.get(f"{service.url}/readyz").json()["detail"]
        refused(post(service.url, token_rows(1, seed=2)))
        refused(httpx.delete(f"{service.url}/v1/jobs/{job}"))
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
        refused(httpx.delete(f"{service.url}/v1/jobs/{job}"))
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
    began = time.monotonic()
    worker.suspend()
    wait_until(lambda: not ready(service.url), 11)
    assert time.monotonic() - began < 11
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
    slow = {"token_budget": 128, "commit_seconds": 0.1}
    with serve(**slow) as service, Client(service.url) as client:
        wait_until(lambda: ready(service.url))
        job = client.submit(write_rows(tmp_path / "rows.jsonl", token_rows(500, seed=8)), "ref").id
        waiting = client.submit(write_rows(tmp_path / "next.jsonl", token_rows(2, seed=9)), "ref").id
        wait_for(client, job, lambda found: found.progress.scored > 0)
        [worker] = service.workers()
        worker.suspend()  # it does not hear of it
        assert httpx.delete(f"{service.url}/v1/jobs/{job}").status_code == 202
        service.kill()
        worker.kill()
    with serve(**slow) as service, Client(service.url) as client:
        wait_until(lambda: client.job(job).state == "cancelled")
        assert client.watch(waiting).state == "done"
        found = client.job(job)
        assert (found.state, found.attempts) == ("cancelled", 1)
        assert client.watch(client.retry(job).id).state == "done"


class locked:
    """A write lock that another process holds."""

    def __init__(self, file) -> None:
        program = (
            "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)\n"
            "db.execute('begin immediate'); print('locked', flush=True); sys.stdin.read()"
        )
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-c", program, str(file)], stdin=pipe, stdout=pipe)

    def __enter__(self) -> None:
        assert self._process.stdout.readline() == b"locked\n"

    def __exit__(self, *_) -> None:
        self._process.communicate()
