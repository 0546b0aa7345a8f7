"""Uploads: whole or not at all, bounded, and never changed under a reader."""

import asyncio
import hashlib
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from reflogp.service.fetched import DatasetQuota
from reflogp.service.ledger import Ledger, Submission
from reflogp.service.models import DatasetSpec, JobSettings
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings
from reflogp.service.uploads import UploadFolder

LONG_AGO = time.time() - 86_400


class Place:
    """A folder of uploads, its ledger and its settings."""

    def __init__(self, folder: Path, **settings) -> None:
        self.folder = folder / "uploads"
        self.settings = ServerSettings(store=str(folder / "store"), **settings)
        self.ledger = Ledger(folder / "jobs.sqlite")
        self.uploads = self.open()

    def open(self) -> UploadFolder:
        """The folder as a service that starts now sees it."""
        return UploadFolder(self.folder, self.ledger, self.settings, DatasetQuota(self.settings.max_uploads_bytes))

    def send(self, name: str, *chunks: bytes, declared: int | None = None):
        return asyncio.run(self.uploads.receive(name, arriving(*chunks), declared))

    def refused(self, name: str, chunks, declared: int | None = None) -> Problem:
        with pytest.raises(Problem) as caught:
            asyncio.run(self.uploads.receive(name, chunks, declared))
        assert caught.value.next_step
        return caught.value

    def files(self) -> list[str]:
        return sorted(file.name for file in self.folder.iterdir())

    def submit(self, file: Path) -> None:
        settings, dataset = JobSettings(reference="r"), DatasetSpec(upload="a.jsonl")
        self.ledger.submit(Submission(str(file), "c", settings, dataset, {"file": str(file)}, "0" * 32, "me"))


async def arriving(*chunks, pause: float = 0.0, then: type[BaseException] | None = None):
    for chunk in chunks:
        await asyncio.sleep(pause)
        yield chunk
    if then is not None:
        raise then


async def endless(chunk: bytes, pause: float = 0.0):
    while True:
        await asyncio.sleep(pause)
        yield chunk


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


def test_many_blocks_arrive_as_one_file(place):
    blocks = [os.urandom(700_000) for _ in range(9)]
    upload, _ = place.send("big.csv.gz", *blocks)
    assert upload.sha256 == hashlib.sha256(b"".join(blocks)).hexdigest()
    assert place.uploads.resolve("big.csv.gz")[0].name.endswith(".csv.gz")


def test_a_new_file_of_a_name_disturbs_no_reader(place):
    place.send("a.jsonl", b"old")
    old, _ = place.uploads.resolve("a.jsonl")
    with old.open("rb") as reader:
        assert place.send("a.jsonl", b"new")[1] is False
        assert place.send("b.jsonl", b"old")[1] is True  # the same content again
        assert reader.read() == b"old" == old.read_bytes()
    assert place.uploads.resolve("a.jsonl")[0].read_bytes() == b"new"


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../a.jsonl", "/etc/a.jsonl", "a/b.jsonl", "a\\b.jsonl", ".hidden.jsonl", "-a.jsonl", "_a.jsonl"),
        *(
            "a.jsonl\n",
            "a\n.jsonl",
            "a.jsonl\0",
            "a\0.jsonl",
            "a b.jsonl",
            "ä.jsonl",
            "a%2f.jsonl",
            "a.jsonl;x",
            f"{'x' * 200}.csv",
        ),
        *(
            "a",
            "a.txt",
            "a.exe",
            "a.jsonl.exe",
            "a.gz",
            "jsonl",
            "a.parquet.gz",
            "a.arrow.zst",
            "a.pickle",
            "a.pt",
            "a.jsonl.gz.gz",
        ),
    ],
)
def test_names_that_are_none_are_refused(place, name):
    assert place.refused(name, arriving(b"{}")).status == 422
    assert place.files() == [] and place.uploads.list() == []


@pytest.mark.parametrize(
    "why, chunks, declared, settings, status",
    [
        ("longer than a file may be", lambda: endless(b"x" * 999), None, {"max_upload_bytes": 10_000}, 413),
        ("announced longer than a file may be", lambda: endless(b"x", 60), 10_001, {"max_upload_bytes": 10_000}, 413),
        ("announced huge", lambda: endless(b"x", 60), 1 << 80, {}, 413),
        ("more than all may be", lambda: endless(b"x" * 999), None, {"max_uploads_bytes": 10_000}, 507),
        ("announced more than all may be", lambda: endless(b"x", 60), 10_001, {"max_uploads_bytes": 10_000}, 507),
        ("less than announced", lambda: arriving(b"x" * 99), 100, {}, 400),
        ("more than announced", lambda: endless(b"x" * 99), 100, {}, 400),
        ("nothing of what was announced", lambda: arriving(), 1, {}, 400),
        ("nothing at all", lambda: arriving(b"", b""), 0, {}, 422),
    ],
)
def test_bodies_that_are_too_much_or_too_little_leave_nothing(tmp_path, why, chunks, declared, settings, status):
    place = Place(tmp_path, **settings)
    begin = time.monotonic()
    assert place.refused("a.jsonl", chunks(), declared).status == status
    assert time.monotonic() - begin < 10
    assert place.files() == [] and place.uploads.list() == []


@pytest.mark.parametrize("error", [ConnectionResetError, RuntimeError, asyncio.CancelledError])
def test_a_disconnect_leaves_nothing(place, error):
    with pytest.raises(error):
        asyncio.run(place.uploads.receive("a.jsonl", arriving(b"x" * 2_000_000, b"y", then=error), None))
    assert place.files() == [] and place.uploads.list() == []


def test_a_cancelled_upload_leaves_nothing(place):
    async def cancelled_in_the_middle():
        task = asyncio.create_task(place.uploads.receive("a.jsonl", endless(b"x" * 2_000_000, 0.01), None))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancelled_in_the_middle())
    assert place.files() == []


def test_all_together_are_bounded_while_they_arrive(tmp_path):
    place = Place(tmp_path, max_uploads_bytes=3_000_000)

    async def five_at_once():
        sending = [
            place.uploads.receive(f"{n}.csv", arriving(*[bytes([n]) * 100_000] * 10, pause=0.001), None) for n in range(5)
        ]
        return await asyncio.gather(*sending, return_exceptions=True)

    outcomes = asyncio.run(five_at_once())
    assert all(not isinstance(o, Exception) or (isinstance(o, Problem) and o.status == 507) for o in outcomes)
    assert sum(file.stat().st_size for file in place.folder.iterdir()) <= 3_000_000
    assert len(place.files()) == sum(not isinstance(o, Exception) for o in outcomes)


def test_a_full_folder_takes_files_again_when_others_were_deleted(tmp_path):
    place = Place(tmp_path, max_uploads_bytes=100)
    place.send("a.csv", b"a" * 80)
    assert place.refused("b.csv", arriving(b"b" * 80)).status == 507
    place.uploads.delete("a.csv")
    for file in place.folder.iterdir():
        os.utime(file, (LONG_AGO, LONG_AGO))
    place.send("b.csv", b"b" * 80)
    assert len(place.files()) == 1
    restarted = place.open()
    with pytest.raises(Problem):  # what lies there from before counts
        asyncio.run(restarted.receive("c.csv", arriving(b"c" * 80), None))


def test_leftovers_of_a_killed_service_are_removed(place):
    place.send("a.jsonl", b"kept")
    (place.folder / ".partial-0123").write_bytes(b"half")
    place.open()
    assert len(place.files()) == 1


def test_collect_deletes_what_nothing_refers_to(place):
    for name in ("named", "read", "free", "fresh"):
        place.send(f"{name}.jsonl", name.encode())
    read, _ = place.uploads.resolve("read.jsonl")
    place.submit(read)
    for name in ("read", "free", "fresh"):
        place.uploads.delete(f"{name}.jsonl")
    for file in place.folder.iterdir():
        if file.read_bytes() != b"fresh":
            os.utime(file, (LONG_AGO, LONG_AGO))
    assert place.uploads.collect(datetime.now(UTC) - timedelta(days=30)) == 0
    assert place.uploads.collect(datetime.now(UTC)) == 1
    assert {file.read_bytes() for file in place.folder.iterdir()} == {b"named", b"read", b"fresh"}


def test_a_file_that_a_job_is_about_to_name_is_not_collected(place):
    place.send("a.jsonl", b"x")
    [file] = place.folder.iterdir()
    os.utime(file, (LONG_AGO, LONG_AGO))
    resolved, _ = place.uploads.resolve("a.jsonl")  # the job is not in the ledger yet
    place.uploads.delete("a.jsonl")
    assert place.uploads.collect(datetime.now(UTC)) == 0
    assert resolved.exists()


def test_unknown_names(place):
    place.send("a.jsonl", b"x")
    for ask in (place.uploads.get, place.uploads.delete, place.uploads.resolve):
        with pytest.raises(Problem) as caught:
            ask("b.jsonl")
        assert caught.value.status == 404
    [file] = place.folder.iterdir()
    file.unlink()
    with pytest.raises(Problem):
        place.uploads.resolve("a.jsonl")


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    """/dev/shm of a size of its own would need root; a limit on the file's size is the same to the writer."""
    import resource
    import signal

    place = Place(tmp_path)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
    try:
        problem = place.refused("a.jsonl", endless(b"x" * (1 << 20)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert problem.status == 507
    assert place.files() == []
