"""Run precompute jobs: submit jobs, assign them to workers, and record their progress and final states.

A precompute job scores a dataset with a reference. The code of this module runs in the event loop. Calls that use the ledger or
files run in separate threads.

Requests from callers (submit, cancel, retry) are recorded in the job ledger before the response is sent. Reports from workers
that change a job's state are recorded through PendingWrites, so that a job continues even while the ledger cannot be written.
Only one task assigns jobs to workers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from anyio import to_thread

from reflogp.service.dataset_files import DatasetFiles
from reflogp.service.errors import LedgerDamagedError, LedgerError
from reflogp.service.fetch import check_uri
from reflogp.service.fetching import Fetching
from reflogp.service.helping import Helping
from reflogp.service.ledger import Claim, DifferentContentError, Ledger, QueueFullError, Submission
from reflogp.service.metrics import Metrics
from reflogp.service.models import UNFINISHED, DatasetSpec, Job, JobProgress, JobRequest, JobSettings, JobState
from reflogp.service.pending_writes import PendingWrites
from reflogp.service.pool import Pool, WorkerHandle
from reflogp.service.problems import Problem
from reflogp.service.registry import ReferenceRegistry
from reflogp.service.request_ids import request_id, traceparent
from reflogp.service.roots import resolve_path, root_of
from reflogp.service.settings import ServerSettings
from reflogp.service.supervision import supervise
from reflogp.service.threads import Threads
from reflogp.service.uploads import Uploads
from reflogp.service.worker.protocol import JobOrder
from reflogp.store import ReferenceNotFoundError
from reflogp.store.texts import counted, hide_secrets, shortened_without_secrets

logger = logging.getLogger(__name__)

#: A job fails if this many workers have died since values of the job were last committed. A death is not counted if it reduced
#: the number of suspects (see Claim), or if the worker was computing an online request.
_DEATHS = 3
#: A job that was first submitted less than this many seconds ago may be overtaken by newer jobs of the same priority whose
#: model is already loaded.
_PATIENCE_SECONDS = 60.0
#: Seconds between rounds of housekeeping, and the shorter pause after a round in which a step failed.
_HOUSEKEEPING_SECONDS, _HOUSEKEEPING_AGAIN_SECONDS = 3600.0, 60.0
#: Seconds between probes of a working ledger, between attempts to use a failing ledger, and between searches for jobs that are
#: recorded as running although no worker is running them.
_PROBE_SECONDS, _PROBE_AGAIN_SECONDS, _LOST_SECONDS = 5.0, 1.0, 60.0


#: Number of dataset files that are hashed at the same time.
_FILE_THREADS = 4
#: A job whose store cannot be used is tried again after _STORE_PAUSE seconds, doubled after each further failure, up to
#: _LONGEST_STORE_PAUSE. It fails after more than _STORE_TRIES failures between two commits, which takes about three hours.
_STORE_PAUSE, _LONGEST_STORE_PAUSE, _STORE_TRIES = 30.0, 600.0, 20


#: (Function that writes to the ledger, callback that is called with the function's result).
_Write = tuple[Callable[[], Any], Callable[[Any], None]]


class _Running:
    """A job that is assigned to a worker.

    Attributes:
        claim: the job, as it was claimed from the ledger.
        in_flight: keys (hex) of the sequences in the worker's current forward pass for this job.
        cancelled: event that is set once the job has been cancelled.
        stop_reason: reason why the job must stop on its worker, or None if it may continue.
        began: True once the job has been sent to the worker.
        counted: the progress that the metrics already include.
    """

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.in_flight: list[str] = []
        self.cancelled = threading.Event()
        self.stop_reason: str | None = None
        self.began = False
        self.counted = JobProgress()


class Precompute:
    """Runs the precompute jobs of a service.

    Args:
        settings: the service's settings.
        folder: the state folder. Results are written to its subfolder `results`.
        ledger: the job ledger.
        registry: the service's references, accessible by name or id.
        uploads: the uploads, by name.
        files: the uploaded and fetched datasets.
        metrics: metrics to update.
    """

    def __init__(
        self,
        settings: ServerSettings,
        folder: Path,
        ledger: Ledger,
        registry: ReferenceRegistry,
        uploads: Uploads,
        files: DatasetFiles,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._results = folder / "results"
        self._results.mkdir(parents=True, exist_ok=True)
        for partial_file in self._results.glob(".*.partial"):  # left by a worker that was killed while it wrote a result
            partial_file.unlink(missing_ok=True)
        self._datasets = files
        self._ledger = ledger
        self._registry = registry
        self._uploads = uploads
        self._metrics = metrics
        self._pending = PendingWrites(ledger)
        self._fetching = Fetching(settings, ledger, self._pending, files, self._fetch_changed, self._fail)
        self._files = Threads("the dataset's file system", _FILE_THREADS)
        self._models = Threads("the model's file system", _FILE_THREADS, 60.0)
        self._admissions: dict[str, asyncio.Task[dict[str, str]]] = {}  # dataset (JSON) -> its check, which has not ended yet
        self._pool: Pool | None = None
        self._helping: Helping
        self._running: dict[int, _Running] = {}  # worker number -> the job it is running
        self._cancelled: set[str] = set()  # ids of running jobs that must stop because they were cancelled
        self._store_failures: Counter[str] = Counter()  # ids of running and queued jobs whose store could not be used
        self._paused: dict[str, float] = {}  # id of a job -> when it may be tried again, on the clock of time.monotonic
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._wanted = asyncio.Event()
        self._look_for_lost = True
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._flusher: asyncio.Task[None] | None = None

    def start(self, pool: Pool) -> None:
        """Start the background tasks. Jobs that were unfinished when the service last stopped are continued."""
        self._pool = pool
        self._helping = Helping(pool)
        self._assign()
        work = {
            "assigning jobs": self._assign_for_ever,
            "fetching datasets": self._fetching.run,
            "housekeeping": self._keep_house,
            "watching the ledger": self._watch_ledger,
        }
        self._tasks = [asyncio.create_task(supervise(name, run)) for name, run in work.items()]
        self._flusher = asyncio.create_task(supervise("recording the state of jobs", self._pending.run))

    def drain(self) -> None:
        """Stop assigning jobs and fetching datasets, and answer all requests that wait for a job's next change."""
        self._closing = True
        self._fetching.close()
        for task in self._tasks:
            task.cancel()
        for job in list(self._watchers):
            self._notify(job)

    async def close(self) -> None:
        """Stop the background tasks, and write to the ledger all job states that have not been recorded yet.

        Call this method after all workers have exited. If the states of some jobs cannot be recorded, log the number of those
        jobs.
        """
        self.drain()
        if self._flusher is not None:
            self._flusher.cancel()
        if not await self._pending.flush():
            logger.error(
                "could not record the state of %s; unfinished jobs continue when the service is started again",
                counted(len(self._pending.jobs), "job"),
            )

    @property
    def unrecorded(self) -> int:
        """Number of writes that have not reached the ledger yet."""
        return len(self._pending)

    async def submit(
        self, request: JobRequest, who: str, idempotency_key: str | None, received: tuple[Path, str] | None = None
    ) -> tuple[Job, bool]:
        """Submit a job. By the time this method returns, the job is in the ledger.

        Args:
            request: the requested job.
            who: name of the submitter.
            idempotency_key: identifies the job, together with `who`. If None, the job is identified by its reference,
                tokenizer, dataset and settings.
            received: path and SHA-256 digest of the dataset's file if the dataset was sent as the request body, otherwise None.

        Returns:
            (the job, True if it is new or False if it already existed). An existing job that has failed or was cancelled is
            queued again.

        Raises:
            LedgerError: the ledger cannot be used.
            ReferenceNotFoundError: the service has no model for the reference.
            Problem: the dataset cannot be read or is not allowed, the idempotency key was already used for a different job
                (409), or too many jobs are queued (429).
        """
        reference = self._registry.model_of(request.reference)
        if received is not None:
            file, digest = received
            source = {"name": str(request.dataset.upload), "file": str(file), "digest": digest, "split": request.dataset.split}
        else:
            source = await self._admitted(request.dataset)
        asked = {
            **request.model_dump(exclude={"dataset", "priority", "title"}),
            "reference": reference.reference_id,
            "dataset": source.get("digest") or source["uri"],
            "path": source["file"] if "path" in source else None,  # rows may name image files by paths relative to the dataset
            "split": request.dataset.split,
            **({} if request.dataset.config is None else {"config": request.dataset.config}),
            "tokenizer": await self._models.run(self._registry.tokenizer_digest, request.reference),
        }
        content = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        identity = content if idempotency_key is None else f"{who}\n{idempotency_key}"
        submission = Submission(
            identity=identity,
            content=content,
            settings=JobSettings(**request.model_dump(exclude={"dataset"})),
            dataset=request.dataset,
            source=source,
            reference_id=reference.reference_id,
            submitted_by=who,
            lasting=idempotency_key is not None or "digest" in source,
            request=request_id(),
            traceparent=traceparent(),
        )
        try:
            job, new = await to_thread.run_sync(self._ledger.submit, submission, self._settings.max_waiting_jobs)
        except QueueFullError:
            raise Problem(
                429, "too many jobs are queued", "try again when some jobs have finished", {"Retry-After": "60"}
            ) from None
        except DifferentContentError as error:
            raise Problem(
                409,
                f"this Idempotency-Key was already used for a different job ({error.args[0]})",
                "use a new key for each new job",
            ) from None
        if new:
            logger.info("job submitted by %s", who, extra={"job": job.id})
        self._assign()
        return job, new

    async def cancel(self, job_id: str) -> Job:
        """Cancel a job.

        A queued job ends at once; a running job may continue until its current forward pass ends. By the time this method
        returns, the cancellation is in the ledger.

        Raise LedgerError if the ledger cannot be used, and Problem if the job is unknown or has ended.
        """
        job = await self.get(job_id)
        state = await to_thread.run_sync(self._ledger.cancel, job_id)
        if state not in UNFINISHED:
            raise Problem(409, f"the job is already {state or job.state}", "only queued and running jobs can be cancelled")
        self._fetching.cancel(job_id)
        if state == "queued":
            self._ended(job_id, "cancelled", None, True)
        else:
            self._cancelled.add(job_id)
            self._stop_if_cancelled()
        return await self.get(job_id)

    async def retry(self, job_id: str) -> Job:
        """Queue a failed or cancelled job again.

        Raise Problem if the job is unknown or has neither failed nor been cancelled, and LedgerError if the ledger cannot be
        used.
        """
        job = await self.get(job_id)
        if not await to_thread.run_sync(self._ledger.retry, job_id):
            raise Problem(409, f"the job is {job.state}", "only failed and cancelled jobs can be retried")
        self._notify(job_id)
        self._assign()
        return await self.get(job_id)

    async def get(self, job_id: str, wait: float = 0.0) -> Job:
        """Return a job. Raise Problem if the job is unknown, and LedgerError if the ledger cannot be used.

        Args:
            wait: an unfinished job is returned after its next change, or after this many seconds.
        """
        changed = asyncio.Event()
        self._watchers.setdefault(job_id, set()).add(changed)  # before the job is read, so that no change is missed
        try:
            job = await self._read(job_id)
            if not wait or job.state not in UNFINISHED or self._closing:
                return job
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), wait)
            return await self._read(job_id)
        finally:
            self._watchers[job_id].discard(changed)
            if not self._watchers[job_id]:
                del self._watchers[job_id]

    async def _read(self, job_id: str) -> Job:
        job = await to_thread.run_sync(self._ledger.get, job_id)
        if job is None:
            raise Problem(
                404,
                f"there is no job {job_id}",
                "GET /v1/jobs lists all jobs; ended jobs are deleted after some days (the service's setting keep_days)",
            )
        return job

    def result(self, job_id: str) -> Path:
        """Return the path of a job's result.

        The worker writes the file at the end of the job, and only if at least one row of the dataset could be read.
        """
        return self._results / f"{job_id}.parquet"

    def report(self, job_id: str) -> Path:
        """Return the path of a job's report, which the worker writes after the result, unless a note says why not."""
        return self._results / f"{job_id}.report.html"

    async def on_frame(self, worker: WorkerHandle, message: dict[str, Any], body: bytes) -> None:
        """Handle a frame from a worker.

        The frame reports on the worker's job, contains a message for another worker, or says that the worker is ready. Other
        frames, such as those about online requests, are ignored.
        """
        if self._helping.on_frame(worker, message, body):
            return
        running = self._running.get(worker.number)
        match message["op"]:
            case "ready":
                self._assign()
            case "pass" if running is not None and running.claim.id == message["job"]:
                running.in_flight = message["keys"]
            case "progress" if running is not None and running.claim.id == message["job"]:
                progress = JobProgress(**message["progress"])
                self._count(running, progress)
                job = running.claim.id
                if message["committed"]:
                    self._store_failures.pop(job, None)
                    if running.claim.deaths:
                        running.claim = replace(running.claim, deaths=0)
                        self._in_background(self._pending.put(job, partial(self._ledger.forget_deaths, job)))
                self._find_help(worker.number, running)
                self._ledger.progressed(job, progress)
                self._notify(job)
            case "job" if running is not None and running.claim.id == message["job"]:
                self._release(worker.number, running, self._end_of(running, message))

    async def on_death(self, worker: WorkerHandle, reason: str, blame: bool) -> None:
        """Handle the end of a worker's process: queue the worker's job again, or record that the job failed or was cancelled.

        Args:
            blame: True if the job may have killed the worker; False if the worker was computing an online request when it died.
        """
        was_helping = self._helping.is_helping(worker.number)
        self._helping.on_death(worker, reason, blame)
        blame = blame and not was_helping  # a worker that is still helping has not started its own job yet
        running = self._running.get(worker.number)
        if running is None:
            return
        job = running.claim.id
        if running.cancelled.is_set():
            self._release(worker.number, running, self._finish(job, "cancelled"))
            return
        note = f"the worker ended: {reason}"
        if not blame or self._closing:
            self._release(worker.number, running, self._give_back(job, note))
            return
        suspects, poison = running.claim.suspects, dict(running.claim.poison)
        known = set(suspects)
        at_work = set(running.in_flight)
        narrowed = bool(at_work and known and at_work < known)
        if len(at_work) == 1 and at_work == known:
            poison |= dict.fromkeys(at_work, f"a worker died each time this sequence was scored ({reason})")
            suspects, narrowed = [], True
            logger.warning("skipping a sequence that crashes workers; its key is %s", next(iter(at_work)), extra={"job": job})
        elif at_work:
            suspects = sorted(at_work)
        logger.warning("the job's worker ended: %s", reason, extra={"job": job})

        def recorded(deaths: int | None) -> None:  # None: the write failed with an unexpected error, which was logged
            if deaths is not None and deaths >= _DEATHS:
                self._ended(job, "failed", f"{deaths} workers died in a row without making progress on the job", True)
            else:
                self._notify(job)

        died = partial(self._ledger.died, job, suspects, poison, note, narrowed, _DEATHS)
        self._release(worker.number, running, (died, recorded))

    def _release(self, number: int, running: _Running, write: _Write) -> None:
        """Remove a job from its worker and record the job's new state, without waiting for it.

        The write is queued before the job is removed from `_running`; otherwise, `_requeue_lost` might queue the job again.
        """
        job = running.claim.id
        recorded = self._pending.put(job, *write)
        del self._running[number]
        self._helping.end(job, number)
        self._cancelled.discard(job)

        async def assign() -> None:
            await recorded
            self._assign()

        self._in_background(assign())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _end_of(self, running: _Running, message: dict[str, Any]) -> _Write:
        """Return the ledger write for a message in which a worker reports that its job is done, has failed, or was stopped."""
        job = running.claim.id
        match message["end"]:
            case "done":
                return self._finish(job, "done", summary=message["summary"])
            case "failed":
                source = running.claim.source
                return self._finish(job, "failed", error=message["error"].replace(source.get("file", "\0"), source["name"]))
            case "stopped" if running.cancelled.is_set():
                return self._finish(job, "cancelled")
            case "stopped" if message["why"] == "store":
                error = f"the store cannot be used: {shortened_without_secrets(message['error'])}"
                self._store_failures[job] += 1
                if self._store_failures[job] > _STORE_TRIES:
                    del self._store_failures[job]
                    return self._finish(job, "failed", error=error)
                pause = min(_LONGEST_STORE_PAUSE, _STORE_PAUSE * 2 ** (self._store_failures[job] - 1))
                self._paused[job] = time.monotonic() + pause
                asyncio.get_running_loop().call_later(pause, self._assign)
                return self._give_back(job, error)
            case _:
                why = {
                    "interrupted": "a job with higher priority needed the worker",
                    "displaced": "the job's model was unloaded to make room for another model",
                }
                return self._give_back(job, why.get(message["why"], "the service ended"))

    def _give_back(self, job: str, note: str) -> _Write:
        """Return the ledger write that puts a running job back into the queue and records the reason."""
        logger.info("job queued again: %s", note, extra={"job": job})
        return partial(self._ledger.give_back, job, note), lambda _: self._notify(job)

    def _finish(self, job: str, state: JobState, summary: dict[str, Any] | None = None, error: str | None = None) -> _Write:
        # the error may quote a dataset or a chat template, so it can be long and contain secrets
        error = None if error is None else shortened_without_secrets(error)
        finish = partial(self._ledger.finish, job, state, summary=summary, error=error)
        return finish, partial(self._ended, job, state, error)

    def _ended(self, job: str, state: JobState, error: str | None, changed: bool) -> None:
        """Count and log the end of a job and notify its watchers. Call this after recording the end in the ledger.

        Args:
            changed: False if the job had already ended. The end is then neither counted nor logged again.
        """
        self._store_failures.pop(job, None)
        self._paused.pop(job, None)
        if changed:
            self._metrics.jobs_ended.labels(state).inc()
            logger.info("job %s%s", state, f": {error}" if error else "", extra={"job": job})
        self._notify(job)

    async def _fail(self, job: str, error: str) -> None:
        """Record that a queued job failed."""
        await self._pending.put(job, *self._finish(job, "failed", error=error))

    def _fetch_changed(self, job: str) -> None:
        self._notify(job)
        self._assign()

    def _count(self, running: _Running, progress: JobProgress) -> None:
        """Update the metrics with the progress that a job has made since the worker's previous `progress` frame."""
        before, running.counted = running.counted, progress
        self._metrics.sequences.labels("job", "hit").inc(max(0, progress.hits - before.hits))
        self._metrics.sequences.labels("job", "scored").inc(max(0, progress.scored - before.scored))
        self._metrics.tokens.labels("job").inc(max(0, progress.tokens - before.tokens))

    def _assign(self) -> None:
        """Wake the background tasks that start jobs and fetch datasets."""
        self._wanted.set()
        self._fetching.look()

    async def _assign_for_ever(self) -> None:
        """Assign jobs to workers after each call of `_assign`, and at least once every _LOST_SECONDS.

        This coroutine never returns. No other task claims jobs.
        """
        looked, failures = 0.0, 0
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), _LOST_SECONDS)
            self._wanted.clear()
            try:
                failed = self._ledger.failures != failures  # the ledger may have recorded a claim that failed
                if self._look_for_lost or failed or time.monotonic() - looked > _LOST_SECONDS:
                    failures = self._ledger.failures
                    await self._requeue_lost()
                    looked, self._look_for_lost = time.monotonic(), False
                await self._assign_once()
            except LedgerError:
                await asyncio.sleep(_PROBE_AGAIN_SECONDS)
                self._wanted.set()

    async def _requeue_lost(self) -> None:
        """Find all jobs that the ledger lists as running although no worker is running them.

        Queue these jobs again, but end those that were cancelled.
        """
        held = {running.claim.id for running in self._running.values()}
        self._cancelled &= held
        known = self._pending.jobs | held
        if lost := await to_thread.run_sync(self._ledger.requeue_running, "the service or the job's worker ended", known):
            logger.info(
                "the ledger listed %s as running without a worker; each was queued again, or ended if it was cancelled",
                counted(lost, "job"),
            )

    async def _assign_once(self) -> None:
        """Assign queued jobs to idle workers.

        If a job that remains queued has a higher priority than a running job, interrupt the running job with the lowest
        priority.
        """
        assert self._pool is not None
        for worker in sorted(self._pool.workers, key=lambda worker: self._helping.is_helping(worker.number)):
            if not worker.ready or worker.number in self._running:
                continue
            self._paused = {job: until for job, until in self._paused.items() if until > time.monotonic()}
            but = self._pending.jobs | set(self._paused)
            claim = await to_thread.run_sync(self._ledger.claim, worker.loaded, _PATIENCE_SECONDS, but)
            if claim is None:
                return
            if not worker.ready:  # the worker's process has ended since the check
                self._look_for_lost = True
                self._wanted.set()
                return
            self._helping.dismiss(worker.number)
            running = self._running[worker.number] = _Running(claim)
            self._stop_if_cancelled()
            self._in_background(self._begin(worker, running))
            self._notify(claim.id)
        highest = await to_thread.run_sync(self._ledger.highest_queued_priority, self._pending.jobs | set(self._paused))
        busy = [(running.claim.priority, number) for number, running in self._running.items() if not running.stop_reason]
        if highest is not None and busy and min(busy)[0] < highest:
            number = min(busy)[1]
            self._stop(number, self._running[number], "interrupted")

    def _find_help(self, owner: int, running: _Running) -> None:
        """Ask idle workers to help with a running job.

        Queued jobs take precedence: a helper stops helping as soon as it is assigned a queued job.
        """
        assert self._pool is not None
        if self._wanted.is_set() or self._closing or running.stop_reason is not None:
            return
        idle = [worker for worker in self._pool.workers if worker.answering and worker.number not in self._running]
        if idle:
            self._helping.offer(running.claim, owner, running.counted, idle)

    async def _begin(self, worker: WorkerHandle, running: _Running) -> None:
        claim = running.claim
        source = claim.source
        root: str | None = None
        write: _Write | None = None
        try:
            entry = self._registry.entry_of(claim.settings.reference, claim.reference_id)
            if "path" in source:
                root = str(await self._files.run(root_of, Path(source["file"]), self._settings))
            elif "uri" in source and not await to_thread.run_sync(Path(source["file"]).exists):
                note = "the fetched dataset was deleted; fetching it again"
                write = partial(self._ledger.fetch_again, claim.id, note), lambda _: self._fetch_changed(claim.id)
        except ReferenceNotFoundError as error:
            write = self._finish(claim.id, "failed", error=str(error))
        except Exception as error:
            detail = error.detail if isinstance(error, Problem) else str(error)
            write = self._finish(claim.id, "failed", error=f"the dataset cannot be used: {detail}")
        if self._running.get(worker.number) is not running:
            return  # the worker has died by now
        if running.cancelled.is_set():
            write = self._finish(claim.id, "cancelled")
        if write is not None:
            self._release(worker.number, running, write)
            return
        settings = claim.settings
        order = JobOrder(
            job=claim.id,
            reference_id=claim.reference_id,
            model=entry.model,
            revision=entry.revision,
            file=source["file"],
            digest=source["digest"],
            root=root,
            split=source["split"],
            format=settings.format,
            max_length=settings.max_length,
            truncation_mode=settings.truncation_mode,
            ld_alpha=settings.ld_alpha,
            result=str(self.result(claim.id)),
            report=str(self.report(claim.id)),
            suspects=claim.suspects,
            poison=claim.poison,
            request=claim.request,
            traceparent=claim.traceparent,
        )
        logger.info("job started on worker %d", worker.number, extra={"job": claim.id})
        running.began = True
        worker.send({"op": "job", "order": asdict(order)})
        if running.stop_reason is not None:
            worker.send({"op": "stop", "job": claim.id, "why": running.stop_reason})

    def _stop_if_cancelled(self) -> None:
        """Tell each worker whose job was cancelled to stop running the job."""
        for number, running in self._running.items():
            if running.claim.id in self._cancelled and not running.cancelled.is_set():
                running.cancelled.set()
                self._stop(number, running, "cancelled")

    def _stop(self, number: int, running: _Running, why: str) -> None:
        assert self._pool is not None
        running.stop_reason = why
        if running.began:
            self._pool.workers[number].send({"op": "stop", "job": running.claim.id, "why": why})

    async def _admitted(self, dataset: DatasetSpec) -> dict[str, str]:
        """Call `_admit` in a thread.

        Submissions of the same dataset wait for the same call, because hashing a dataset may take longer than a client waits
        before it sends a submission again.
        """
        if dataset.path is None:
            return await to_thread.run_sync(self._admit, dataset)
        key = dataset.model_dump_json()
        if (call := self._admissions.get(key)) is None:
            call = self._admissions[key] = asyncio.create_task(self._files.run(self._admit, dataset))
            call.add_done_callback(lambda _: self._admissions.pop(key))
        return await asyncio.shield(call)

    def _admit(self, dataset: DatasetSpec) -> dict[str, str]:
        """Check that a job may use a dataset. Return the dataset's description for the worker (see `source` in Submission).

        Raise Problem if the dataset is not allowed or cannot be read.
        """
        if dataset.upload is not None:
            file, digest = self._uploads.resolve(dataset.upload)
            return {"name": dataset.upload, "file": str(file), "digest": digest, "split": dataset.split}
        if dataset.path is not None:
            file, digest = resolve_path(dataset.path, self._settings)
            return {"name": dataset.path, "file": str(file), "digest": digest, "split": dataset.split, "path": dataset.path}
        assert dataset.uri is not None
        check_uri(dataset.uri, self._settings, dataset.config)
        config = {} if dataset.config is None else {"config": dataset.config}
        return {"name": hide_secrets(dataset.uri), "uri": dataset.uri, "split": dataset.split, **config}

    def _notify(self, job: str) -> None:
        for changed in self._watchers.get(job, ()):
            changed.set()

    async def _watch_ledger(self) -> None:
        """Check every few seconds whether the ledger can be written. Stop the service if the ledger is damaged."""
        while True:
            await to_thread.run_sync(self._ledger.probe)
            if isinstance(self._ledger.trouble, LedgerDamagedError):
                logger.critical("the service stops because its ledger of jobs is damaged")
                signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(_PROBE_SECONDS if self._ledger.trouble is None else _PROBE_AGAIN_SECONDS)

    async def _keep_house(self) -> None:
        """Delete old jobs and unneeded dataset files every hour. This coroutine never returns."""
        while True:
            moment = datetime.now(UTC) - timedelta(days=self._settings.keep_days)
            steps: list[Callable[[], object]] = [partial(self._forget_before, moment), self._datasets.collect]
            failed = False
            for step in steps:
                try:
                    await to_thread.run_sync(step)
                except Exception as error:  # continue with the other steps; the next round retries this one
                    failed = True
                    known = isinstance(error, LedgerError | OSError)
                    logger.warning("a housekeeping step failed: %s", error, exc_info=not known)
            await asyncio.sleep(_HOUSEKEEPING_AGAIN_SECONDS if failed else _HOUSEKEEPING_SECONDS)

    def _forget_before(self, moment: datetime) -> None:
        """Delete jobs that ended before the given time.

        A job's result and report are deleted before the job itself, so that an interrupted deletion leaves no files without a
        job.
        """
        jobs = self._ledger.ended_before(moment)
        for job in jobs:
            self.result(job).unlink(missing_ok=True)
            self.report(job).unlink(missing_ok=True)
            self.report(job).with_suffix(".json").unlink(missing_ok=True)  # reports of earlier versions
        if jobs:
            self._ledger.forget(jobs)
