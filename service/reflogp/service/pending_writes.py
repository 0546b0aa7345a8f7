"""Writes to the ledger that must happen: kept in memory until they have, in order for each job.

A job that ends while the ledger fails has nobody who could be told to try again. Its end waits here and is recorded when the
ledger works again. A service that is killed before loses these writes and no more: the ledger has such a job as running, and
the next service goes on with what the store lacks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from anyio import to_thread

from reflogp.scoring.errors import LedgerDamagedError, LedgerError
from reflogp.service.ledger import Ledger
from reflogp.service.models import JobProgress

logger = logging.getLogger(__name__)

#: Seconds between two attempts while the ledger fails: twice as long after each.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


@dataclass(eq=False)
class _Write:
    """One write.

    Attributes:
        then: called in the event loop with its result, once.
        settled: it was recorded, or could not be at the first attempt.
    """

    call: Callable[[], Any]
    then: Callable[[Any], None]
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Progress:
    """The latest progress of a job; `begun` when it is being written."""

    progress: JobProgress
    committed: bool
    begun: bool = False


class PendingWrites:
    """Writes of jobs that go on or end.

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
        """Jobs whose state in the ledger is not what it shall be."""
        return set(self._writes)

    def put(self, job: str, call: Callable[[], Any], then: Callable[[Any], None] = lambda _: None) -> Awaitable[None]:
        """Record something of a job; it is in `jobs` from here on. To be awaited: until it is done, or could not be done yet.

        Args:
            job: its writes are done in the order in which they came.
            call: of the ledger; must bear being repeated. Called in a thread, until it raises no LedgerError.
            then: called with its result, in the event loop.
        """
        write = _Write(call, then)
        self._writes.setdefault(job, deque()).append(write)
        self._changed.set()
        return self._settled(write)

    async def progressed(self, job: str, progress: JobProgress, committed: bool, then: Callable[[Any], None]) -> None:
        """Record how far a job is; what is not recorded yet is replaced."""
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
        """Record what comes; never returns."""
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
        """Try each write once; whether nothing waits any more."""
        async with self._flushing:
            for job in list(self._writes):
                if not await self._flush_job(job) and not isinstance(self._ledger.trouble, LedgerDamagedError):
                    break  # all others would fail as well; a damaged page is of some jobs only
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
            except Exception:  # a defect: the job is found as running without a worker, and goes back in line
                logger.exception("a write to the ledger was given up", extra={"job": job})
            write = writes.popleft()
            write.settled.set()
            try:
                write.then(result)
            except Exception:
                logger.exception("what follows a write to the ledger failed", extra={"job": job})
        del self._writes[job]
        return True
