"""Threads for calls that block. Each kind of call has threads of its own, so that calls that hang hold up no others."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, Unpack

from reflogp.service.problems import Problem

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Threads:
    """A limited number of threads for one kind of call.

    anyio's threads would not do: an abandoned call that hangs no longer counts toward anyio's limit, and the process waits for
    its thread before it ends. A ThreadPoolExecutor's threads are waited for, too.

    Args:
        what: what the calls wait for, as it is named in the error ("the store").
        seconds: how long a caller waits for the end of its call, or None to wait without limit.
    """

    def __init__(self, what: str, most: int, seconds: float | None = None) -> None:
        self._what, self._seconds = what, seconds
        self._to_start = most  # number of threads that are started when calls need them
        self._idle = threading.Semaphore(0)  # counts the threads that have nothing to do
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    async def run(self, function: Callable[[Unpack[Arguments]], Result], *args: *Arguments) -> Result:
        """Return the result of a call in a thread.

        A call that takes too long goes on in its thread, and its result is dropped. The process can end before such a call.

        Raises Problem 503 if the call takes too long, in addition to what the function raises.
        """
        if self._to_start and not self._idle.acquire(blocking=False):  # each thread keeps some memory
            threading.Thread(target=self._work_for_ever, name=self._what, daemon=True).start()
            self._to_start -= 1
        answer: Future[Result] = Future()
        self._calls.put((answer, partial(copy_context().run, function, *args)))
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Problem(
                503,
                f"{self._what} has not answered within {self._seconds:g} seconds",
                f"try again later, or ask an administrator to check {self._what}",
                {"Retry-After": "10"},
            ) from None

    def _work_for_ever(self) -> None:
        while True:
            answer, call = self._calls.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(call())
                except BaseException as error:
                    answer.set_exception(error)
            del answer, call  # what they hold is not kept until the next call
            self._idle.release()
