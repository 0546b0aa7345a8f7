"""The folder of uploads, on its own: files arrive whole or not at all."""

import asyncio
import hashlib
import os
import re
import time
from pathlib import Path

import pytest

from reflogp.service.dataset_files import DatasetFiles, Uploads
from reflogp.service.ledger import Ledger
from reflogp.service.models import UPLOAD_PATTERN
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings
from tests.service.test_ledger import put


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
