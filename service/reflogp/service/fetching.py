"""Fetch the datasets of queued jobs in the background, so that a slow download delays neither workers nor other jobs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from anyio import CapacityLimiter, to_thread

from reflogp.service.errors import LedgerError
from reflogp.service.fetch import FetchCancelledError, fetch
from reflogp.service.fetched import FetchedFolder
from reflogp.service.ledger import Ledger
from reflogp.service.pending_writes import PendingWrites
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings
from reflogp.store.texts import byte_count

logger = logging.getLogger(__name__)

#: The ledger is read every _LOOK_SECONDS even if `look` is not called. A job's note about the fetch of its dataset is updated
#: every _NOTE_SECONDS.
_LOOK_SECONDS, _NOTE_SECONDS = 5.0, 5.0
#: Maximum number of datasets that are fetched at the same time; further fetches wait.
_AT_ONCE = 4


@dataclass(eq=False)
class _Fetch:
    """A running fetch.

    Attributes:
        stop: event that is set to stop the fetch.
        size: number of bytes that have arrived so far.
    """

    stop: threading.Event = field(default_factory=threading.Event)
    size: int = 0

    def arrived(self, size: int) -> None:
        """Record the number of bytes that have arrived so far."""
        self.size = size


class Fetching:
    """Background fetches of datasets. The datasets of queued jobs are fetched in queue order, several at a time.

    Args:
        settings: limits on the size of datasets.
        ledger: lists the queued jobs whose datasets must be fetched.
        pending: queue of writes to the ledger, used to record the fetched files.
        folder: folder to fetch the datasets into.
        on_change: called with a job's id after the job's note has changed or its dataset has been fetched.
        on_failed: called with a job's id and the reason when the fetch of the job's dataset fails. This function must mark the
            job as failed.
    """

    def __init__(
        self,
        settings: ServerSettings,
        ledger: Ledger,
        pending: PendingWrites,
        folder: FetchedFolder,
        on_change: Callable[[str], None],
        on_failed: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._pending = pending
        self._folder = folder
        self._on_change = on_change
        self._on_failed = on_failed
        self._going_on: dict[str, _Fetch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = CapacityLimiter(_AT_ONCE)
        self._news = asyncio.Event()

    def look(self) -> None:
        """Make `run` check immediately for queued jobs whose dataset must be fetched."""
        self._news.set()

    def cancel(self, job: str) -> None:
        """If the dataset of a job is being fetched, stop the fetch."""
        if job in self._going_on:
            self._going_on[job].stop.set()

    def close(self) -> None:
        """Stop all fetches. Jobs whose dataset has not been fetched yet stay queued."""
        for fetching in self._going_on.values():
            fetching.stop.set()

    async def run(self) -> None:
        """Start a fetch for each queued job whose dataset has not been fetched yet. This coroutine never returns."""
        while True:
            self._news.clear()
            free = _AT_ONCE - len(self._going_on)
            if free > 0:
                but = [*self._going_on, *self._pending.jobs]
                with suppress(LedgerError):  # the next round reads the ledger again
                    for job, source in await to_thread.run_sync(self._ledger.to_fetch, free, but):
                        fetching = self._going_on[job] = _Fetch()
                        task = asyncio.create_task(self._fetch(job, source, fetching))
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _LOOK_SECONDS)

    async def _fetch(self, job: str, source: dict[str, str], fetching: _Fetch) -> None:
        notes = asyncio.create_task(self._note(job, fetching))
        try:
            logger.info("fetching the dataset", extra={"job": job})
            begin = partial(
                fetch,
                source["uri"],
                self._folder,
                self._settings,
                fetching.stop.is_set,
                fetching.arrived,
                config=source.get("config"),
                split=source["split"],
            )
            file, digest = await to_thread.run_sync(begin, limiter=self._threads)
            notes.cancel()
            fetched = {**source, "file": str(file), "digest": digest}
            await self._pending.put(job, partial(self._ledger.fetched, job, fetched), partial(self._recorded, job, file))
        except (FetchCancelledError, LedgerError) as error:
            # The job was cancelled, or the service is stopping, or the ledger failed. In the last case, a later round of `run`
            # fetches the dataset.
            logger.info("the dataset was not fetched: %s", error, extra={"job": job})
        except Exception as error:
            detail = error.detail if isinstance(error, Problem) else str(error)
            await self._on_failed(job, f"the dataset cannot be used: {detail}")
        finally:
            notes.cancel()
            del self._going_on[job]
            self.look()

    def _recorded(self, job: str, file: Path, result: object) -> None:
        self._folder.released(file)
        self._on_change(job)

    async def _note(self, job: str, fetching: _Fetch) -> None:
        """Write the progress of a fetch into the job's note every few seconds."""
        while True:
            note = "the dataset is being fetched" + (f": {byte_count(fetching.size)} so far" if fetching.size else "")
            with suppress(LedgerError):
                await to_thread.run_sync(self._ledger.note, job, note)
                self._on_change(job)
            await asyncio.sleep(_NOTE_SECONDS)
