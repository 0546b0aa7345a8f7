"""Run jobs: start queued jobs in processes of their own (runners), lend workers to them, and record their progress and ends.

A runner reads the job's dataset and sends what has to be scored to the workers that the service lends it: one from the start,
and others as long as they are idle.

The code of this module runs in the event loop. Calls that use the ledger or files run in threads. Only one task claims jobs. If
the ledger cannot be written when a job ends, the job counts as running, and runs again when the ledger works: its values are in
the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from anyio import to_thread

from reflogp.service.dataset_files import DatasetFiles
from reflogp.service.fetching import Fetching
from reflogp.service.ledger import Ledger
from reflogp.service.ledger_file import LedgerError
from reflogp.service.metrics import Metrics
from reflogp.service.models import JobProgress, JobState
from reflogp.service.pool import Pool, WorkerHandle
from reflogp.service.problems import Problem
from reflogp.service.registry import ReferenceRegistry
from reflogp.service.roots import root_of
from reflogp.service.runner.order import Claim, JobContext, JobOrder
from reflogp.service.runner.process import RunnerProcess, start_process
from reflogp.service.settings import ServerSettings
from reflogp.service.supervision import supervise
from reflogp.service.threads import Threads
from reflogp.store import ReferenceNotFoundError, ReflogpError
from reflogp.store.texts import counted, shortened_without_secrets

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

#: A job fails if this many of its runners have died since values of the job were last committed.
_DEATHS = 3
#: A worker that has loaded a job's model is lent to a running job that has workers only if the job has at least _LEFT_SECONDS
#: of work left. For a worker that must first load the model, the minimum is _LEFT_TO_LOAD_SECONDS.
_LEFT_SECONDS, _LEFT_TO_LOAD_SECONDS = 1.0, 30.0
#: A worker that has died this many times while it was lent to a job is lent to that job only if it has no other.
_FAILURES = 3
#: A runner that has not stopped after this many seconds is killed; the second number applies when the service ends.
_STOP_SECONDS, _END_SECONDS = 30.0, 20.0
#: Why a job is stopped that goes on later, and its note.
_STOPPED = {
    "interrupted": "a job with higher priority needed the worker",
    "end": "the service ended",
}
#: A job that was first submitted less than this many seconds ago may be overtaken by newer jobs of the same priority whose
#: model is already loaded.
_PATIENCE_SECONDS = 60.0
#: Seconds between checks of a working ledger, and between attempts to use a failing one.
_LEDGER_SECONDS, _LEDGER_AGAIN_SECONDS = 5.0, 1.0
#: Seconds before a job whose store cannot be used is tried again.
_STORE_PAUSE = 30.0


@dataclass(eq=False)
class _Running:
    """A job that was claimed from the ledger and has not ended."""

    claim: Claim
    workers: set[int]  # numbers of the workers that are lent to the job
    runner: RunnerProcess | None = None  # the job's process, from its start to its end
    failures: Counter[int] = field(default_factory=Counter)  # worker -> how often it died while lent to the job
    cancelled: bool = False  # it may have been stopped for another reason before
    stop_reason: str | None = None  # why the job must stop: "cancelled", or a key of _STOPPED
    counted: JobProgress = field(default_factory=JobProgress)  # the progress that the metrics already include

    def send(self, message: dict[str, Any]) -> None:
        if self.runner is not None:
            self.runner.send(message)


class JobScheduler:
    """Runs the jobs in the ledger."""

    def __init__(
        self,
        settings: ServerSettings,
        ledger: Ledger,
        registry: ReferenceRegistry,
        files: DatasetFiles,
        metrics: Metrics,
        pool: Pool,
        context: JobContext,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._registry = registry
        self._metrics = metrics
        self._pool = pool
        self.context = context
        context.results.mkdir(parents=True, exist_ok=True)
        for folder in (context.results, context.tokens):
            for partial_file in folder.glob(".*.partial"):  # left by a process that was killed while it wrote the file
                partial_file.unlink(missing_ok=True)
        self._fetching = Fetching(settings, ledger, files, self._fetch_changed, self._finish)
        self._threads = Threads("the dataset's file system", 4)
        self._running: dict[str, _Running] = {}  # job id -> the running job
        # id of a running or queued job -> how many of its runners have died since values of the job were last committed
        self._deaths: Counter[str] = Counter()
        self._paused: dict[str, float] = {}  # id of a job -> when it may be tried again, on the clock of time.monotonic
        self._changes: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()  # of the jobs that somebody watches
        self._background: set[asyncio.Task[Any]] = set()
        self._wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.closing = False

    def start(self) -> None:
        """Start the background tasks. Jobs that were unfinished when the service last stopped are continued."""
        self.look()
        work = {"assigning jobs": self._assign_for_ever, "fetching datasets": self._fetching.run}
        self._tasks = [asyncio.create_task(supervise(name, run)) for name, run in work.items()]

    def drain(self) -> None:
        """Start no more jobs and fetches, and wake all who wait for a job's next change."""
        self.closing = True
        self._fetching.close()
        for task in self._tasks:
            task.cancel()
        for job in list(self._changes):
            self.notify(job)

    async def stop(self) -> None:
        """Stop all running jobs, and wait until their runners have exited. Call this method before the workers exit."""
        for running in self._running.values():
            self._stop(running, "end")
        stop = time.monotonic() + _END_SECONDS
        while self._running and time.monotonic() < stop:
            await asyncio.sleep(0.05)
        for running in list(self._running.values()):
            self._kill(running, "it did not stop in time")

    def memory_bytes(self) -> int:
        return sum(running.runner.memory_bytes for running in self._running.values() if running.runner is not None)

    def look(self) -> None:
        """Wake the background tasks that start jobs and fetch datasets."""
        self._wanted.set()
        self._fetching.look()

    async def cancel(self, job: str) -> JobState | None:
        """Cancel a job. Return the state that it had, or None for an unknown job."""
        state = await to_thread.run_sync(self._ledger.cancel, job)
        self._fetching.cancel(job)
        if state == "queued":
            self._ended(job, "cancelled")
        elif job in self._running:
            self._cancel(self._running[job])
        return state

    def change(self, job: str) -> asyncio.Event:
        """Return an event that is set when the job changes, or when the service ends."""
        return self._changes.setdefault(job, asyncio.Event())

    def notify(self, job: str) -> None:
        if (change := self._changes.pop(job, None)) is not None:
            change.set()

    # What workers do

    def on_ready(self, worker: WorkerHandle) -> None:
        for running in self._running.values():
            if worker.number in running.workers:
                self._lend(running, worker.number)
        self.look()

    def on_death(self, worker: WorkerHandle, reason: str, blame: bool) -> None:
        """Tell the job that the worker was lent to, and whether the job may have killed it (`blame`)."""
        for running in self._running.values():
            if worker.number in running.workers:
                if blame:
                    logger.warning("a worker of the job ended: %s", reason, extra={"job": running.claim.id})
                    running.failures[worker.number] += 1
                running.send({"op": "gone", "worker": worker.number, "reason": reason, "blamed": blame})
                if worker.broken:
                    running.workers.discard(worker.number)
        self.look()

    # The end of a job

    async def _recorded(self, job: str, write: Callable[[], _Result]) -> _Result | None:
        """Write to the ledger. If it cannot be written, return None: the job then runs again as soon as it can."""
        try:
            return await to_thread.run_sync(write)
        except LedgerError as error:
            logger.error("the end of the run could not be recorded: %s", error, extra={"job": job})
            return None

    async def _record_end(self, running: _Running, report: dict[str, Any] | None, reason: str = "") -> None:
        """Record how a run ended, as its runner reports; if there is no report, why it ended."""
        job, source = running.claim.id, running.claim.source
        match report:
            case {"end": "done", "summary": summary}:
                await self._finish(job, "done", summary=summary)
            case {"end": "failed", "error": error}:
                await self._finish(job, "failed", error=error.replace(source["file"], source["name"]))
            case {"error": str(error)} if not running.cancelled:
                self._paused[job] = time.monotonic() + _STORE_PAUSE
                await self._give_back(job, f"the store cannot be used: {shortened_without_secrets(error)}")
            case None if running.stop_reason is None:
                logger.warning("the process that ran the job ended: %s", reason, extra={"job": job})
                self._deaths[job] += 1
                if self._deaths[job] < _DEATHS:
                    await self._give_back(job, f"the process that ran the job ended: {reason}")
                else:
                    error = f"{_DEATHS} processes that ran the job ended without making progress; the last time, {reason}"
                    await self._finish(job, "failed", error=error)
            case _ if running.cancelled:
                await self._finish(job, "cancelled")
            case _:
                await self._give_back(job, _STOPPED[running.stop_reason or "end"])

    async def _give_back(self, job: str, note: str) -> None:
        logger.info("job queued again: %s", note, extra={"job": job})
        await self._recorded(job, partial(self._ledger.give_back, job, note))
        self.notify(job)

    async def _finish(self, job: str, state: JobState, summary: dict[str, Any] | None = None, error: str | None = None) -> None:
        # the error may quote a dataset or a chat template, so it can be long and contain secrets
        error = None if error is None else shortened_without_secrets(error)
        changed = await self._recorded(job, partial(self._ledger.finish, job, state, summary=summary, error=error))
        self._ended(job, state, error, bool(changed))

    def _ended(self, job: str, state: JobState, error: str | None = None, changed: bool = True) -> None:
        """Count and log the end of a job, which the ledger has recorded, unless it had ended before. Notify its watchers."""
        self._deaths.pop(job, None)
        self._paused.pop(job, None)
        if changed:
            self._metrics.jobs_ended.labels(state).inc()
            logger.info("job %s%s", state, f": {error}" if error else "", extra={"job": job})
        self.notify(job)

    def _fetch_changed(self, job: str) -> None:
        self.notify(job)
        self.look()

    # Starting jobs, and lending workers to them

    async def _assign_for_ever(self) -> None:
        """Assign jobs to workers after each call of `look` and each check of the ledger."""
        check_at = 0.0
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), max(0.0, check_at - time.monotonic()))
            self._wanted.clear()
            try:
                if time.monotonic() >= check_at:
                    await self._check_ledger()
                    check_at = time.monotonic() + _LEDGER_SECONDS
                await self._assign_once()
            except LedgerError:  # the ledger may have recorded a claim that failed, which the next check finds
                check_at = 0.0
                await asyncio.sleep(_LEDGER_AGAIN_SECONDS)

    async def _check_ledger(self) -> None:
        """Write to the ledger, and queue the jobs again that it lists as running although they have no runner."""
        note = "the service was killed, or the ledger of jobs could not be written"
        lost = await to_thread.run_sync(self._ledger.requeue_lost, set(self._running), note)
        if lost:
            logger.info("%s without a process: queued again, or ended if cancelled", counted(lost, "running job"))

    async def _assign_once(self) -> None:
        """Start queued jobs, each with a worker that is idle or that another job can spare.

        If a job that remains queued has a higher priority than a running job, stop the running job with the lowest priority.
        """
        for running in self._running.values():
            if not self._has_ready_worker(running):
                self._lend_idle(running)
        while (worker := self._spare_worker()) is not None:
            self._paused = {job: until for job, until in self._paused.items() if until > time.monotonic()}
            but = {*self._paused, *self._running}  # the end of a running job may be in the ledger already
            claim = await to_thread.run_sync(self._ledger.claim, worker.loaded, _PATIENCE_SECONDS, but)
            if claim is None:
                break
            for other in self._running.values():
                if worker.number in other.workers:
                    other.workers.discard(worker.number)
                    other.send({"op": "take_back", "worker": worker.number})
            running = self._running[claim.id] = _Running(claim, {worker.number})
            self._in_background(self._run(running))
            self.notify(claim.id)
        but = {*self._paused, *self._running}
        highest = await to_thread.run_sync(self._ledger.highest_queued_priority, but)
        busy = [running for running in self._running.values() if not running.stop_reason and self._has_ready_worker(running)]
        if highest is not None and busy and not any(running.stop_reason for running in self._running.values()):
            lowest = min(busy, key=lambda running: running.claim.priority)
            if lowest.claim.priority < highest:
                self._stop(lowest, "interrupted")
        for running in self._running.values():
            self._lend_idle(running)

    def _spare_worker(self) -> WorkerHandle | None:
        """Return a ready worker for a queued job: an idle one, or one of a job that has others; None if there is none."""
        spare: WorkerHandle | None = None
        lent = {number: running for running in self._running.values() for number in running.workers}
        for worker in self._pool.workers:
            if not worker.ready:
                continue
            if worker.number not in lent:
                return worker
            if self._has_ready_worker(lent[worker.number], but=worker.number):
                spare = worker
        return spare

    def _has_ready_worker(self, running: _Running, but: int | None = None) -> bool:
        return any(self._pool.workers[number].ready for number in running.workers - {but})

    def _lend_idle(self, running: _Running) -> None:
        """Lend idle workers to a running job: to one that has no worker, or that more workers are worthwhile for."""
        if self.closing or running.stop_reason is not None or running.runner is None:
            return
        lent = {number for other in self._running.values() for number in other.workers}
        for worker in self._pool.workers:
            if not worker.answering or worker.number in lent:
                continue
            if not self._has_ready_worker(running) or self._is_worthwhile(running, worker):
                logger.info("lent worker %d to the job as well", worker.number, extra={"job": running.claim.id})
                running.workers.add(worker.number)
                self._lend(running, worker.number)

    def _is_worthwhile(self, running: _Running, worker: WorkerHandle) -> bool:
        """Return whether one more worker is worthwhile for a job, considering what is left to score.

        A worker that would have to unload a model is not lent. Queued jobs take precedence.
        """
        left = running.counted.seconds_left
        if self._wanted.is_set() or not running.counted.scored or left is None or running.failures[worker.number] >= _FAILURES:
            return False
        if running.claim.reference_id in worker.loaded:
            return left >= _LEFT_SECONDS
        movable = [model for model in worker.loaded if model != worker.configuration.pinned]
        is_full = bool(movable) and len(worker.loaded) >= worker.configuration.capacity
        return left >= _LEFT_TO_LOAD_SECONDS and not is_full

    def _lend(self, running: _Running, number: int) -> None:
        if self._pool.workers[number].ready:
            address = self._pool.workers[number].configuration.address
            running.send({"op": "lend", "worker": number, "address": address})

    # A running job

    async def _run(self, running: _Running) -> None:
        job = running.claim.id
        try:
            if await self._begin(running):
                await self._follow(running)
        except Exception as error:
            logger.exception("a job could not be run", extra={"job": job})
            self._kill(running, "the service could not handle a message from it")
            await self._finish(job, "failed", error=f"{type(error).__name__}: {error}")
        finally:
            del self._running[job]
            self.look()

    async def _follow(self, running: _Running) -> None:
        runner = running.runner
        assert runner is not None
        report: dict[str, Any] | None = None
        while report is None and (frame := await runner.receive()) is not None:
            message, _ = frame
            if message["op"] == "job":
                report = message
            else:
                self._progressed(running, message)
        reason = "" if report is not None else await runner.wait()
        running.runner = None
        running.workers.clear()  # they may work for other jobs, however long it takes to record the end
        self.look()
        if report is not None:
            self._in_background(runner.wait())
        await self._record_end(running, report, reason)

    def _progressed(self, running: _Running, message: dict[str, Any]) -> None:
        job, progress = running.claim.id, JobProgress(**message["progress"])
        self._count(running, progress)
        if message["committed"]:
            self._deaths.pop(job, None)
        self._lend_idle(running)
        self._ledger.progressed(job, progress)
        self.notify(job)

    def _count(self, running: _Running, progress: JobProgress) -> None:
        before, running.counted = running.counted, progress
        self._metrics.sequences.labels("job", "hit").inc(max(0, progress.hits - before.hits))
        self._metrics.sequences.labels("job", "scored").inc(max(0, progress.scored - before.scored))
        self._metrics.tokens.labels("job").inc(max(0, progress.tokens - before.tokens))

    async def _begin(self, running: _Running) -> bool:
        """Start a job's runner. If the job cannot run, record why and return False."""
        claim = running.claim
        try:
            if await to_thread.run_sync(self._ledger.is_cancelled, claim.id):  # before it was in `_running`
                self._cancel(running)
        except LedgerError:  # the job is listed as running without a process, and runs when the ledger works again
            return False
        try:
            order = await self.order(claim)
        except (ReflogpError, Problem, OSError) as error:
            detail = error.detail if isinstance(error, Problem) else str(error)
            what = "" if isinstance(error, ReferenceNotFoundError) else "the dataset cannot be used: "
            await self._finish(claim.id, "failed", error=what + detail)
            return False
        if running.stop_reason is not None:
            await self._record_end(running, None)
            return False
        try:
            running.runner = await start_process("run", order)
        except (OSError, EOFError) as error:  # the machine has no memory or no processes left
            await self._record_end(running, None, f"it could not be started: {error}")
            return False
        logger.info("job started, pid %s, on worker %s", running.runner.pid, *running.workers, extra={"job": claim.id})
        for number in running.workers:
            self._lend(running, number)
        if running.stop_reason is not None:
            self._stop(running, running.stop_reason)
        return True

    async def order(self, claim: Claim) -> JobOrder:
        """Return what a job's process needs.

        Raises ReferenceNotFoundError if the reference is no longer served, and PathError if its dataset is not allowed.
        """
        served, file = self._registry.served(claim.settings.reference, claim.reference_id), Path(claim.source["file"])
        root = str(await self._threads.run(root_of, file, self._settings)) if "path" in claim.source else None
        return JobOrder(claim, served.reference, served.settings, root, self.context)

    def _cancel(self, running: _Running) -> None:
        running.cancelled = True
        self._stop(running, "cancelled")

    def _stop(self, running: _Running, why: str) -> None:
        """Tell a job's runner to stop, and kill it if it has not exited after _STOP_SECONDS."""
        running.stop_reason = running.stop_reason or why
        asyncio.get_running_loop().call_later(_STOP_SECONDS, self._kill, running, "it did not stop in time")
        running.send({"op": "stop", "why": running.stop_reason})

    def _kill(self, running: _Running, why: str) -> None:
        if running.runner is not None:
            running.runner.kill(why)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
