"""Keep writes to the ledger in memory until they succeed, in order for each job.

A job that ends while the ledger fails has no caller that could retry. Its end waits here, and is recorded when the ledger works
again. A service that is killed before that loses only these writes: the ledger still has the job as running, and the next
service goes on with the sequences that the store lacks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from anyio import to_thread

from reflogp.service.errors import LedgerDamagedError, LedgerError
from reflogp.service.ledger import Ledger
from reflogp.service.models import JobProgress

logger = logging.getLogger(__name__)

#: Seconds between two attempts while the ledger fails; the pause doubles after each attempt.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


@dataclass(eq=False)
class _Write:
    """A write to the ledger.

    Attributes:
        then: called once with the result, in the event loop.
        settled: set when the write was recorded, or when the first flush could not record it.
    """

    call: Callable[[], Any]
    then: Callable[[Any], None]
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Progress:
    """The latest progress of a job; `begun` is True once it is being written."""

    progress: JobProgress
    committed: bool
    begun: bool = False


class PendingWrites:
    """Pending writes about jobs that make progress or end.

    Args:
        ledger: written to in threads.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._writes: dict[str, deque[_Write]] = {}
        self._progress: dict[str, _Progress] = {}
        self._changed = asyncio.Event()
        self._flushing = asyncio.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._writes.values()))

    @property
    def jobs(self) -> set[str]:
        """The jobs whose latest state is not in the ledger yet."""
        return set(self._writes)

    def put(self, job: str, call: Callable[[], Any], then: Callable[[Any], None] = lambda _: None) -> Awaitable[None]:
        """Queue a write about a job; the job is in `jobs` until it is recorded.

        The returned awaitable completes when the write was recorded or its first attempt failed. While the ledger is in
        trouble, it completes at once.

        Args:
            job: id of the job. The writes of one job are made in the order in which they came.
            call: writes to the ledger. It must be safe to repeat. It is called in a thread until it raises no LedgerError.
            then: called with the result, in the event loop.
        """
        write = _Write(call, then)
        self._writes.setdefault(job, deque()).append(write)
        self._changed.set()
        return self._settled(write)

    async def progressed(self, job: str, progress: JobProgress, committed: bool, then: Callable[[Any], None]) -> None:
        """Record the progress of a job. It replaces earlier progress that has not been recorded yet."""
        waiting = self._progress.get(job)
        if waiting is not None and not waiting.begun:
            waiting.progress, waiting.committed = progress, waiting.committed or committed
            return
        latest = self._progress[job] = _Progress(progress, committed)

        def record() -> None:
            latest.begun = True
            self._ledger.progressed(job, latest.progress, latest.committed)

        def recorded(result: Any) -> None:
            if self._progress.get(job) is latest:
                del self._progress[job]
            then(result)

        await self.put(job, record, recorded)

    async def _settled(self, write: _Write) -> None:
        if self._ledger.trouble is None:
            await write.settled.wait()

    async def run(self) -> None:
        """Make the writes as they come. Never returns."""
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
        """Try the pending writes once; return whether none is left."""
        async with self._flushing:
            for job in list(self._writes):
                if not await self._flush_job(job) and not isinstance(self._ledger.trouble, LedgerDamagedError):
                    break  # the ledger fails for all jobs; if it is only damaged, other jobs may be writable
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
            except Exception:  # a defect: the job is found as running without a worker, and queued again
                logger.exception("a write to the ledger was given up", extra={"job": job})
            write = writes.popleft()
            write.settled.set()
            try:
                write.then(result)
            except Exception:
                logger.exception("the callback of a write to the ledger failed", extra={"job": job})
        del self._writes[job]
        return True
