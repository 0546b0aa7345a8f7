"""Receive datasets from requests, and keep the names of uploads in the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from anyio import to_thread

from reflogp.scoring.data.read import dataset_suffix
from reflogp.service.dataset_files import DatasetFiles, Incoming
from reflogp.service.ledger import Ledger
from reflogp.service.models import Upload
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings

#: Number of received bytes to collect in memory before a background thread writes them to disk.
_WRITE_BYTES = 256 << 10
#: An upload is stopped if nothing arrives for this many seconds, because it holds a part of the space for datasets.
_STALL_SECONDS = 60.0


class Uploads:
    """The uploads, each a name for a dataset. All methods except `receive` and `receive_nameless` are blocking calls.

    `get`, `delete` and `resolve` raise Problem 404 for an unknown name.
    """

    def __init__(self, files: DatasetFiles, ledger: Ledger, settings: ServerSettings) -> None:
        self._files = files
        self._ledger = ledger
        self._most = settings.max_uploads

    async def receive(self, name: str, chunks: AsyncIterator[bytes], declared_length: int | None) -> tuple[Upload, bool]:
        """Receive a file, record its name, and return the upload and whether its name is new.

        When this method returns, the file is on disk. If it raises an error, the name still refers to the previous file.

        Args:
            name: name of the upload, which matches UPLOAD_PATTERN. Its suffix determines the file's format.
            declared_length: the request's Content-Length, or None if it is missing or invalid.

        Raises:
            Problem: 408 if the content stops arriving, 413 if the file is too large, 422 if the file is empty, 507 if there is
                not enough space or there are too many uploads.
        """
        file, digest, size = await self._receive(str(dataset_suffix(name)), chunks, declared_length)
        return await to_thread.run_sync(self._put, name, file.name, size, digest)

    async def receive_nameless(
        self, suffix: str, chunks: AsyncIterator[bytes], declared_length: int | None
    ) -> tuple[Path, str]:
        """Receive a file for a single job, and return its path and SHA-256 digest. Raises the Problems of `receive`."""
        file, digest, _ = await self._receive(suffix, chunks, declared_length)
        return file, digest

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

    async def _receive(self, suffix: str, chunks: AsyncIterator[bytes], declared_length: int | None) -> tuple[Path, str, int]:
        with Incoming(self._files) as incoming:
            await to_thread.run_sync(incoming.begin, f"data{suffix}", declared_length)
            async for block in _blocks(chunks):
                await to_thread.run_sync(incoming.write, block)
            if not incoming.size:
                raise Problem(422, "the file is empty", "send a file that contains rows")
            file, digest = await to_thread.run_sync(incoming.keep)
        return file, digest, incoming.size

    def _put(self, name: str, content_name: str, size: int, sha256: str) -> tuple[Upload, bool]:
        created = self._ledger.upload(name) is None
        if created and len(self._ledger.uploads()) >= self._most:
            detail = f"there are already {self._most:,} uploads"
            raise Problem(507, detail, "delete uploads that you no longer need (DELETE /v1/uploads/NAME)")
        self._ledger.put_upload(name, content_name, size, sha256)
        return self.get(name), created


async def _blocks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Join chunks into larger blocks, and yield the blocks. Raise Problem 408 if the chunks stop arriving."""
    block = bytearray()
    while True:
        try:
            async with asyncio.timeout(_STALL_SECONDS):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise Problem(408, f"nothing arrived for {_STALL_SECONDS:.0f} seconds", "send the file again") from None
        block += chunk or b""
        if len(block) >= _WRITE_BYTES or (chunk is None and block):
            yield bytes(block)
            block.clear()
        if chunk is None:
            return


def _unknown(name: str) -> Problem:
    return Problem(404, f"there is no upload {name[:200]!r}", "GET /v1/uploads lists all uploads")
