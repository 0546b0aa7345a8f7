"""Keep writes to the job ledger in memory until they succeed. Writes for the same job stay in order.

When a job ends, there is no caller to retry a failed write to the ledger. The write is therefore kept in memory until the
ledger works again. If the service is killed before the write succeeds, the ledger still lists the job as running. When the
service is started again, it restarts the job and scores only the sequences that are not stored yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from anyio import to_thread

from reflogp.service.errors import LedgerError
from reflogp.service.ledger import Ledger

logger = logging.getLogger(__name__)

#: Seconds between attempts while the ledger cannot be written: _FIRST_PAUSE, doubled after each attempt, up to _LONGEST_PAUSE.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


@dataclass(eq=False)
class _Write:
    """A write to the ledger.

    Attributes:
        call, then: see PendingWrites.put.
        settled: event that is set when the write is removed from the queue, or when a call of `flush` leaves it in the queue.
    """

    call: Callable[[], Any]
    then: Callable[[Any], None]
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class PendingWrites:
    """A queue of writes to the job ledger, such as the final states of jobs.

    Args:
        ledger: the ledger to write to. Its methods are called in threads.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._writes: dict[str, deque[_Write]] = {}
        self._changed = asyncio.Event()
        self._flushing = asyncio.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._writes.values()))

    @property
    def jobs(self) -> set[str]:
        """Ids of the jobs that have writes in the queue."""
        return set(self._writes)

    def put(self, job: str, call: Callable[[], Any], then: Callable[[Any], None] = lambda _: None) -> Coroutine[Any, Any, None]:
        """Queue a write for a job. While the write is in the queue, `jobs` contains the job.

        The returned coroutine completes when the write is removed from the queue, or when a call of `flush` leaves the write in
        the queue because the write failed or was not tried. While the ledger cannot be used, the coroutine completes at once.

        Args:
            job: id of the job. Writes for the same job are made in the order in which they were queued.
            call: function that writes to the ledger. It is called in a thread. If it raises LedgerError, it is called again
                later, so repeated calls must be safe. If it raises another error, the error is logged and `call` is not called
                again.
            then: called once, in the event loop, with the return value of `call`, or with None if `call` raised an error other
                than LedgerError.
        """
        write = _Write(call, then)
        self._writes.setdefault(job, deque()).append(write)
        self._changed.set()
        return self._settled(write)

    async def _settled(self, write: _Write) -> None:
        if self._ledger.trouble is None:
            await write.settled.wait()

    async def run(self) -> None:
        """Execute queued writes, and retry writes that fail. This coroutine never returns."""
        pause = _FIRST_PAUSE
        while True:
            await self._changed.wait()
            self._changed.clear()
            if await self.flush():
                pause = _FIRST_PAUSE
            else:
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)
                self._changed.set()

    async def flush(self) -> bool:
        """Try to execute all pending writes. Return True if none are left."""
        async with self._flushing:
            for job in list(self._writes):
                if not await self._flush_job(job):
                    break
            for writes in self._writes.values():
                for write in writes:
                    write.settled.set()
            return not self._writes

    async def _flush_job(self, job: str) -> bool:
        writes = self._writes[job]
        while writes:
            result: Any = None
            try:
                result = await to_thread.run_sync(writes[0].call)
            except LedgerError:
                return False
            except Exception:  # a bug; the job is later found to be running without a worker, and is queued again
                logger.exception(
                    "a write to the job ledger failed with an unexpected error and will not be retried", extra={"job": job}
                )
            write = writes.popleft()
            write.settled.set()
            try:
                write.then(result)
            except Exception:
                logger.exception("an unexpected error occurred after a write to the job ledger", extra={"job": job})
        del self._writes[job]
        return True
