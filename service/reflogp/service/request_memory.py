"""Limit the memory that all current requests may use together.

A route reserves a request's memory before it reads the body. A request that waits for memory therefore holds none, so there is
no deadlock. A request that later needs more never waits: it gets the memory at once or fails with 503. Small requests have a
share of their own and never wait for large ones. Each share is first come, first served.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque

import pyarrow as pa
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from reflogp.service.problems import Problem

#: A request of at most this many bytes is small. All small requests together may use one eighth of the memory.
SMALL_BYTES, _SMALL_PART = 4 << 20, 8
#: Seconds that a request waits for memory before it is refused, and seconds in the Retry-After header.
_PATIENCE_SECONDS, _RETRY_SECONDS = 10.0, 5
#: Requests may by default use one eighth of the memory of the machine (or of its container), and at least this many bytes.
_DEFAULT_PART, _LEAST_BYTES = 8, 256 << 20
_STATE_KEY = "memory"
#: mallopt's parameter (malloc.h), and the block size from which glibc maps memory and returns it to the system when freed.
_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 512 << 10


def give_memory_back() -> None:
    """Make the C library return large blocks to the system when they are freed, so that the process does not keep them.

    Without this, glibc raises the minimum size of such blocks, up to 32 MiB, as blocks are freed. Does nothing for other C
    libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


def default_request_memory(total_bytes: int) -> int:
    """Return the bytes that requests may use by default.

    Args:
        total_bytes: memory of the machine, or of its container.
    """
    return max(_LEAST_BYTES, total_bytes // _DEFAULT_PART)


class _Share:
    """A part of the memory. Waiting requests are served in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def fits(self, count: int) -> bool:
        return self.used + count <= self.size

    async def take(self, count: int, seconds: float) -> bool:
        """Take `count` bytes, waiting for at most `seconds`; return whether they were taken."""
        if not self._waiting and self.fits(count):
            self.used += count
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, turn)
        self._waiting.append(entry)
        try:
            await asyncio.wait_for(asyncio.shield(turn), seconds)
            return True
        except TimeoutError:
            if turn.done():
                return True
            self._leave(entry)
            return False
        except asyncio.CancelledError:
            if turn.done():
                self.give_back(count)
            else:
                self._leave(entry)
            raise

    def give_back(self, count: int) -> None:
        self.used -= count
        self._serve()

    def _leave(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        self._waiting.remove(entry)
        self._serve()  # requests behind it may fit now

    def _serve(self) -> None:
        while self._waiting and self.fits(self._waiting[0][0]):
            count, turn = self._waiting.popleft()
            self.used += count
            turn.set_result(None)


class RequestMemory:
    """The memory of all current requests. Use it in the event loop only.

    Args:
        size: total bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.small = _Share(size // _SMALL_PART)
        self.large = _Share(size - size // _SMALL_PART)

    @property
    def used(self) -> int:
        """Bytes that are reserved now."""
        return self.small.used + self.large.used

    @property
    def largest(self) -> int:
        """Maximum bytes that one request can reserve."""
        return self.large.size

    def share_of(self, count: int) -> _Share:
        """Return the share that a request of `count` bytes belongs to."""
        return self.small if count <= min(SMALL_BYTES, self.small.size) else self.large


class Reservation:
    """The memory that one request has reserved. RequestMemoryGuard calls `release` when the request is over.

    Attributes:
        bytes: bytes that are reserved now.
        most: maximum bytes that were reserved so far.
    """

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._share: _Share | None = None
        self.bytes = self.most = 0

    async def reserve(self, count: int) -> None:
        """Reserve `count` bytes in total. Waits until they are free only if the request holds nothing yet.

        Raises:
            Problem: 413 if no request may use this much, 503 with Retry-After if other requests hold the memory for too long.
        """
        if self._share is not None:
            self.resize(count)
            return
        share = self._memory.share_of(count)
        self._check(count)
        if not await share.take(count, _PATIENCE_SECONDS):
            raise _busy()
        self._share, self.bytes = share, count
        self.most = max(self.most, count)

    def resize(self, count: int) -> None:
        """Change the reservation to `count` bytes. Never waits: a request that waits while it holds memory could wait for ever.

        Raises:
            Problem: 413 as `reserve`, 503 with Retry-After if the memory is not free now.
        """
        assert self._share is not None, "reserve first"
        self._check(count)
        more = count - self.bytes
        target = self._share if count <= self._share.size else self._memory.large
        if target is not self._share:
            if not target.fits(count):
                raise _busy()
            self.release()
            target.used += count
            self._share, self.bytes = target, count
        elif more > 0 and not target.fits(more):
            raise _busy()
        else:
            self.bytes = count
            target.give_back(-more)
        self.most = max(self.most, count)

    def release(self) -> None:
        """Give all memory back. A second call does nothing."""
        if self._share is not None:
            share, count = self._share, self.bytes
            self._share, self.bytes = None, 0
            share.give_back(count)

    def _check(self, count: int) -> None:
        if count > self._memory.largest:
            raise Problem(
                413,
                f"the request would take about {count:,} bytes of memory, more than its limit of {self._memory.largest:,}",
                "send it in several requests, or raise request_memory_bytes",
            )


class RequestMemoryGuard:
    """ASGI middleware that gives every request a Reservation and releases it at the end of the request, even after an error."""

    def __init__(self, app: ASGIApp, memory: RequestMemory) -> None:
        self._app = app
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reservation = scope.setdefault("state", {})[_STATE_KEY] = Reservation(self._memory)
        try:
            await self._app(scope, receive, send)
        finally:
            if reservation.most > SMALL_BYTES:
                pa.default_memory_pool().release_unused()  # otherwise Arrow keeps freed pages
            reservation.release()


def reservation_of(request: Request) -> Reservation:
    """Return the request's Reservation."""
    found: Reservation = request.scope["state"][_STATE_KEY]
    return found


def _busy() -> Problem:
    return Problem(
        503,
        "other requests use all the memory that requests may use",
        "try again later, with less at a time",
        {"Retry-After": str(_RETRY_SECONDS)},
    )
