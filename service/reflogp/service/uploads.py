"""Keep uploaded dataset files in one folder.

Each file is named by its content, so that a new upload does not disturb readers of the old file. The ledger holds the names of
uploads. Only one UploadFolder, in one process, may use the folder. All methods but `receive` and `receive_nameless` block.
"""

from __future__ import annotations

import asyncio
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
#: Bytes that are collected before they are written to the disk, outside the event loop.
_WRITE_BYTES = 256 << 10
#: Bytes that must arrive within `body_idle_seconds`, so that no client holds a connection by sending a byte a minute.
_LEAST_BYTES = 4 << 10
#: A file that was received or resolved within this time is never deleted, because a job may be about to name it.
_GRACE = timedelta(minutes=10)
_MAKE_ROOM = "delete unneeded uploads (DELETE /v1/uploads/NAME), and wait ten minutes"


class UploadFolder:
    """Uploads by name.

    Args:
        folder: created if it does not exist. Partial files that a killed service left in it are deleted.
        ledger: maps names to files.
        settings: bounds on uploads.
        room: bounds the size of uploads and fetched datasets together.
    """

    def __init__(self, folder: Path, ledger: Ledger, settings: ServerSettings, room: DatasetQuota) -> None:
        self._folder = folder.absolute()
        self._ledger = ledger
        self._settings = settings
        self._room = room
        self._lock = Lock()  # held while a complete file is named, touched or deleted
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(f"{_PARTIAL}*"):
            partial.unlink(missing_ok=True)
        room.hold(sum(file.stat().st_size for file in folder.iterdir() if file.is_file()))
        room.add_sweeper(lambda: self.collect(datetime.now(UTC)))

    async def receive(self, name: str, chunks: AsyncIterator[bytes], declared_length: int | None) -> tuple[Upload, bool]:
        """Receive a file. It is on the disk when this returns; if this raises, nothing of it is kept under the name.

        Args:
            name: name of the upload; its suffix gives the format.
            chunks: the content, as it arrives.
            declared_length: the request's Content-Length, or None.

        Returns:
            The upload, and whether its name is new.

        Raises:
            Problem: 400 if the length is not the declared one, 408 if the bytes stop coming, 413 if the file is too long, 507
                if there is no room or there are too many uploads, 422 for an invalid name and for an empty file.
        """
        file, digest, size = await self._receive(_suffix_of(name), chunks, declared_length)
        return await to_thread.run_sync(self._put, name, file.name, size, digest)

    async def receive_nameless(
        self, suffix: str, chunks: AsyncIterator[bytes], declared_length: int | None
    ) -> tuple[Path, str]:
        """Receive a file for one job; return (file, sha256). It is kept for some minutes, and after that while a job needs it.

        Raises Problem as `receive`, without the checks of the name.
        """
        file, digest, _ = await self._receive(suffix, chunks, declared_length)
        return file, digest

    async def _receive(self, suffix: str, chunks: AsyncIterator[bytes], declared_length: int | None) -> tuple[Path, str, int]:
        """Receive a file; return (file, sha256, bytes)."""
        if declared_length is not None:
            self._check_length(declared_length)
            if not await to_thread.run_sync(self._room.fits, declared_length):
                raise self._no_room()
        partial = self._folder / f"{_PARTIAL}{secrets.token_hex(8)}"
        size, taken, digest = 0, 0, hashlib.sha256()

        def keep() -> Path:
            nonlocal taken
            file = self._keep(partial, f"{digest.hexdigest()}{suffix}", size)
            taken = 0  # the room belongs to the complete file now, even if the request was cancelled
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
                    raise Problem(400, detail, "send it again")
                if not size:
                    raise Problem(422, "the file is empty", "send a file with rows")
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
                partial.unlink()  # not awaited: a client that went away has cancelled this task

    def list(self) -> list[Upload]:
        """Return all uploads, sorted by name."""
        return [Upload.model_validate(row, extra="ignore") for row in self._ledger.uploads()]

    def get(self, name: str) -> Upload:
        """Return an upload. Raises Problem 404 if the name is unknown."""
        row = self._ledger.upload(name)
        if row is None:
            raise _unknown(name)
        return Upload.model_validate(row, extra="ignore")

    def delete(self, name: str) -> None:
        """Delete a name. Its file stays for jobs that read it, until `collect`. Raises Problem 404 if the name is unknown."""
        if not self._ledger.delete_upload(name):
            raise _unknown(name)

    def resolve(self, name: str) -> tuple[Path, str]:
        """Return (file, sha256) of an upload, for a job. Raises Problem 404 if the name or its file is unknown."""
        with self._lock:
            row = self._ledger.upload(name)
            if row is None:
                raise _unknown(name)
            file = self._folder / row["file"]
            try:
                os.utime(file)  # until the job is in the ledger, the file's new time protects it from `collect`
            except FileNotFoundError as error:
                raise _unknown(name) from error
            return file, row["sha256"]

    def collect(self, older_than: datetime) -> int:
        """Delete unreferenced files that were not received or resolved since `older_than`; return how many.

        A file is referenced by the names of uploads and by all jobs except done ones. Files received or resolved in the last
        ten minutes are never deleted.
        """
        deleted = 0
        before = min(older_than, datetime.now(UTC) - _GRACE).timestamp()
        with self._lock:
            needed = {row["file"] for row in self._ledger.uploads()}
            needed |= {Path(file).name for file in self._ledger.files_in_use()}
            for file in self._folder.iterdir():
                if file.name in needed or file.name.startswith(_PARTIAL):  # a partial file may disappear at any moment
                    continue
                about = file.stat()
                if about.st_mtime < before:
                    file.unlink()
                    self._room.give(about.st_size)
                    deleted += 1
        return deleted

    async def _blocks(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks joined into blocks. Raises Problem 408 if they arrive too slowly."""
        loop, patience = asyncio.get_running_loop(), self._settings.body_idle_seconds
        block, since = bytearray(), 0
        deadline = loop.time() + patience
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise Problem(
                    408, f"less than {_LEAST_BYTES:,} bytes arrived within {patience:.0f} seconds", "send it again"
                ) from None
            if chunk is None:
                break
            block += chunk
            since += len(chunk)
            if since >= _LEAST_BYTES:
                since, deadline = 0, loop.time() + patience
            if len(block) >= _WRITE_BYTES:
                yield bytes(block)
                block.clear()
                deadline = loop.time() + patience  # the time for writing to the disk does not count against the sender
        if block:
            yield bytes(block)

    def _check_length(self, size: int) -> None:
        if size > self._settings.max_upload_bytes:
            raise Problem(413, f"the file is longer than {self._settings.max_upload_bytes:,} bytes", "split it, or compress it")

    async def _take_room(self, size: int) -> None:
        """Take room for bytes that arrived. Raises Problem if there is none."""
        if not self._room.take(size):
            await to_thread.run_sync(self._room.sweep)
            if not self._room.take(size):
                raise self._no_room()

    def _no_room(self) -> Problem:
        return Problem(507, "there is no room for the file", _MAKE_ROOM)

    def _keep(self, partial: Path, content_name: str, size: int) -> Path:
        """Rename a complete file after its content."""
        file = self._folder / content_name
        with self._lock:
            if file.exists():
                self._room.give(size)
            partial.replace(file)  # an existing file has the same content: its readers are not disturbed
            os.utime(file)
            _sync_folder(self._folder)
        return file

    def _put(self, name: str, content_name: str, size: int, sha256: str) -> tuple[Upload, bool]:
        """Record which file a name refers to."""
        with self._lock:
            created = self._ledger.upload(name) is None
            if created and len(self._ledger.uploads()) >= self._settings.max_uploads:
                raise Problem(507, f"there are {self._settings.max_uploads:,} uploads already", _MAKE_ROOM)
            self._ledger.put_upload(name, content_name, size, sha256)
            return self.get(name), created


def _suffix_of(name: str) -> str:
    """Return the suffix that gives the format. Raises Problem 422 for an invalid name."""
    if not re.fullmatch(NAME_PATTERN.removeprefix("^").removesuffix("$"), name):
        raise Problem(422, "a name has 1 to 200 of A-Z a-z 0-9 . _ - and begins with a letter or a digit", "use another name")
    suffix = dataset_suffix(name)
    if suffix is None:
        raise Problem(
            422,
            "the name does not say the file's type",
            f"end it in {SUFFIXES_IN_WORDS}",
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
