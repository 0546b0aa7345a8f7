"""Fetch the datasets of queued jobs in the background, so that a slow download delays neither workers nor other jobs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from anyio import CapacityLimiter, to_thread

from reflogp.service.dataset_files import DatasetFiles, Incoming
from reflogp.service.fetch import FetchCancelledError, fetch
from reflogp.service.ledger import Ledger
from reflogp.service.ledger_file import LedgerError
from reflogp.service.settings import ServerSettings
from reflogp.store.texts import byte_count

logger = logging.getLogger(__name__)

#: Seconds between readings of the ledger without a call of `look`, and between updates of a job's note about its fetch.
_LOOK_SECONDS = 5.0
#: Number of datasets that are fetched at the same time.
_MOST_FETCHES = 4


@dataclass(eq=False)
class Fetching:
    """Background fetches of datasets. The datasets of queued jobs are fetched in queue order, several at a time."""

    settings: ServerSettings
    ledger: Ledger
    files: DatasetFiles
    on_change: Callable[[str], None]  # called with a job's id after its note has changed or its dataset has been fetched
    finish: Callable[..., Awaitable[None]]  # records that a job failed
    #: Id of a job whose dataset is being fetched -> (event that is set to stop the fetch, task).
    _fetches: dict[str, tuple[threading.Event, asyncio.Task[None]]] = field(default_factory=dict)
    _threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_MOST_FETCHES))
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def look(self) -> None:
        """Make `run` check immediately for queued jobs whose dataset must be fetched."""
        self._news.set()

    def cancel(self, job: str) -> None:
        if job in self._fetches:
            self._fetches[job][0].set()

    def close(self) -> None:
        """Stop all fetches. Jobs whose dataset has not been fetched yet stay queued."""
        for job in self._fetches:
            self.cancel(job)

    async def run(self) -> None:
        while True:
            self._news.clear()
            free = _MOST_FETCHES - len(self._fetches)
            if free > 0 and self.ledger.trouble is None:  # otherwise, the end of a fetch could not be recorded
                with suppress(LedgerError):  # the next round reads the ledger again
                    for job, source in await to_thread.run_sync(self.ledger.to_fetch, free, list(self._fetches)):
                        stop = threading.Event()
                        self._fetches[job] = stop, asyncio.create_task(self._fetch(job, source, stop))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _LOOK_SECONDS)

    async def _fetch(self, job: str, source: dict[str, str], stop: threading.Event) -> None:
        incoming = Incoming(self.files)
        notes = asyncio.create_task(self._note(job, incoming))
        try:
            logger.info("fetching the dataset", extra={"job": job})
            begin = partial(fetch, source["uri"], incoming, self.settings, stop.is_set)
            call = partial(begin, config=source.get("config"), split=source["split"])
            file, digest = await to_thread.run_sync(call, limiter=self._threads)
            notes.cancel()
            fetched = {**source, "file": str(file), "digest": digest}
            await to_thread.run_sync(self.ledger.fetched, job, fetched)
            self.on_change(job)
        except (FetchCancelledError, LedgerError) as error:  # after a LedgerError, a later round of `run` fetches the dataset
            logger.info("the dataset was not fetched: %s", error, extra={"job": job})
        except Exception as error:
            await self.finish(job, "failed", error=f"the dataset cannot be used: {error}")
        finally:
            notes.cancel()
            del self._fetches[job]
            self.look()

    async def _note(self, job: str, incoming: Incoming) -> None:
        while True:
            note = "the dataset is being fetched" + (f": {byte_count(incoming.size)} so far" if incoming.size else "")
            with suppress(LedgerError):
                await to_thread.run_sync(self.ledger.note, job, note)
                self.on_change(job)
            await asyncio.sleep(_LOOK_SECONDS)
