"""Limit the total memory used by all requests in progress.

Before a route reads a request's body, it reserves memory for the request. A request that is waiting for memory therefore holds
none, so waiting requests cannot block each other. If a request needs more memory later, it does not wait: it gets the memory at
once or fails with 503. Small requests have their own share of the memory, so they never wait for large ones. Within a share,
requests are served in order of arrival.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque

import pyarrow as pa
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from reflogp.service.problems import Problem

#: A request that needs at most SMALL_BYTES counts as small. Together, small requests may use one eighth of the memory.
SMALL_BYTES, _SMALL_PART = 4 << 20, 8
#: A request that has waited _PATIENCE_SECONDS for memory is rejected, with _RETRY_SECONDS in the Retry-After header.
_PATIENCE_SECONDS, _RETRY_SECONDS = 10.0, 5
#: By default, all requests together may use one eighth of the memory of the machine or container, or _LEAST_BYTES if that is
#: more.
_DEFAULT_PART, _LEAST_BYTES = 8, 256 << 20
_STATE_KEY = "memory"
#: When a block of at least _MMAP_BYTES is freed, glibc returns it to the operating system. _M_MMAP_THRESHOLD is the number of
#: the mallopt parameter (see malloc.h) that sets this minimum size.
_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 512 << 10


def give_memory_back() -> None:
    """Make the C library return large blocks to the operating system as soon as they are freed.

    By default, glibc returns only blocks above a minimum size, and may raise that minimum (up to 32 MiB) whenever a larger
    block is freed. This function sets the minimum to a fixed value. With other C libraries, this function does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


def default_request_memory(total_bytes: int) -> int:
    """Return the default amount of memory, in bytes, that requests may use.

    Args:
        total_bytes: memory of the machine or container.
    """
    return max(_LEAST_BYTES, total_bytes // _DEFAULT_PART)


class _Share:
    """One of the two parts of RequestMemory: the part for small requests, or the part for large ones.

    Waiting requests are served in order of arrival.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def fits(self, count: int) -> bool:
        return self.used + count <= self.size

    async def take(self, count: int, seconds: float) -> bool:
        """Take `count` bytes, waiting at most `seconds` for them to become free. Return whether the bytes were taken."""
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
        self._serve()  # the next requests may now fit

    def _serve(self) -> None:
        while self._waiting and self.fits(self._waiting[0][0]):
            count, turn = self._waiting.popleft()
            self.used += count
            turn.set_result(None)


class RequestMemory:
    """The memory shared by all requests in progress. Use this object only in the event loop.

    Args:
        size: total memory in bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.small = _Share(size // _SMALL_PART)
        self.large = _Share(size - size // _SMALL_PART)

    @property
    def used(self) -> int:
        """Number of bytes that are currently reserved."""
        return self.small.used + self.large.used

    @property
    def largest(self) -> int:
        """Maximum number of bytes that one request can reserve."""
        return self.large.size

    def share_of(self, count: int) -> _Share:
        """Return the share that provides the memory for a request that needs `count` bytes."""
        return self.small if count <= min(SMALL_BYTES, self.small.size) else self.large


class Reservation:
    """The memory that one request has reserved. RequestMemoryGuard calls `release` when the request ends.

    Attributes:
        bytes: number of bytes that are currently reserved.
        most: largest value of `bytes` so far.
    """

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._share: _Share | None = None
        self.bytes = self.most = 0

    async def reserve(self, count: int) -> None:
        """Set the reservation to `count` bytes.

        If the request has not reserved any memory yet, wait until the bytes are free; otherwise, do not wait (see `resize`).

        Raises:
            Problem: 413 if `count` is above the limit for one request, 503 with Retry-After if other requests do not release
                enough memory in time.
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
        """Change the reservation to `count` bytes without waiting.

        The method does not wait, because requests that wait for more memory while holding some could block each other forever.

        Raises:
            Problem: 413 if `count` is above the limit for one request, 503 with Retry-After if not enough memory is free.
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
        """Release all reserved memory. Further calls do nothing."""
        if self._share is not None:
            share, count = self._share, self.bytes
            self._share, self.bytes = None, 0
            share.give_back(count)

    def _check(self, count: int) -> None:
        if count > self._memory.largest:
            raise Problem(
                413,
                f"the request would need about {count:,} bytes of memory, more than the limit of {self._memory.largest:,}",
                "split the request, or ask an administrator to raise request_memory_bytes",
            )


class RequestMemoryGuard:
    """ASGI middleware that gives every request a Reservation.

    The Reservation is released when the request ends, even after an error.
    """

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
                pa.default_memory_pool().release_unused()  # otherwise, Arrow would keep the freed memory
            reservation.release()


def reservation_of(request: Request) -> Reservation:
    """Return the request's Reservation."""
    found: Reservation = request.scope["state"][_STATE_KEY]
    return found


def _busy() -> Problem:
    return Problem(
        503,
        "other requests are using the memory that this request needs",
        "try again later, or send less data per request",
        {"Retry-After": str(_RETRY_SECONDS)},
    )
