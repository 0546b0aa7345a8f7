"""What the service keeps, on its own: the ledger of jobs, and the folder of uploads, which arrive whole or not at all."""

import asyncio
import hashlib
import os
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from reflogp.service.dataset_files import DatasetFiles, Uploads
from reflogp.service.ledger import Ledger, Submission
from reflogp.service.models import UPLOAD_PATTERN, DatasetSpec, JobSettings
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings
from reflogp.store import UsageError


@pytest.fixture
def ledger(tmp_path):
    found = Ledger(tmp_path / "jobs.sqlite")
    yield found
    found.close()


def put(ledger, identity, *, priority=0, reference="a", most_queued=None, **source):
    settings, source = JobSettings(reference="ref", priority=priority), {"file": f"/{identity}.jsonl", **source}
    asked = Submission(identity, identity, settings, DatasetSpec(upload="a.jsonl"), source, reference, "me")
    return ledger.submit(asked, most_queued)


def test_priority_then_age_then_what_is_loaded(ledger):
    jobs = {name: put(ledger, name, priority=p, reference=r)[0].id for name, p, r in [
        ("old", 0, "a"), ("loaded", 0, "b"), ("urgent", 5, "c"), ("last", 0, "a")
    ]}  # fmt: skip
    order = [ledger.claim(["b"], patience_seconds=60).id for _ in range(4)]
    assert order == [jobs[name] for name in ("urgent", "loaded", "old", "last")]
    assert ledger.claim([], 60) is None
    for job in order:
        ledger.give_back(job, "why")
    assert [ledger.claim(["b"], patience_seconds=0).id for _ in range(2)] == [jobs["urgent"], jobs["old"]]


def test_a_full_queue_refuses_new_jobs_and_finds_known_ones(ledger):
    first, _ = put(ledger, "one", most_queued=1)
    with pytest.raises(Problem, match="too many jobs"):
        put(ledger, "two", most_queued=1)
    assert put(ledger, "one", most_queued=1) == (first, False)
    ledger.claim([], 0)
    ledger.finish(first.id, "failed", error="why")
    again, new = put(ledger, "one", most_queued=1)  # a failed job is put in line again by submitting it
    assert (again.id, again.state, again.error, new) == (first.id, "queued", None, False)
    assert not ledger.retry(first.id)


def test_a_job_that_is_submitted_after_its_cancellation_runs(ledger):
    """While the worker still stops the first one."""
    first, _ = put(ledger, "one")
    ledger.claim([], 0)
    assert ledger.cancel(first.id) == "running"
    second, new = put(ledger, "one")
    assert new and second.id != first.id
    assert put(ledger, "one") == (second, False)
    ledger.finish(first.id, "cancelled")
    assert ledger.claim([], 0).id == second.id
    assert ledger.retry(first.id)


def test_a_newer_ledger_and_what_is_none_are_refused_in_one_sentence(tmp_path):
    file = tmp_path / "jobs.sqlite"
    ledger = Ledger(file)
    for number in range(100):
        put(ledger, str(number))
    ledger.close()
    whole = file.read_bytes()
    with closing(sqlite3.connect(file)) as database:
        database.execute("pragma user_version = 3")
    with pytest.raises(UsageError, match="newer version of reflogp"):
        Ledger(file)
    quarter = len(whole) // 4
    file.write_bytes(whole[:quarter] + b"\xff" * quarter + whole[2 * quarter :])
    with pytest.raises(UsageError, match=r"is damaged \(.*mkdir -p .* && mv .*jobs\.sqlite\* "):
        Ledger(file)
    file.write_bytes(b"no database at all" * 1000)
    with pytest.raises(UsageError, match=r"jobs\.sqlite\) is damaged \(file is not a database\)"):
        Ledger(file)


def test_cancelled_jobs_end_cancelled_whatever_happens_to_them(ledger):
    ends = {
        "requeue": lambda job: ledger.requeue_lost([], "why"),
        "give_back": lambda job: ledger.give_back(job, "why"),
        "finish": lambda job: ledger.finish(job, "cancelled"),
    }
    for name, end in ends.items():
        job = put(ledger, name)[0].id
        assert ledger.claim([], 0).id == job
        assert ledger.cancel(job) == "running" and ledger.get(job).state == "running"
        end(job)
        found = ledger.get(job)
        assert (found.state, found.finished_at is not None, ledger.claim([], 0)) == ("cancelled", True, None), name
        assert ledger.retry(job) and ledger.claim([], 0).id == job  # the wish ended with the job
        ledger.give_back(job, "why")
        assert ledger.get(job).state == "queued", name
        assert ledger.cancel(job) == "queued"
    assert ledger.cancel("none") is None and ledger.cancel(job) == "cancelled"


def test_a_task_that_fails_is_started_again(monkeypatch, caplog):
    from reflogp.service import supervision

    monkeypatch.setattr(supervision, "_PAUSE", 0.001)
    runs = []

    async def work():
        runs.append(1)
        if len(runs) < 4:
            raise ValueError("a defect")

    asyncio.run(supervision.supervise("some work", work))
    assert len(runs) == 4 and 'the task "some work" failed and will be restarted' in caplog.text


# Uploads


class Place:
    """A folder of uploads, its ledger and its settings."""

    def __init__(self, folder: Path, **settings) -> None:
        self.folder = folder / "uploads"
        self.settings = ServerSettings(store=str(folder / "store"), **settings)
        self.ledger = Ledger(folder / "jobs.sqlite")
        self.open()

    def open(self) -> None:
        """The folder as a service that starts now sees it."""
        self.datasets = DatasetFiles(self.folder, self.ledger, self.settings)
        self.uploads = Uploads(self.datasets, self.ledger)

    def send(self, name: str, *chunks: bytes, declared: int | None = None):
        return asyncio.run(self.uploads.receive(name, arriving(*chunks), declared))

    def refused(self, chunks, declared: int | None = None) -> int:
        """The status that a body is refused with."""
        with pytest.raises(Problem) as caught:
            asyncio.run(self.uploads.receive("refused.jsonl", chunks, declared))
        assert caught.value.next_step
        return caught.value.status

    def files(self) -> list[str]:
        return sorted(file.name for file in self.folder.iterdir())

    def require_empty(self) -> None:
        assert (self.files(), self.datasets.used, self.uploads.list()) == ([], 0, [])

    def submit(self, file: Path, **source: str) -> str:
        return put(self.ledger, str(file), file=str(file), **source)[0].id

    def age(self) -> None:
        """As if what is in the folder had arrived long ago."""
        for file in self.folder.iterdir():
            os.utime(file, (0, 0))


async def arriving(*chunks, pause: float = 0.0, then: type[BaseException] | None = None):
    for chunk in chunks:
        await asyncio.sleep(pause)
        yield chunk
    if then is not None:
        raise then


def endless(pause: float = 0.0):
    return arriving(*[b"x" * 999] * 10_000, pause=pause)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_a_file_is_kept_by_its_content(place):
    upload, created = place.send("a.jsonl", b'{"a"', b"", b": 1}\n", declared=9)
    digest = hashlib.sha256(b'{"a": 1}\n').hexdigest()
    assert (upload.name, upload.bytes, upload.sha256, created) == ("a.jsonl", 9, digest, True)
    file, found = place.uploads.resolve("a.jsonl")
    assert (file.name, found, file.read_bytes()) == (f"{digest}.jsonl", digest, b'{"a": 1}\n')
    assert file.stat().st_mode & 0o77 == 0
    assert place.uploads.get("a.jsonl") == upload and place.uploads.list() == [upload]
    assert place.files() == [file.name]
    assert place.send("a.jsonl", b"new")[1] is False
    assert place.uploads.resolve("a.jsonl")[0].read_bytes() == b"new" and file.exists()  # jobs that read it go on


NO_NAMES = [
    *("", "../a.jsonl", "a\\b.jsonl", ".hidden.jsonl", "-a.jsonl", "a.jsonl\n", "a\0.jsonl", "ä.jsonl"),
    *("a", "a.txt", "a.jsonl.exe", "a.gz", "a.parquet.gz", "a.jsonl.gz.gz", f"{'x' * 200}.csv"),
]


def test_names_that_are_none():
    assert [name for name in NO_NAMES if re.fullmatch(UPLOAD_PATTERN, name)] == []


@pytest.mark.parametrize(
    "chunks, declared, settings, status",
    [
        (endless, None, {"max_upload_bytes": 10_000}, 413),
        (lambda: endless(60), 10_001, {"max_upload_bytes": 10_000}, 413),
        (lambda: endless(60), 1 << 80, {}, 413),
        (endless, None, {"max_uploads_bytes": 10_000}, 507),
        (lambda: endless(60), 10_001, {"max_uploads_bytes": 10_000}, 507),
        (lambda: arriving(b"", b""), 0, {}, 422),
    ],
)
def test_bodies_that_are_too_much_leave_nothing_and_are_refused_as_soon_as_they_are_announced(
    tmp_path, chunks, declared, settings, status
):
    place = Place(tmp_path, **settings)
    begin = time.monotonic()
    assert place.refused(chunks(), declared) == status
    assert time.monotonic() - begin < 10
    place.require_empty()


@pytest.mark.parametrize("error", [ConnectionResetError, asyncio.CancelledError])
def test_a_disconnect_leaves_nothing(place, error):
    with pytest.raises(error):
        asyncio.run(place.uploads.receive("a.jsonl", arriving(b"x" * 2_000_000, b"y", then=error), None))
    place.require_empty()


def test_all_together_are_bounded_while_they_arrive(tmp_path):
    place = Place(tmp_path, max_uploads_bytes=3_000_000)

    async def five_at_once():
        sending = [
            place.uploads.receive(f"{n}.csv", arriving(*[bytes([n]) * 100_000] * 10, pause=0.001), None) for n in range(5)
        ]
        return await asyncio.gather(*sending, return_exceptions=True)

    outcomes = asyncio.run(five_at_once())
    failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert all(isinstance(outcome, Problem) and outcome.status == 507 for outcome in failed)
    assert sum(file.stat().st_size for file in place.folder.iterdir()) <= 3_000_000
    assert len(place.files()) == 5 - len(failed)


def test_a_full_folder_takes_files_again_when_others_were_deleted(tmp_path):
    place = Place(tmp_path, max_uploads_bytes=100)
    place.send("a.csv", b"a" * 80)
    assert place.refused(arriving(b"b" * 80)) == 507
    place.uploads.delete("a.csv")
    place.age()
    place.send("b.csv", b"b" * 80)
    (place.folder / ".partial-0123").write_bytes(b"half")  # of a service that was killed
    place.open()
    assert len(place.files()) == 1
    assert place.refused(arriving(b"c" * 80)) == 507  # what lies there from before counts


def test_what_nobody_needs_is_deleted(place):
    for name in ("named", "read", "failed", "free", "fresh"):
        place.send(f"{name}.jsonl", name.encode())
    for name in ("read", "failed"):
        job = place.submit(place.uploads.resolve(f"{name}.jsonl")[0])
    place.ledger.finish(job, "failed")  # it may be tried again
    for name in ("a", "b"):  # datasets that were fetched: one of a queued job, one of a failed job, which would fetch it again
        (place.folder / name).mkdir()
        (place.folder / name / "00000.jsonl").write_text(name)
    place.submit(place.folder / "a", uri="s3://bucket/a.jsonl")
    place.ledger.finish(place.submit(place.folder / "b", uri="s3://bucket/b.jsonl"), "failed")
    for name in ("read", "failed", "free", "fresh"):
        place.uploads.delete(f"{name}.jsonl")
    place.age()
    place.send("fresh.jsonl", b"fresh")
    place.uploads.delete("fresh.jsonl")
    place.open()
    used = place.datasets.used
    assert place.datasets.collect() == 2 and place.datasets.used == used - len(b"free") - len(b"b")
    assert {file.read_bytes() for file in place.folder.iterdir() if file.is_file()} == {b"named", b"read", b"failed", b"fresh"}
    assert (place.folder / "a").is_dir() and not (place.folder / "b").exists()


def test_a_file_that_a_job_is_about_to_name_is_kept(place):
    place.send("a.jsonl", b"x")
    place.age()
    place.uploads.resolve("a.jsonl")  # the job is not in the ledger yet
    place.uploads.delete("a.jsonl")
    assert place.datasets.collect() == 0 and len(place.files()) == 1
