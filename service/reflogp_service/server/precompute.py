"""Precompute jobs: submitted, given to workers, watched, ended.

Knows jobs' lives: who goes next, what a worker's death means, when a search for poison is over. Does not know HTTP, tokens or
models. Called by the routes, and by the app with what workers say. Lives in the event loop; ledger and files are reached in
threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from anyio import to_thread

from reflogp_service.server.fetch import check_uri, fetch
from reflogp_service.server.ledger import Claim, DifferentContentError, Ledger, Submission
from reflogp_service.server.metrics import Metrics
from reflogp_service.server.models import UNFINISHED, DatasetSpec, Job, JobProgress, JobRequest, JobSettings, Report
from reflogp_service.server.pool import Pool, WorkerHandle
from reflogp_service.server.problems import Problem
from reflogp_service.server.roots import resolve_path
from reflogp_service.server.settings import ServerSettings
from reflogp_service.server.shelf import Shelf
from reflogp_service.server.uploads import UploadFolder
from reflogp_service.worker.orders import JobOrder

logger = logging.getLogger(__name__)

#: Deaths of its workers, without anything gained in between, that a job survives.
_DEATHS = 3
#: A job in line lets one whose model is loaded pass, for so long.
_PATIENCE_SECONDS = 60.0
_HOUSEKEEPING_SECONDS = 3600.0
_ALIVE_SECONDS = 15.0
_EVENT_SECONDS = 0.2


class _Running:
    """A job that a worker has."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.in_flight: list[str] = []
        self.cancelled = threading.Event()
        self.why_stopped: str | None = None
        self.began = False
        self.counted = JobProgress()


class Precompute:
    """The jobs of a service.

    Args:
        settings: of the service.
        folder: for results and fetched datasets.
        ledger: of jobs.
        shelf: names of references.
        uploads: dataset files that were sent.
        metrics: counted in.
    """

    def __init__(
        self,
        settings: ServerSettings,
        folder: Path,
        ledger: Ledger,
        shelf: Shelf,
        uploads: UploadFolder,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._results = folder / "results"
        self._fetched = folder / "fetched"
        self._ledger = ledger
        self._shelf = shelf
        self._uploads = uploads
        self._metrics = metrics
        self._pool: Pool | None = None
        self._running: dict[int, _Running] = {}  # by worker
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._begins: set[asyncio.Task[None]] = set()
        self._assigning = asyncio.Lock()
        self._closing = False
        self._housekeeping: asyncio.Task[None] | None = None

    def start(self, pool: Pool) -> None:
        """Take up where the last service ended."""
        self._pool = pool
        self._results.mkdir(parents=True, exist_ok=True)
        self._fetched.mkdir(parents=True, exist_ok=True)
        if again := self._ledger.requeue_running():
            logger.info("%d jobs of an earlier run go on", again)
        self._housekeeping = asyncio.create_task(self._keep_house())

    def drain(self) -> None:
        """Begin no further job and end every stream of events."""
        self._closing = True
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        for job in list(self._watchers):
            self._notify(job)

    async def submit(self, request: JobRequest, who: str, idempotency_key: str | None) -> tuple[Job, bool]:
        """(the job, whether it is new).

        Raises Problem for an unknown reference, a dataset that may not be read, a key that came with another content.
        """
        reference = self._shelf.model_of(request.reference)
        source = await to_thread.run_sync(self._admit, request.dataset)
        asked = {
            **request.model_dump(exclude={"dataset", "priority", "title"}),
            "reference": reference.reference_id,
            "dataset": source.get("digest") or source["uri"],
            "split": request.dataset.split,
        }
        content = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        identity = content if idempotency_key is None else f"{who}\n{idempotency_key}"
        if self._ledger.waiting() >= self._settings.max_waiting_jobs:
            raise Problem(429, "too many jobs are in line", "try again when some are done", {"Retry-After": "60"})
        submission = Submission(
            identity=identity,
            content=content,
            settings=JobSettings(**request.model_dump(exclude={"dataset"})),
            dataset=request.dataset,
            source=source,
            reference_id=reference.reference_id,
            submitted_by=who,
            lasting=idempotency_key is not None or "digest" in source,
        )
        try:
            job, new = await to_thread.run_sync(self._ledger.submit, submission)
        except DifferentContentError as error:
            raise Problem(
                409, f"this Idempotency-Key came with another job before ({error.args[0]})", "use a new key for a new job"
            ) from None
        if new:
            logger.info("job submitted by %s", who, extra={"job": job.id})
        await self._assign()
        return job, new

    async def cancel(self, job_id: str) -> Job:
        """Cancel a job: at once where it waits, within one pass where it runs. Raises Problem when it has ended."""
        job = await self.get(job_id)
        if job.state not in UNFINISHED:
            raise Problem(409, f"the job is {job.state} already", "nothing is to be done")
        for number, running in self._running.items():
            if running.claim.id == job_id:
                running.cancelled.set()
                self._stop(number, running, "cancelled")
                return job
        await self._finish(job_id, "cancelled")
        return await self.get(job_id)

    async def retry(self, job_id: str) -> Job:
        """Put a failed or cancelled job in line again. Raises Problem for any other."""
        job = await self.get(job_id)
        if not await to_thread.run_sync(self._ledger.retry, job_id):
            raise Problem(409, f"the job is {job.state}", "only failed and cancelled jobs can be retried")
        self._notify(job_id)
        await self._assign()
        return await self.get(job_id)

    async def get(self, job_id: str) -> Job:
        """Raises Problem when there is no such job."""
        job = await to_thread.run_sync(self._ledger.get, job_id)
        if job is None:
            raise Problem(404, f"there is no job {job_id}", "GET /v1/jobs lists them; ended ones are deleted after keep_days")
        return job

    async def watch(self, job_id: str) -> AsyncIterator[Job | None]:
        """The job now and at every change, coalesced, until it has ended; None where nothing changed for a while.

        Ends early when the service does.
        """
        changed = asyncio.Event()
        self._watchers.setdefault(job_id, set()).add(changed)
        try:
            while not self._closing:
                changed.clear()
                job = await self.get(job_id)
                yield job
                if job.state not in UNFINISHED:
                    return
                while not self._closing:
                    try:
                        await asyncio.wait_for(changed.wait(), _ALIVE_SECONDS)
                        break
                    except TimeoutError:
                        yield None
                await asyncio.sleep(_EVENT_SECONDS)
        finally:
            self._watchers[job_id].discard(changed)
            if not self._watchers[job_id]:
                del self._watchers[job_id]

    def result(self, job_id: str) -> Path:
        """Where a job's result is, or would be."""
        return self._results / f"{job_id}.parquet"

    def report(self, job_id: str) -> Report | None:
        """A done job's report; None where there is none."""
        file = self._report_file(job_id)
        return Report.model_validate_json(file.read_bytes()) if file.is_file() else None

    async def on_frame(self, worker: WorkerHandle, message: dict[str, Any]) -> None:
        """What a worker says about a job, or that it is ready."""
        running = self._running.get(worker.number)
        match message["op"]:
            case "ready":
                await self._assign()
            case "pass" if running is not None and running.claim.id == message["job"]:
                running.in_flight = message["keys"]
            case "progress" if running is not None and running.claim.id == message["job"]:
                progress = JobProgress(**message["progress"])
                self._count(running, progress)
                await to_thread.run_sync(self._ledger.progressed, message["job"], progress, message["committed"])
                self._notify(message["job"])
            case "job" if running is not None and running.claim.id == message["job"]:
                del self._running[worker.number]
                await self._ended(running, message)
                await self._assign()

    async def on_death(self, worker: WorkerHandle, reason: str, blame: bool) -> None:
        """A worker's process has ended: its job goes back in line, or has had enough. `blame`: it was at the job."""
        running = self._running.pop(worker.number, None)
        if running is None:
            return
        job = running.claim.id
        if running.cancelled.is_set():
            await self._finish(job, "cancelled")
            return
        if not blame or self._closing:
            await self._give_back(job, f"its worker ended: {reason}")
            return
        suspects, poison = running.claim.suspects, dict(running.claim.poison)
        known = set(suspects)
        at_work = set(running.in_flight)
        narrowed = bool(at_work and known and at_work < known)
        if len(at_work) == 1 and at_work == known:
            poison |= dict.fromkeys(at_work, f"a worker died whenever it was scored ({reason})")
            suspects, narrowed = [], True
            logger.warning("a sequence kills workers and is left out: %s", next(iter(at_work)), extra={"job": job})
        elif at_work:
            suspects = sorted(at_work)
        note = f"its worker ended: {reason}"
        logger.warning("job goes back in line: %s", note, extra={"job": job})
        deaths = await to_thread.run_sync(self._ledger.died, job, suspects, poison, note, narrowed)
        if deaths >= _DEATHS:
            await self._finish(job, "failed", error=f"{deaths} workers died one after the other without getting on: {reason}")
            return
        self._notify(job)

    async def _ended(self, running: _Running, message: dict[str, Any]) -> None:
        job = running.claim.id
        match message["end"]:
            case "done":
                await self._finish(job, "done", summary=message["summary"])
            case "failed":
                source = running.claim.source
                await self._finish(job, "failed", error=message["error"].replace(source.get("file", "\0"), source["name"]))
            case "stopped" if running.cancelled.is_set():
                await self._finish(job, "cancelled")
            case "stopped":
                why = {"interrupted": "a more urgent job came", "displaced": "another reference needed its model's place"}
                await self._give_back(job, why.get(message["why"], "the service ended"))

    async def _give_back(self, job: str, note: str) -> None:
        """A running job goes back in line, for a reason."""
        logger.info("job goes back in line: %s", note, extra={"job": job})
        await to_thread.run_sync(self._ledger.give_back, job, note)
        self._notify(job)

    def _count(self, running: _Running, progress: JobProgress) -> None:
        """Add to the metrics what came since the last report."""
        before, running.counted = running.counted, progress
        self._metrics.sequences.labels("job", "hit").inc(max(0, progress.hits - before.hits))
        self._metrics.sequences.labels("job", "scored").inc(max(0, progress.scored - before.scored))
        self._metrics.tokens.labels("job").inc(max(0, progress.tokens - before.tokens))

    async def _finish(self, job: str, state: Any, summary: dict[str, Any] | None = None, error: str | None = None) -> None:
        await to_thread.run_sync(lambda: self._ledger.finish(job, state, summary=summary, error=error))
        self._metrics.jobs_ended.labels(state).inc()
        logger.info("job %s%s", state, f": {error}" if error else "", extra={"job": job})
        self._notify(job)

    async def _assign(self) -> None:
        """Give every idle worker a job; where none is idle, interrupt one that is less urgent than what waits."""
        assert self._pool is not None
        async with self._assigning:
            if self._closing:
                return
            for worker in self._pool.workers:
                if not worker.ready or worker.number in self._running:
                    continue
                claim = await to_thread.run_sync(self._ledger.claim, worker.loaded, _PATIENCE_SECONDS)
                if claim is None:
                    return
                running = self._running[worker.number] = _Running(claim)
                begin = asyncio.create_task(self._begin(worker, running))
                self._begins.add(begin)
                begin.add_done_callback(self._begins.discard)
                self._notify(claim.id)
            highest = await to_thread.run_sync(self._ledger.highest_waiting)
            busy = [(running.claim.priority, number) for number, running in self._running.items() if not running.why_stopped]
            if highest is not None and busy and min(busy)[0] < highest:
                number = min(busy)[1]
                self._stop(number, self._running[number], "interrupted")

    async def _begin(self, worker: WorkerHandle, running: _Running) -> None:
        claim = running.claim
        try:
            source = claim.source
            if "file" not in source:
                file, digest = await to_thread.run_sync(
                    fetch, source["uri"], self._fetched, self._settings, running.cancelled.is_set
                )
                source = {**source, "file": str(file), "digest": digest}
                await to_thread.run_sync(self._ledger.fetched, claim.id, source)
            elif "path" in source:
                await to_thread.run_sync(self._check_unchanged, source)
        except Exception as error:
            if self._running.get(worker.number) is running:
                del self._running[worker.number]
                state = "cancelled" if running.cancelled.is_set() else "failed"
                detail = error.detail if isinstance(error, Problem) else str(error)
                await self._finish(claim.id, state, error=None if state == "cancelled" else f"the dataset: {detail}")
                await self._assign()
            return
        if self._running.get(worker.number) is not running:
            return  # the worker died meanwhile
        settings = claim.settings
        order = JobOrder(
            job=claim.id,
            reference_id=claim.reference_id,
            file=source["file"],
            digest=source["digest"],
            split=source["split"],
            format=settings.format,
            max_length=settings.max_length,
            truncation_mode=settings.truncation_mode,
            ld_alpha=settings.ld_alpha,
            result=str(self.result(claim.id)),
            report=str(self._report_file(claim.id)),
            suspects=claim.suspects,
            poison=claim.poison,
        )
        logger.info("job begins on worker %d", worker.number, extra={"job": claim.id})
        running.began = True
        worker.send({"op": "job", "order": asdict(order)})
        if running.why_stopped is not None:
            worker.send({"op": "stop", "job": claim.id, "why": running.why_stopped})

    def _stop(self, number: int, running: _Running, why: str) -> None:
        assert self._pool is not None
        running.why_stopped = why
        if running.began:
            self._pool.workers[number].send({"op": "stop", "job": running.claim.id, "why": why})

    def _admit(self, dataset: DatasetSpec) -> dict[str, str]:
        """What a worker will read; raises Problem for what it may not."""
        if dataset.upload is not None:
            file, digest = self._uploads.resolve(dataset.upload)
            return {"name": dataset.upload, "file": str(file), "digest": digest, "split": dataset.split}
        if dataset.path is not None:
            file, digest = resolve_path(dataset.path, self._settings)
            return {"name": dataset.path, "file": str(file), "digest": digest, "split": dataset.split, "path": dataset.path}
        assert dataset.uri is not None
        check_uri(dataset.uri, self._settings)
        return {"name": dataset.uri, "uri": dataset.uri, "split": dataset.split}

    def _check_unchanged(self, source: dict[str, str]) -> None:
        """Raise Problem when what lies at a path is not what was submitted, or may no longer be read."""
        _, digest = resolve_path(source["path"], self._settings)
        if digest != source["digest"]:
            raise Problem(409, f"{source['path']} has changed since the job was submitted", "submit it again")

    def _report_file(self, job_id: str) -> Path:
        return self._results / f"{job_id}.report.json"

    def _notify(self, job: str) -> None:
        for changed in self._watchers.get(job, ()):
            changed.set()

    async def _keep_house(self) -> None:
        while True:
            moment = datetime.now(UTC) - timedelta(days=self._settings.keep_days)
            for job in await to_thread.run_sync(self._ledger.forget_before, moment):
                self.result(job).unlink(missing_ok=True)
                self._report_file(job).unlink(missing_ok=True)
            needed = self._ledger.files_in_use()
            for file in self._fetched.iterdir():
                if str(file) not in needed and datetime.fromtimestamp(file.stat().st_mtime, UTC) < moment:
                    file.unlink(missing_ok=True)
            await to_thread.run_sync(self._uploads.collect, moment)
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
