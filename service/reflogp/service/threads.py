"""Threads for calls that block. Each kind of call has threads of its own, so that calls that hang hold up no others."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TypeVar, TypeVarTuple, Unpack

from reflogp.service.problems import Problem

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Threads:
    """A limited number of threads for one kind of call.

    anyio's threads would not do: an abandoned call that hangs no longer counts toward anyio's limit, and the process waits for
    its thread before it ends.

    Args:
        what: what the calls wait for, as it is named in the error ("the store").
        seconds: how long a caller waits for the end of its call, or None to wait without limit.
    """

    def __init__(self, what: str, most: int, seconds: float | None = None) -> None:
        self._what, self._seconds = what, seconds
        self._free = asyncio.Semaphore(most)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = 0  # number of threads that wait for a call

    async def run(self, function: Callable[[Unpack[Arguments]], Result], *args: *Arguments) -> Result:
        """Return the result of a call in a thread.

        A call that takes too long goes on in its thread, and its result is dropped. The process can end before such a call.

        Raises Problem 503 if the call takes too long, in addition to what the function raises.
        """
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                await self._free.acquire()
                return await self._begun(partial(copy_context().run, function, *args))
        except TimeoutError:
            if not limit.expired():
                raise
            raise Problem(
                503,
                f"{self._what} has not answered within {self._seconds:g} seconds",
                f"try again later, or ask an administrator to check {self._what}",
                {"Retry-After": "10"},
            ) from None

    def _begun(self, call: Callable[[], Result]) -> asyncio.Future[Result]:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Result] = loop.create_future()

        def ended(result: Result | None, error: BaseException | None) -> None:
            self._idle += 1
            self._free.release()
            if outcome.done():
                return
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(ended, result, error)

        if self._idle:
            self._idle -= 1
        else:
            try:
                threading.Thread(target=self._work_for_ever, name=self._what, daemon=True).start()
            except RuntimeError:  # the system allows no more threads
                self._free.release()
                raise
        self._calls.put(work)
        return outcome

    def _work_for_ever(self) -> None:
        while True:
            self._calls.get()()
