"""Limit how many large requests are read, decoded and answered at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pyarrow as pa
from starlette.requests import Request

from reflogp.service.problems import Problem

#: A request whose body has more bytes than this is large.
LARGE_BYTES = 256 << 10
#: Maximum number of large requests at the same time.
_MOST = 4
#: A large request that has waited for this many seconds is rejected.
PATIENCE_SECONDS = 30.0


class LargeRequests:
    """A semaphore for large requests. Small requests never wait."""

    def __init__(self) -> None:
        self._semaphore = asyncio.Semaphore(_MOST)

    @asynccontextmanager
    async def turn_of(self, request: Request) -> AsyncIterator[None]:
        """Wait for a turn if the request's body is large or of unknown length."""
        declared = content_length(request)
        if declared is not None and declared <= LARGE_BYTES:
            yield
            return
        async with self.turn(PATIENCE_SECONDS):
            yield

    @asynccontextmanager
    async def turn(self, patience: float | None) -> AsyncIterator[None]:
        """Wait for a turn. Raise Problem 503 with Retry-After if it does not come within `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                await self._semaphore.acquire()
        except TimeoutError:
            raise Problem(
                503,
                "too many large requests are being processed",
                "try again later, or send less data per request",
                {"Retry-After": "5"},
            ) from None
        try:
            yield
        finally:
            pa.default_memory_pool().release_unused()  # otherwise, Arrow would keep the freed memory
            self._semaphore.release()


def content_length(request: Request) -> int | None:
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() else None
