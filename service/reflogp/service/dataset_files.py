"""Keep uploaded and fetched datasets in one folder, whose total size is limited.

A dataset is a file, or a folder of files. It is named after the digest of its content, so equal datasets are kept once, and a
new upload under an existing name does not affect readers of the previous file. The ledger knows which datasets are needed:
those that an upload's name refers to, and those of jobs that may still run. Only one DatasetFiles may use the folder at a time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from anyio import to_thread

from reflogp.scoring.data.read import dataset_suffix
from reflogp.service.confined_paths import folder_digest
from reflogp.service.ledger import Ledger
from reflogp.service.models import Upload
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings
from reflogp.store.texts import byte_count

#: Prefix of the names of datasets that are still arriving or are being deleted.
_PARTIAL = ".partial-"
#: A dataset is kept for at least this many seconds after it arrived or was named in a request: the job that will use it may not
#: be in the ledger yet.
_GRACE_SECONDS = 120

#: Number of received bytes to collect in memory before a background thread writes them to disk.
_WRITE_BYTES = 256 << 10
#: Maximum number of uploads.
_MOST_UPLOADS = 10_000


class DatasetFiles:
    """The folder of datasets, which is created if it does not exist. All methods block and are thread-safe."""

    def __init__(self, folder: Path, ledger: Ledger, settings: ServerSettings) -> None:
        self.folder = folder.absolute()
        self.most_bytes = settings.max_upload_bytes
        self._most_together = settings.max_uploads_bytes
        self._ledger = ledger
        self._counting = Lock()  # held while `used` changes
        self._naming = Lock()  # held while complete datasets are named, touched or deleted
        folder.mkdir(parents=True, exist_ok=True)
        for incomplete in folder.glob(f"{_PARTIAL}*"):
            _delete(incomplete)
        self.used = sum(map(_size, folder.iterdir()))  # bytes, with what is reserved for datasets that are arriving

    def touch(self, name: str) -> Path | None:
        """Return the path of a dataset, and keep it until the job that will use it is in the ledger; None if there is none."""
        with self._naming:
            try:
                os.utime(self.folder / name)
            except FileNotFoundError:
                return None
            return self.folder / name

    def collect(self) -> int:
        """Delete the datasets that nobody needs, and return how many were deleted."""
        deleted, before = 0, time.time() - _GRACE_SECONDS
        with self._naming:
            needed = self._ledger.files_in_use()
            for dataset in self.folder.iterdir():
                if dataset.name in needed or dataset.name.startswith(_PARTIAL) or dataset.stat().st_mtime > before:
                    continue
                size = _size(dataset)
                _delete(dataset)
                self.give(size)
                deleted += 1
        return deleted

    def take(self, size: int) -> None:
        """Count `size` bytes as used. Raise Problem 507 if they do not fit even after unneeded datasets are deleted."""
        if not self._taken(size):
            self.collect()
            if not self._taken(size):
                raise self.no_room()

    def give(self, size: int) -> None:
        with self._counting:
            self.used -= size

    def no_room(self) -> Problem:
        return Problem(
            507,
            f"uploads and fetched datasets may take at most {byte_count(self._most_together)} (max_uploads_bytes), and there "
            "is not enough space for this dataset",
            "delete uploads that you no longer need (DELETE /v1/uploads/NAME), or wait until two minutes after other jobs have "
            "ended, or until failed and cancelled jobs are deleted (keep_days)",
        )

    def keep(self, arrived: Path, name: str, size: int) -> Path:
        """Give a complete file or folder its final name. If it exists already, its content is the same."""
        dataset = self.folder / name
        with self._naming:
            if dataset.exists():
                self.give(size)
            else:
                arrived.rename(dataset)
                _sync(self.folder)
            os.utime(dataset)
        return dataset

    def _taken(self, size: int) -> bool:
        with self._counting:
            if self.used + size > self._most_together:
                return False
            self.used += size
            return True


class Incoming:
    """A dataset that arrives. Its bytes are hashed and counted; what arrived is deleted at the end unless `keep` was called.

    All methods raise Problem 413 if the dataset is larger than allowed, and 507 if there is no space left for it.
    """

    def __init__(self, files: DatasetFiles) -> None:
        self._files = files
        self._folder = files.folder / f"{_PARTIAL}{secrets.token_hex(8)}"
        self._sink: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._digests: dict[str, str] = {}  # of the complete files, by their names
        self._reserved = 0
        self.size = self.file_size = 0  # bytes that have arrived, in all and of the last file

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def begin(self, name: str, size: int | None) -> None:
        """Begin the next file, of `size` bytes if this is known. Names of files are in the order of the dataset's rows."""
        with self._full_disk_told():
            self._reserve(self.size + (size or 0))
            self._end_file()
            self._folder.mkdir(exist_ok=True)
            self._sink = open(self._folder / name, "xb", opener=partial(os.open, mode=0o600))  # noqa: SIM115
            self._digest, self.file_size = hashlib.sha256(), 0

    def write(self, block: bytes) -> None:
        with self._full_disk_told():
            assert self._sink is not None, "`begin` is called before `write`"
            self._reserve(self.size + len(block))
            self.size += len(block)
            self.file_size += len(block)
            self._digest.update(block)
            self._sink.write(block)

    def keep(self) -> tuple[Path, str]:
        """Keep the dataset, which is then on disk. Return its path and digest: of a single file, its SHA-256 digest."""
        with self._full_disk_told():
            self._end_file()
            if len(self._digests) == 1:
                [(name, digest)] = self._digests.items()
                arrived, name = self._folder / name, f"{digest}{dataset_suffix(name)}"
            else:
                name = digest = folder_digest(self._digests)
                arrived = self._folder
                _sync(arrived)
            dataset = self._files.keep(arrived, name, self.size)
            self._reserved -= self.size
            return dataset, digest

    def close(self) -> None:
        if self._sink is not None:
            with suppress(OSError):  # of a full disk, as the write before
                self._sink.close()
            self._sink = None
        self._files.give(self._reserved)
        self._reserved = 0
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_file(self) -> None:
        if self._sink is not None:
            self._sink.flush()
            os.fsync(self._sink.fileno())
            self._sink.close()
            self._digests[Path(self._sink.name).name] = self._digest.hexdigest()
            self._sink = None

    def _reserve(self, size: int) -> None:
        if size > self._files.most_bytes:
            detail = f"the dataset is larger than {self._files.most_bytes:,} bytes (max_upload_bytes)"
            raise Problem(413, detail, "split or compress it")
        if size > self._reserved:
            self._files.take(size - self._reserved)
            self._reserved = size

    @contextmanager
    def _full_disk_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._files.no_room() from error
            raise


class Uploads:
    """The uploads, each a name for a dataset. `get`, `delete` and `resolve` raise Problem 404 for an unknown name."""

    def __init__(self, files: DatasetFiles, ledger: Ledger) -> None:
        self._files = files
        self._ledger = ledger

    async def receive(self, name: str, chunks: AsyncIterator[bytes], declared_length: int | None) -> tuple[Upload, bool]:
        """Receive a file, record its name, and return the upload and whether its name is new.

        If it raises an error, the name still refers to the previous file.

        Raises Problem: 413 if the file is too large, 422 if it is empty, 507 if there is not enough space.
        """
        file, digest, size = await self.receive_nameless(str(dataset_suffix(name)), chunks, declared_length)
        return await to_thread.run_sync(self._put, name, file.name, size, digest)

    async def receive_nameless(self, suffix: str, chunks: AsyncIterator[bytes], length: int | None) -> tuple[Path, str, int]:
        """Receive a file for a single job, and return its path, SHA-256 digest and size. Raises as `receive`."""
        with Incoming(self._files) as incoming:
            await to_thread.run_sync(incoming.begin, f"data{suffix}", length)
            async for block in _blocks(chunks):
                await to_thread.run_sync(incoming.write, block)
            if not incoming.size:
                raise Problem(422, "the file is empty", "send a file that contains rows")
            file, digest = await to_thread.run_sync(incoming.keep)
        return file, digest, incoming.size

    def list(self) -> list[Upload]:
        return [Upload.model_validate(row, extra="ignore") for row in self._ledger.uploads()]

    def get(self, name: str) -> Upload:
        row = self._ledger.upload(name)
        if row is None:
            raise _unknown(name)
        return Upload.model_validate(row, extra="ignore")

    def delete(self, name: str) -> None:
        """Delete the name of an upload. Its file is deleted once no job and no other upload needs it."""
        if not self._ledger.delete_upload(name):
            raise _unknown(name)

    def resolve(self, name: str) -> tuple[Path, str]:
        """Return the path and SHA-256 digest of an upload's file, for use by a job that is submitted now."""
        row = self._ledger.upload(name)
        file = None if row is None else self._files.touch(row["file"])
        if row is None or file is None:
            raise _unknown(name)
        return file, row["sha256"]

    def _put(self, name: str, content_name: str, size: int, sha256: str) -> tuple[Upload, bool]:
        created = self._ledger.upload(name) is None
        if created and len(self._ledger.uploads()) >= _MOST_UPLOADS:
            detail = f"there are already {_MOST_UPLOADS:,} uploads"
            raise Problem(507, detail, "delete uploads that you no longer need (DELETE /v1/uploads/NAME)")
        self._ledger.put_upload(name, content_name, size, sha256)
        return self.get(name), created


async def _blocks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    block = bytearray()
    async for chunk in chunks:
        block += chunk
        if len(block) >= _WRITE_BYTES:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _unknown(name: str) -> Problem:
    return Problem(404, f"there is no upload {name[:200]!r}", "GET /v1/uploads lists all uploads")


def _size(dataset: Path) -> int:
    return sum(map(_size, dataset.iterdir())) if dataset.is_dir() else dataset.stat().st_size


def _delete(dataset: Path) -> None:
    if dataset.is_dir():
        # if the service is killed after the rename, it deletes the folder at its next start
        doomed = dataset.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
        dataset.rename(doomed)
        shutil.rmtree(doomed)
    else:
        dataset.unlink()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
