"""Threads for calls that block. Each kind of call has threads of its own, so that calls that hang hold up no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar, TypeVarTuple, Unpack

from reflogp.service.problems import Problem

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Threads:
    """A limited number of threads for one kind of call. With anyio's, an abandoned call no longer counts toward the limit.

    Args:
        what: what the calls wait for, as it is named in the error ("the store").
        seconds: how long a caller waits for the end of its call, or None to wait without limit.
    """

    def __init__(self, what: str, most: int, seconds: float | None = None) -> None:
        self._what, self._seconds = what, seconds
        self._threads = ThreadPoolExecutor(most, what)

    async def run(self, function: Callable[[Unpack[Arguments]], Result], *args: *Arguments) -> Result:
        """Return the result of a call in a thread.

        A call that takes too long goes on in its thread, and its result is dropped.

        Raises Problem 503 if the call takes too long, in addition to what the function raises.
        """
        call = self._threads.submit(copy_context().run, function, *args)
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                return await asyncio.wrap_future(call)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Problem(
                503,
                f"{self._what} has not answered within {self._seconds:g} seconds",
                f"try again later, or ask an administrator to check {self._what}",
                {"Retry-After": "10"},
            ) from None
