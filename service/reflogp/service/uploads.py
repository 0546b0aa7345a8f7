"""Receive datasets from requests, and keep the names of uploads in the ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from anyio import to_thread

from reflogp.scoring.data.read import dataset_suffix
from reflogp.service.dataset_files import DatasetFiles, Incoming
from reflogp.service.ledger import Ledger
from reflogp.service.models import Upload
from reflogp.service.problems import Problem

#: Number of received bytes to collect in memory before a background thread writes them to disk.
_WRITE_BYTES = 256 << 10
#: Maximum number of uploads.
_MOST_UPLOADS = 10_000


class Uploads:
    """The uploads, each a name for a dataset. `get`, `delete` and `resolve` raise Problem 404 for an unknown name."""

    def __init__(self, files: DatasetFiles, ledger: Ledger) -> None:
        self._files = files
        self._ledger = ledger

    async def receive(self, name: str, chunks: AsyncIterator[bytes], declared_length: int | None) -> tuple[Upload, bool]:
        """Receive a file, record its name, and return the upload and whether its name is new.

        When this method returns, the file is on disk. If it raises an error, the name still refers to the previous file.

        Args:
            name: matches UPLOAD_PATTERN. Its suffix determines the file's format.
            declared_length: the request's Content-Length, or None if it is missing or invalid.

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
