"""Keep uploaded dataset files in one folder.

Each file is named after its digest, so that a new upload under an existing name does not affect readers of the previous file.
The ledger maps upload names to files. At any time, only one UploadFolder may use the folder. All methods except `receive` and
`receive_nameless` are blocking calls.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from anyio import to_thread

from reflogp.scoring.data.read import SUFFIXES_IN_WORDS, dataset_suffix
from reflogp.service.fetched import DatasetQuota
from reflogp.service.ledger import Ledger
from reflogp.service.models import NAME_PATTERN, Upload
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings

_PARTIAL = ".partial-"
#: Number of received bytes to collect in memory before a background thread writes them to disk.
_WRITE_BYTES = 256 << 10
#: Maximum number of uploads. One response lists all of them.
_MOST_UPLOADS = 10_000
#: A file is kept for at least this time after it was received or returned by `resolve`. During this time, the job that will use
#: the file may not be in the ledger yet.
_GRACE = timedelta(minutes=10)
_DELETE_SOME = "delete uploads that you no longer need (DELETE /v1/uploads/NAME)"
_MAKE_ROOM = f"{_DELETE_SOME}; freeing their space may take ten minutes"


class UploadFolder:
    """The folder of uploaded files, and the names of the uploads.

    Args:
        folder: path of the folder, which is created if it does not exist. Incomplete files left behind by a killed service are
            deleted.
        ledger: records the names of uploads.
        settings: limits on uploads.
        room: limits the total size of uploads and fetched datasets.
    """

    def __init__(self, folder: Path, ledger: Ledger, settings: ServerSettings, room: DatasetQuota) -> None:
        self._folder = folder.absolute()
        self._ledger = ledger
        self._settings = settings
        self._room = room
        self._lock = Lock()  # held while a complete file is renamed, touched or deleted
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(f"{_PARTIAL}*"):
            partial.unlink(missing_ok=True)
        room.hold(sum(file.stat().st_size for file in folder.iterdir() if file.is_file()))
        room.add_sweeper(lambda: self.collect(datetime.now(UTC)))

    async def receive(self, name: str, chunks: AsyncIterator[bytes], declared_length: int | None) -> tuple[Upload, bool]:
        """Receive a file and record its name.

        When this method returns, the file is on disk. If the method raises an error, the name still refers to the previous
        file, if any.

        Args:
            name: name of the upload. Its suffix determines the file's format.
            chunks: content of the file, as it arrives.
            declared_length: the request's Content-Length, or None if it is missing or invalid.

        Returns:
            The upload, and whether its name is new.

        Raises:
            Problem: 400 if the content does not have the declared length, 413 if the
                file is too large, 422 if the name is invalid, its suffix is not supported or the file is empty, 507 if there is
                not enough space or there are too many uploads.
        """
        file, digest, size = await self._receive(_suffix_of(name), chunks, declared_length)
        return await to_thread.run_sync(self._put, name, file.name, size, digest)

    async def receive_nameless(
        self, suffix: str, chunks: AsyncIterator[bytes], declared_length: int | None
    ) -> tuple[Path, str]:
        """Receive a file without a name, for a single job, and return the file's path and SHA-256 digest.

        The file is kept for at least ten minutes, and after that for as long as a job needs it.

        Raise the same Problems as `receive`, except those about the name and the number of uploads.
        """
        file, digest, _ = await self._receive(suffix, chunks, declared_length)
        return file, digest

    async def _receive(self, suffix: str, chunks: AsyncIterator[bytes], declared_length: int | None) -> tuple[Path, str, int]:
        """Receive a file, and return its path, its SHA-256 digest and its size in bytes."""
        if declared_length is not None:
            self._check_length(declared_length)
            if not await to_thread.run_sync(self._room.fits, declared_length):
                raise self._no_room()
        partial = self._folder / f"{_PARTIAL}{secrets.token_hex(8)}"
        size, taken, digest = 0, 0, hashlib.sha256()

        def keep() -> Path:
            nonlocal taken
            file = self._keep(partial, f"{digest.hexdigest()}{suffix}", size)
            taken = 0  # the complete file keeps its share of the quota, even if the request is cancelled
            return file

        try:
            file = await to_thread.run_sync(_create, partial)
            try:
                async for block in self._blocks(chunks):
                    self._check_length(size + len(block))
                    await self._take_room(len(block))
                    size += len(block)
                    taken = size
                    if declared_length is not None and size > declared_length:
                        break
                    await to_thread.run_sync(_append, file, digest, block)
                if declared_length is not None and size != declared_length:
                    differs = "longer" if size > declared_length else "shorter"
                    detail = f"the body is {differs} than its Content-Length of {declared_length:,} bytes"
                    raise Problem(400, detail, "send the file again")
                if not size:
                    raise Problem(422, "the file is empty", "send a file that contains rows")
                await to_thread.run_sync(_make_durable, file)
            finally:
                file.close()
            return await to_thread.run_sync(keep), digest.hexdigest(), size
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._no_room() from error
            raise
        finally:
            self._room.give(taken)
            with suppress(FileNotFoundError):
                partial.unlink()  # no await here: if the client has disconnected, this task has been cancelled

    def list(self) -> list[Upload]:
        """Return all uploads, sorted by name."""
        return [Upload.model_validate(row, extra="ignore") for row in self._ledger.uploads()]

    def get(self, name: str) -> Upload:
        """Return an upload. Raise Problem 404 if the name is unknown."""
        row = self._ledger.upload(name)
        if row is None:
            raise _unknown(name)
        return Upload.model_validate(row, extra="ignore")

    def delete(self, name: str) -> None:
        """Delete the name of an upload.

        The file itself is deleted by `collect` once no job and no other upload needs it. Raise Problem 404 if the name is
        unknown.
        """
        if not self._ledger.delete_upload(name):
            raise _unknown(name)

    def resolve(self, name: str) -> tuple[Path, str]:
        """Return the path and SHA-256 digest of an upload's file, for use by a job.

        Raise Problem 404 if the name is unknown or its file does not exist.
        """
        with self._lock:
            row = self._ledger.upload(name)
            if row is None:
                raise _unknown(name)
            file = self._folder / row["file"]
            try:
                os.utime(file)  # the new modification time protects the file from `collect` until the job is in the ledger
            except FileNotFoundError as error:
                raise _unknown(name) from error
            return file, row["sha256"]

    def collect(self, older_than: datetime) -> int:
        """Delete files that no upload and no job uses, and return the number of deleted files.

        Unused files are kept if they were received, or returned by `resolve`, within the last ten minutes or after
        `older_than`. A failed or cancelled job still uses its file, because the job can be retried. A job that is done no
        longer uses its file.
        """
        deleted = 0
        before = min(older_than, datetime.now(UTC) - _GRACE).timestamp()
        with self._lock:
            needed = {row["file"] for row in self._ledger.uploads()}
            needed |= {Path(file).name for file in self._ledger.files_in_use()}
            for file in self._folder.iterdir():
                # skip partial files, which another thread may delete at any time
                if file.name in needed or file.name.startswith(_PARTIAL):
                    continue
                about = file.stat()
                if about.st_mtime < before:
                    file.unlink()
                    self._room.give(about.st_size)
                    deleted += 1
        return deleted

    async def _blocks(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Join chunks into larger blocks, and yield the blocks."""
        block = bytearray()
        async for chunk in chunks:
            block += chunk
            if len(block) >= _WRITE_BYTES:
                yield bytes(block)
                block.clear()
        if block:
            yield bytes(block)

    def _check_length(self, size: int) -> None:
        if size > self._settings.max_upload_bytes:
            raise Problem(
                413, f"the file is larger than {self._settings.max_upload_bytes:,} bytes", "split or compress the file"
            )

    async def _take_room(self, size: int) -> None:
        """Add the size of received data to the quota's bytes in use. Raise Problem 507 if this would exceed the quota."""
        if not self._room.take(size):
            await to_thread.run_sync(self._room.sweep)
            if not self._room.take(size):
                raise self._no_room()

    def _no_room(self) -> Problem:
        return Problem(507, "there is not enough space for the file", _MAKE_ROOM)

    def _keep(self, partial: Path, content_name: str, size: int) -> Path:
        """Rename a complete file to its final name."""
        file = self._folder / content_name
        with self._lock:
            if file.exists():
                self._room.give(size)
            partial.replace(file)  # an existing file with this name has the same content, so its readers are not affected
            os.utime(file)
            _sync_folder(self._folder)
        return file

    def _put(self, name: str, content_name: str, size: int, sha256: str) -> tuple[Upload, bool]:
        """Record in the ledger which file an upload's name refers to. Return the upload, and whether its name is new."""
        with self._lock:
            created = self._ledger.upload(name) is None
            if created and len(self._ledger.uploads()) >= _MOST_UPLOADS:
                raise Problem(507, f"there are already {_MOST_UPLOADS:,} uploads", _DELETE_SOME)
            self._ledger.put_upload(name, content_name, size, sha256)
            return self.get(name), created


def _suffix_of(name: str) -> str:
    """Return the suffix of an upload's name (`.jsonl`, `.csv.gz`, …).

    Raise Problem 422 if the name is invalid or the suffix is not supported.
    """
    if not re.fullmatch(NAME_PATTERN.removeprefix("^").removesuffix("$"), name):
        raise Problem(
            422,
            "a name must consist of 1 to 200 characters from A-Z a-z 0-9 . _ - and start with a letter or digit",
            "use another name",
        )
    suffix = dataset_suffix(name)
    if suffix is None:
        raise Problem(
            422,
            "the name does not end in the suffix of a known format",
            f"use a name that ends in {SUFFIXES_IN_WORDS}",
        )
    return suffix


def _unknown(name: str) -> Problem:
    return Problem(404, f"there is no upload {name[:200]!r}", "GET /v1/uploads lists all uploads")


def _create(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", buffering=0)


def _append(file: BinaryIO, digest: hashlib._Hash, block: bytes) -> None:
    digest.update(block)
    view = memoryview(block)
    while view:
        view = view[file.write(view) :]


def _make_durable(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
