"""Jobs, uploads and online scoring with the client, against a running service and against answers of a made-up one."""

import hashlib
import inspect
import json
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import httpx
import numpy as np
import pyarrow as pa
import pytest

from reflogp.client import (
    Client,
    DeadlineExceededError,
    JobFailedError,
    Lookup,
    RequestRefusedError,
    Scores,
    SequencesRefusedError,
    ServiceBusyError,
    ServiceError,
    ServiceFailedError,
    Uploaded,
    protocol,
    tables,
)
from reflogp.client.models import job_from
from reflogp.service import models as service_models
from reflogp.store import UsageError
from reflogp.store.schema import stream_bytes
from tests.conftest import write_rows
from tests.service.serving import float32, serving, settings_file


@pytest.fixture(scope="module")
def url(reference_folder, tmp_path_factory, warm_python):
    folder = tmp_path_factory.mktemp("jobs")
    file = settings_file(folder, folder / "store", {"sft": float32(reference_folder)})
    with serving("--config", file, warm=warm_python) as found:
        yield found


@pytest.fixture
def client(url):
    with Client(url) as found:
        yield found


# --- tests that need no service ---

JOB = {
    "id": "4f1c9a02d77be310",
    "state": "running",
    "settings": {"reference": "sft", "max_length": None, "something_new": 1},
    "dataset": {"upload": "pairs.jsonl"},
    "reference_id": "ab" * 16,
    "submitted_by": "me",
    "created_at": "2026-11-21T09:21:00.5+00:00",
    "started_at": "2026-11-21T09:21:00Z",
    "finished_at": None,
    "attempts": 1,
    "progress": {"rows": 3, "done": 2, "phase": "of a newer service"},
    "error": None,
    "summary": None,
    "owner": "a newer service's field",
}


def test_a_job_of_a_newer_service_can_be_read_and_of_something_else_not():
    job = job_from(JOB)
    assert (job.state, job.progress.done, job.progress.hits) == ("running", 2, 0)
    assert job.created_at.utcoffset().total_seconds() == 0
    assert json.loads(json.dumps(job.as_dict()))["started_at"] == "2026-11-21T09:21:00+00:00"
    for broken in ({}, [], {**JOB, "created_at": "yesterday"}, {**JOB, "progress": None}):
        with pytest.raises(ServiceFailedError, match="cannot be read"):
            protocol.parsed(httpx.Response(200, json=broken), job_from)
    with pytest.raises(ServiceFailedError, match="cannot be read"):
        protocol.parsed(httpx.Response(200, text="<html>"), job_from)


def test_answers_are_shown_in_a_few_readable_lines():
    """Of which none controls a terminal or shows a secret."""
    job = job_from(JOB | {"dataset": {"uri": "https://user:secret@host/a.jsonl"}, "error": "\x1b[31mred\n"})
    assert repr(job) == (
        "Job(\n    4f1c9a02d77be310: running, https://host/a.jsonl with sft\n"
        f"    reference {'ab' * 16}\n    error: \\x1b[31mred\\n\n)"
    )
    progress = {"sequences": 2_388, "done": 1_200, "hits": 1_000, "scored": 200, "tokens": 9, "tokens_per_second": 41_650.4}
    job = job_from(JOB | {"progress": progress})
    assert "    1,200 of 2,388 sequences: 1,000 hits, 200 scored; 41,650 tokens/s\n" in repr(job)
    assert "tokens/s" not in repr(replace(job, state="done"))
    found = Lookup(np.array([3, -1], np.int32), np.array([-1.5, np.nan]), None, "r", 7)
    assert repr(found) == "Lookup(1 of 2 keys found in snapshot 7 of reference r)"
    scores = repr(Scores([np.zeros(1_500, np.float32)], "r", 0, 0.25, 0.0))
    assert "    1 sequence, 1,500 log-probs: 0 hits\n    0.25 s computing, 0.00 s in the queue\n" in scores


def test_a_watch_bears_a_restart_and_says_why_it_ends(monkeypatch, caplog):
    answers = [
        httpx.Response(200, json=JOB | {"state": "queued"}),
        httpx.ConnectError("refused"),
        httpx.Response(503),
        httpx.Response(502),
        httpx.ReadTimeout("silent"),
        httpx.Response(200, json=JOB),
        httpx.Response(200, json=JOB),
        httpx.Response(404, json={"detail": "there is no job"}),
    ]
    said = iter(answers)
    found = []
    with pytest.raises(RequestRefusedError, match="there is no job"):
        for job in MadeUp(monkeypatch, lambda _: came_to(next(said))).client.events("x"):
            found.append(job.state)
    assert found == ["queued", "running"]
    assert caplog.messages == ["http://service is away (ConnectError); asking again", "http://service answers again"]
    with pytest.raises(ServiceFailedError):  # the first answer is none of a service that starts again
        MadeUp(monkeypatch, httpx.Response(500)).client.watch("x")
    with pytest.raises(DeadlineExceededError, match=r"running after 0\.01 seconds; the job continues"):
        MadeUp(monkeypatch, lambda _: httpx.Response(200, json=JOB)).client.watch("x", timeout=0.01)


def came_to(outcome: httpx.Response | Exception) -> httpx.Response:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def question(request: httpx.Request) -> dict:
    return pa.ipc.open_stream(request.read()).read_all().to_pydict()


def scored(request: httpx.Request) -> httpx.Response:
    """Answer a score request: values are the ids of the completion; one that begins with 99 is refused."""
    completions = question(request)["completion_ids"]
    bad = [bool(ids) and ids[0] == 99 for ids in completions]
    columns = {
        "token_logps": pa.array(
            [None if no else ids for no, ids in zip(bad, completions, strict=True)], pa.list_(pa.float32())
        ),
        "error": pa.array(["cannot be scored" if no else None for no in bad], pa.string()),
    }
    about = {"reference_id": "r", "hits": str(len(bad)), "engine_seconds": "1", "queue_seconds": "2"}
    return httpx.Response(200, content=stream_bytes(pa.table(columns).replace_schema_metadata(about)))


class MadeUp:
    """A client of a made-up service: `answer` is called with each request, or is what each attempt comes to."""

    def __init__(self, monkeypatch, answer: Callable[[httpx.Request], httpx.Response] | httpx.Response | Exception) -> None:
        self.requests: list[httpx.Request] = []
        self.pauses: list[float] = []
        monkeypatch.setattr(time, "sleep", self.pauses.append)
        self.client = Client("http://service")
        self.client._http = httpx.Client(base_url="http://service", transport=httpx.MockTransport(self._handle))
        self._answer = answer

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if isinstance(self._answer, Exception):
            raise self._answer
        if isinstance(self._answer, httpx.Response):
            return httpx.Response(self._answer.status_code, headers=self._answer.headers)
        return self._answer(request)

    def attempts(self, call: Callable[[Client], object]) -> int:
        """Return how often a call that fails is sent."""
        before = len(self.requests)
        with pytest.raises(ServiceError):
            call(self.client)
        return len(self.requests) - before


@pytest.mark.parametrize(
    ("prompts", "completions"),
    [
        ([[1, 2], []], [[3], [4, 5]]),
        ([np.array([1, 2], np.int32), np.array([], np.int64)], [np.array([3], np.uint32), np.array([4, 5])]),
        (pa.array([[1, 2], []], pa.list_(pa.int32())), pa.array([[3], [4, 5]], pa.large_list(pa.uint32()))),
        (pa.chunked_array([[[1, 2]], [[]]], pa.list_(pa.int64())), [(3,), (4, 5)]),
        (np.arange(1, 5).reshape(2, 2), [[3], [4, 5]]),
    ],
)
def test_token_ids_come_in_many_shapes_and_leave_in_one(monkeypatch, prompts, completions):
    made_up = MadeUp(monkeypatch, scored)
    made_up.client.score("sft", prompts, completions)
    expected = [[1, 2], [3, 4]] if isinstance(prompts, np.ndarray) else [[1, 2], []]
    assert [question(request) for request in made_up.requests] == [{"prompt_ids": expected, "completion_ids": [[3], [4, 5]]}]


def test_what_cannot_be_scored_is_refused_before_it_is_sent():
    client = Client("http://service")
    for wrong in (["text"], [None], [[None]], [[-1]], [[2**32]], 5, [1], pa.array([[1.5]])):
        with pytest.raises(UsageError, match="completions"):
            client.score("sft", [[1]], wrong)
    with pytest.raises(UsageError, match=r"number of completions \(1\) must equal the number of prompts \(2\)"):
        client.score("sft", [[1], [2]], [[1]])
    for deadline in (0, -1, float("nan")):
        with pytest.raises(UsageError, match="deadline"):
            client.score("sft", [[1]], [[1]], deadline=deadline)


REFUSED, SILENT, CUT = httpx.ConnectError("refused"), httpx.ReadTimeout("silent"), httpx.ReadError("cut")


@pytest.mark.parametrize(
    ("outcome", "lookup", "score", "retry"),
    [
        (REFUSED, 5, 5, 5),
        (httpx.Response(503), 5, 5, 5),
        (httpx.Response(429), 5, 5, 5),
        (httpx.Response(500), 1, 1, 1),
        (httpx.Response(400), 1, 1, 1),
        (SILENT, 5, 1, 1),
        (CUT, 5, 5, 1),
    ],
    ids=str,
)
def test_how_often_a_call_is_sent_after_which_failure(monkeypatch, outcome, lookup, score, retry):
    made_up = MadeUp(monkeypatch, outcome)
    assert made_up.attempts(lambda client: client.references()) == lookup
    assert made_up.attempts(lambda client: client.score("sft", [[1]], [[1]])) == score
    assert made_up.attempts(lambda client: client.retry("x")) == retry
    assert len({request.headers["x-request-id"] for request in made_up.requests}) == 3  # one id a call, not an attempt


def test_a_deadline_bounds_tries_and_pauses_and_tells_the_service_what_is_left(monkeypatch):
    made_up = MadeUp(monkeypatch, httpx.Response(429, headers={"retry-after": "3"}))
    with pytest.raises(ServiceBusyError):
        made_up.client.score("sft", [[1]], [[1]], deadline=2)
    assert 1_000 < int(made_up.requests[0].url.params["deadline_ms"]) <= 2_000
    assert made_up.pauses == [] and len(made_up.requests) == 1

    def refused_ten_times(request):
        return scored(request) if len(made_up.requests) > 10 else httpx.Response(503)

    made_up = MadeUp(monkeypatch, refused_ten_times)
    assert made_up.client.score("sft", [[1]], [[1]], deadline=60).hits == 1
    assert len(made_up.requests) == 11

    def late(request):
        threading.Event().wait(0.02)
        raise SILENT

    with pytest.raises(DeadlineExceededError, match="within the deadline"):
        MadeUp(monkeypatch, late).client.score("sft", [[1]], [[1]], deadline=0.01)


def test_a_busy_services_word_is_kept(monkeypatch):
    for said, least, most in (("3", 3, 3.1), ("9999", protocol.LONGEST_PAUSE, protocol.LONGEST_PAUSE)):
        made_up = MadeUp(monkeypatch, httpx.Response(429, headers={"retry-after": said}))
        made_up.attempts(lambda client: client.references())
        assert len(made_up.pauses) == protocol.TRIES - 1
        assert all(least <= pause <= most for pause in made_up.pauses)
    assert all(protocol.pause_seconds(REFUSED, attempt) <= protocol.LONGEST_PAUSE for attempt in (1, 10, 10_000))


def test_a_submission_whose_answer_was_lost_is_sent_again_with_the_same_content_and_key(monkeypatch):
    made_up = MadeUp(monkeypatch, lambda request: httpx.Response(200, json=JOB) if len(made_up.requests) > 1 else lost())

    def lost():
        raise CUT

    assert made_up.client.submit(Uploaded("a.jsonl"), "sft", max_length=5, idempotency_key="nightly").id == JOB["id"]
    first, second = made_up.requests
    assert first.read() == second.read() and json.loads(first.read())["max_length"] == 5
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"] == "nightly"


def test_a_cancelled_job_is_cancelled_again_without_an_error(monkeypatch):
    def answer(request):
        return httpx.Response(409) if request.method == "DELETE" else httpx.Response(200, json={**JOB, "state": state})

    state = "cancelled"
    assert MadeUp(monkeypatch, answer).client.cancel("x").state == "cancelled"
    state = "done"
    with pytest.raises(RequestRefusedError):
        MadeUp(monkeypatch, answer).client.cancel("x")


# --- with a service ---


def test_an_upload_is_named_by_its_content_or_by_the_caller(client, tmp_path, pair_rows):
    file = write_rows(tmp_path / "same pairs (ü).jsonl", pair_rows[50:54])
    sent = []
    first = client.upload(file, progress=lambda done, total: sent.append((done, total)))
    assert sent == [(file.stat().st_size,) * 2]
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert (first.name, first.sha256) == (f"{digest[:12]}-same-pairs-.jsonl", digest)
    assert client.upload(file) == first  # uploaded_at is the time of the first upload, so nothing was sent
    assert client.submit(file, "sft").id == client.submit(Uploaded(first.name), "sft").id
    write_rows(file, pair_rows[54:58])
    other = client.upload(file)
    assert other.name != first.name
    assert client.upload(file, "mine.jsonl").name == "mine.jsonl"
    write_rows(file, pair_rows[58:60])
    assert client.upload(file, "mine.jsonl").sha256 != other.sha256  # the file is replaced
    suffix = ".ndjson.zst"
    longest = tmp_path / f"{'x' * (255 - len(suffix))}{suffix}"
    longest.write_text("{}\n")
    assert client.upload(longest).name.endswith(f"xx{suffix}")


def test_a_long_file_is_sent_in_bounded_memory(client, tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_bytes(b" " * (48 << 20))
    tracemalloc.start()
    sent = client.upload(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sent.bytes == 48 << 20
    assert peak < 16 << 20


def test_a_file_that_grows_while_it_is_sent_is_refused(client, tmp_path):
    file = tmp_path / "growing.jsonl"
    file.write_bytes(b"x" * (3 << 20))

    def grow(done, total):
        with file.open("ab") as out:
            out.write(b"y" * (1 << 20))

    with pytest.raises(UsageError, match="changed while it was being sent"):
        client.upload(file, progress=grow)
    assert client.references()


def test_job_settings_are_those_of_the_service():
    arguments = set(inspect.signature(Client.submit).parameters) - {"self", "dataset", "split", "idempotency_key"}
    assert arguments == set(service_models.JobSettings.model_fields)


def test_jobs_come_in_pages(client, tmp_path, pair_rows):
    file = write_rows(tmp_path / "pairs.jsonl", pair_rows[90:92])
    ids = [client.submit(file, "sft", max_length=n).id for n in (50, 60, 70)]
    first = client.jobs(limit=2)
    assert [job.id for job in first.jobs] == [ids[2], ids[1]]
    assert client.jobs(before=first.next_before, limit=1).jobs[0].id == ids[0]
    assert all(job.state == "failed" for job in client.jobs("failed").jobs)
    with pytest.raises(RequestRefusedError):
        client.jobs("asleep")


def test_a_job_that_fails_says_why(client, tmp_path):
    file = tmp_path / "wrong.jsonl"
    file.write_text("no json\n")
    job = client.watch(client.submit(file, "sft").id)
    assert job.state == "failed" and "no readable row" in job.error
    with pytest.raises(JobFailedError, match="no readable row"):
        client.watch(job.id, check=True)
    with pytest.raises(RequestRefusedError):
        client.cancel(job.id)
    assert client.retry(job.id).id == job.id and client.watch(job.id).attempts == 2


def test_an_unknown_job_is_refused(client):
    for call in (client.job, client.cancel, client.retry, client.report, client.watch):
        for job in ("0123456789abcdef", "../references", "a b?c#d"):
            with pytest.raises(RequestRefusedError) as caught:
                call(job)
            assert caught.value.status == 404


def test_a_token_is_stripped_and_what_cannot_be_one_is_refused_and_not_repeated(monkeypatch):
    monkeypatch.setenv("REFLOGP_TOKEN", " secret\n")
    for token in (None, "  secret "):
        assert Client("http://127.0.0.1:9", token=token)._http.headers["authorization"] == "Bearer secret"
    for token in ("tök", "two words", "a\nb"):
        with pytest.raises(UsageError) as caught:
            Client("http://127.0.0.1:9", token=token)
        assert token not in str(caught.value)


def limited(most: int) -> Callable[[httpx.Request], httpx.Response]:
    """A service that accepts `most` sequences or keys in a request."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked = question(request)
        if len(next(iter(asked.values()))) > most:
            return httpx.Response(413, json={"detail": "more than allowed", "next_step": "send fewer"})
        return looked_up(request) if "key" in asked else scored(request)

    return answer


def looked_up(request: httpx.Request) -> httpx.Response:
    keys = question(request)["key"]
    columns = {
        "scored_len": pa.array([key[0] or None for key in keys], pa.int32()),
        "logp_sum": pa.array([float(key[0]) or None for key in keys], pa.float64()),
        "token_logps": pa.array([[float(key[0])] * key[0] or None for key in keys], pa.list_(pa.float32())),
    }
    about = {"reference_id": "r", "snapshot": request.url.params.get("snapshot", "7")}
    return httpx.Response(200, content=stream_bytes(pa.table(columns).replace_schema_metadata(about)))


def sizes(made_up: MadeUp) -> list[int]:
    return [len(next(iter(question(request).values()))) for request in made_up.requests]


def test_large_scores_are_divided_by_sequences_and_by_tokens_and_come_back_in_order(monkeypatch):
    completions = [[n + 100, n] for n in range(1000)]
    made_up = MadeUp(monkeypatch, limited(300))
    scores = made_up.client.score("sft", [[1]] * 1000, completions, attention_masks=[[1, 1, 1]] * 1000)
    assert [values.tolist() for values in scores.token_logps] == completions
    assert sizes(made_up) == [1000, 500, 250, 250, 250, 250] and scores.hits == 1000 and scores.engine_seconds == 4
    monkeypatch.setattr(tables, "TOKENS_AT_ONCE", 30)
    made_up = MadeUp(monkeypatch, limited(300))
    scores = made_up.client.score("sft", [[1]] * 25, [[n, n] for n in range(24)] + [[7] * 100])
    assert sizes(made_up) == [10, 10, 4, 1] and len(scores.token_logps[-1]) == 100


def test_sequences_that_are_refused_in_any_part_are_named_by_their_place(monkeypatch):
    completions = [[99] if n in (3, 700) else [n + 1000] for n in range(900)]
    with pytest.raises(SequencesRefusedError) as caught:
        MadeUp(monkeypatch, limited(500)).client.score("sft", [[1]] * 900, completions)
    assert list(caught.value.problems) == [3, 700]
    assert [at for at, values in enumerate(caught.value.results) if values is None] == [3, 700]


def test_a_divided_lookup_reads_one_snapshot(monkeypatch):
    keys = [bytes([n % 256]) * 16 for n in range(1000)]
    made_up = MadeUp(monkeypatch, limited(400))
    found = made_up.client.lookup("sft", keys, values=True)
    assert sizes(made_up) == [1000, 500, 250, 250, 250, 250]
    assert [request.url.params.get("snapshot") for request in made_up.requests] == [None] * 3 + ["7"] * 3
    assert found.lengths.tolist() == [n % 256 or -1 for n in range(1000)] and found.snapshot == 7
    assert [0 if v is None else len(v) for v in found.token_logps] == [n % 256 for n in range(1000)]
    assert made_up.client.lookup("sft", []).lengths.tolist() == []
