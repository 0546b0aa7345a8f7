"""What one part waits for holds up no other: calls that hang, queues that are full, devices that are busy."""

import asyncio
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from reflogp.client import Client, tables
from reflogp.service import registry
from reflogp.service.metrics import Metrics
from reflogp.service.online import OnlineScoring
from reflogp.service.problems import Problem
from reflogp.service.registry import ReferenceRegistry
from reflogp.service.settings import ServerSettings
from reflogp.service.threads import Threads
from reflogp.store import sequence_keys
from reflogp.store.schema import ARROW_STREAM, stream_bytes
from tests.conftest import write_rows
from tests.service.serving import float32, running, settings_file, token_rows, wait_for
from tests.store.s3 import Relay, environment_of, s3_server


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
    found = ReferenceRegistry(ServerSettings(store=str(tmp_path / "store")))
    meeting = threading.Barrier(2, timeout=10)  # both are in the store at the same time, or nobody gets on

    class Table:
        def __init__(self, key):
            self.reference, self.top_k = SimpleNamespace(reference_id=key), 0

        def snapshot(self, number):
            meeting.wait()
            return SimpleNamespace(stored_lengths=lambda keys: None)

    class Meeting:
        def __getitem__(self, key):
            meeting.wait()
            return Table(key)

    monkeypatch.setattr(registry, "_is_id", lambda key: True)
    found.store = Meeting()
    threads = [threading.Thread(target=found.snapshot, args=(name, None)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not meeting.broken and not any(thread.is_alive() for thread in threads)


# Devices


def workers(*loaded: list[str], capacity: int = 1) -> list:
    configuration = SimpleNamespace(capacity=capacity, pinned=None)
    return [
        SimpleNamespace(number=at, loaded=models, broken=False, late=False, configuration=configuration)
        for at, models in enumerate(loaded)
    ]


@pytest.fixture
def online(tmp_path):
    settings = ServerSettings(store=str(tmp_path / "store"), max_queued_tokens=10_000)
    workers = SimpleNamespace()
    found = OnlineScoring(settings, ReferenceRegistry(settings), Metrics(), workers)

    def choose(pool, count, tokens=1_000):
        workers.workers = pool
        for number in range(count):
            worker = found._worker_for("a", tokens)
            found._pending[str(number)] = SimpleNamespace(worker=worker, tokens=tokens)
        return [found.queued_tokens(worker) // tokens for worker in pool]

    return choose


def test_online_requests_spread_over_devices_of_which_one_has_the_model(online):
    counts = online(workers(["a"], *([[]] * 7)), 50)
    assert sum(counts) == 50 and min(counts) > 0 and counts[0] == max(counts)


def test_a_few_online_requests_stay_where_the_model_is(online):
    assert online(workers(["a"], [], ["b"]), 2) == [2, 0, 0]


def test_a_device_is_refused_only_if_all_are_full(online):
    pool = workers(["a"], ["b"])
    assert sum(online(pool, 20)) == 20
    with pytest.raises(Problem) as refused:
        online(pool, 21)
    assert refused.value.status == 429


# A store that is away, or does not answer


@pytest.fixture(scope="module")
def remote(tmp_path_factory, reference_folder, warm_python):
    """A service whose store is in a bucket, and what passes on the bucket's requests, or does not."""
    folder = tmp_path_factory.mktemp("remote")
    with s3_server("team") as reach, Relay(int(reach["AWS_ENDPOINT_URL"].rpartition(":")[2])) as relay:
        models = {"ref": float32(reference_folder)}
        file = settings_file(folder, "s3://team/logps", models, token_budget=64, commit_seconds=0.1, devices=["cpu"])
        through = {**reach, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{relay.port}"}
        with environment_of(through), running("--config", file, warm=warm_python) as service:
            service.worker_ready()
            yield service, relay


@pytest.mark.slow
def test_a_job_whose_store_is_away_waits_and_goes_on(remote, tmp_path):
    service, relay = remote
    with Client(service.url) as client:
        job = client.submit(write_rows(tmp_path / "rows.jsonl", token_rows(500, seed=3)), "ref").id
        wait_for(client, job, lambda found: found.progress.scored > 20)
        relay.say("cut")
        wait_for(client, job, lambda found: "the store cannot be used" in (found.note or ""), 120)
        relay.say("mend")
        ended = client.watch(job, timeout=180)
    assert (ended.state, ended.error) == ("done", None)
    assert ended.summary["hits"] > 0 and ended.summary["hits"] + ended.summary["scored"] == 1000


@pytest.mark.slow
def test_a_store_that_does_not_answer_holds_up_only_those_who_ask_it(remote, tmp_path):
    service, relay = remote
    with Client(service.url) as client:
        rows = token_rows(40, seed=4)
        client.watch(client.submit(write_rows(tmp_path / "rows.jsonl", rows), "ref").id, check=True)
        keys = sequence_keys([row["prompt_ids"] for row in rows], [row["chosen_ids"] for row in rows])
        assert (client.lookup("ref", keys).lengths == 20).all()
        relay.say("silence")
        body = {"content": stream_bytes(tables.key_table(keys)), "headers": {"content-type": ARROW_STREAM}}
        askers = [
            threading.Thread(target=asked, args=(service.url, method, path, more), daemon=True)
            for method, path, more in (("GET", "/v1/references", {}), ("POST", "/v1/lookup?reference=ref", body)) * 30
        ]
        for asker in askers:
            asker.start()
        slowest = 0.0
        client.score("ref", [[5, 6]], [[7]], deadline=10)  # the first one finds out
        until = time.monotonic() + 20
        while time.monotonic() < until:
            for path in ("/healthz", "/v1/jobs", "/readyz", "/metrics"):
                began = time.monotonic()
                answer = httpx.get(service.url + path, timeout=15)
                slowest = max(slowest, time.monotonic() - began)
                assert answer.status_code == 200 or path == "/readyz"
            began = time.monotonic()
            client.score("ref", [rows[0]["prompt_ids"]], [rows[0]["chosen_ids"]], deadline=10)
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 3, slowest
        relay.say("mend")
        for asker in askers:
            asker.join(200)
        assert (client.lookup("ref", keys).lengths == 20).all()


def asked(url: str, method: str, path: str, more: dict) -> None:
    httpx.request(method, url + path, timeout=200, **more)
