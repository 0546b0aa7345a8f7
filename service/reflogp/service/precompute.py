"""Submit jobs, cancel and retry them, and return them with their results and reports. Old jobs and datasets are deleted.

What a caller asks for is in the ledger before the response is sent. The scheduler runs the jobs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from anyio import to_thread

from reflogp.service.dataset_files import DatasetFiles, Uploads
from reflogp.service.fetch import check_uri
from reflogp.service.ledger import Ledger, Submission
from reflogp.service.ledger_file import LedgerError
from reflogp.service.models import UNFINISHED, DatasetSpec, Job, JobRequest, JobSettings
from reflogp.service.problems import Problem
from reflogp.service.registry import ReferenceRegistry
from reflogp.service.request_ids import request_id, traceparent
from reflogp.service.roots import resolve_path
from reflogp.service.runner.order import JobOrder
from reflogp.service.runner.process import start_process
from reflogp.service.scheduling import JobScheduler
from reflogp.service.settings import ServerSettings
from reflogp.service.threads import Threads
from reflogp.store.texts import hide_secrets

logger = logging.getLogger(__name__)

#: Seconds between rounds of housekeeping.
_HOUSEKEEPING_SECONDS = 3600.0
#: Maximum number of queued jobs.
_MOST_QUEUED = 100_000
#: Maximum number of rows of a dataset that gets a report, because a report keeps some hundred bytes of each row in memory.
_MOST_REPORTED = 300_000
#: Maximum number of seconds to write a report.
_REPORT_SECONDS = 600.0
#: Number of dataset files that are hashed at the same time.
_FILE_THREADS = 4


@dataclass(eq=False)
class Precompute:
    """What requests do with precompute jobs."""

    settings: ServerSettings
    ledger: Ledger
    registry: ReferenceRegistry
    uploads: Uploads
    datasets: DatasetFiles
    scheduler: JobScheduler
    _reporting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _files: Threads = field(default_factory=lambda: Threads("the dataset's file system", _FILE_THREADS))
    _models: Threads = field(default_factory=lambda: Threads("the model's file system", _FILE_THREADS, 60.0))
    #: Dataset (JSON) -> its check, which has not ended yet.
    _admissions: dict[str, asyncio.Task[dict[str, str]]] = field(default_factory=dict)

    async def submit(
        self, request: JobRequest, who: str, idempotency_key: str | None, received: tuple[Path, str] | None = None
    ) -> tuple[Job, bool]:
        """Submit a job of `who`. Return the job, which is in the ledger, and whether it is new.

        Without `idempotency_key`, the job is identified by its reference, tokenizer, dataset and settings. An existing job that
        has failed or was cancelled is queued again. `received` is the path and SHA-256 digest of a dataset that was sent as the
        request's body.

        Raises:
            LedgerError: the ledger cannot be used.
            ReferenceNotFoundError: the service has no model for the reference.
            Problem: the dataset cannot be read or is not allowed, the idempotency key was already used for a different job
                (409), or too many jobs are queued (429).
        """
        served = self.registry.served(request.reference)
        reference = served.reference
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
            **({"top_k": served.settings.top_k} if served.settings.top_k else {}),
            "tokenizer": await self._models.run(self.registry.tokenizer_digest, request.reference),
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
        job, new = await to_thread.run_sync(self.ledger.submit, submission, _MOST_QUEUED)
        if new:
            logger.info("job submitted by %s", who, extra={"job": job.id})
        self.scheduler.look()
        return job, new

    async def cancel(self, job_id: str) -> Job:
        """Cancel a job: a queued job ends at once, a running one when its current forward pass ends.

        Raise LedgerError if the ledger cannot be used, and Problem if the job is unknown or has ended.
        """
        job = await self.get(job_id)
        state = await self.scheduler.cancel(job_id)
        if state not in UNFINISHED:
            raise Problem(409, f"the job is already {state or job.state}", "only queued and running jobs can be cancelled")
        return await self.get(job_id)

    async def retry(self, job_id: str) -> Job:
        """Queue a failed or cancelled job again.

        Raise Problem if the job is unknown or has neither failed nor been cancelled, and LedgerError if the ledger cannot be
        used.
        """
        job = await self.get(job_id)
        if not await to_thread.run_sync(self.ledger.retry, job_id):
            raise Problem(409, f"the job is {job.state}", "only failed and cancelled jobs can be retried")
        self.scheduler.notify(job_id)
        self.scheduler.look()
        return await self.get(job_id)

    async def get(self, job_id: str, wait: float = 0.0) -> Job:
        """Return a job; an unfinished one after its next change, or after `wait` seconds.

        Raise Problem if the job is unknown, and LedgerError if the ledger cannot be used.
        """
        change = self.scheduler.change(job_id)  # before the job is read, so that no change is missed
        job = await to_thread.run_sync(self.ledger.get, job_id)
        if job is None:
            raise _unknown(job_id)
        if not wait or job.state not in UNFINISHED or self.scheduler.closing:
            return job
        with suppress(TimeoutError):
            await asyncio.wait_for(change.wait(), wait)
        return await self.get(job_id)

    async def result(self, job_id: str) -> Path:
        """Return the path of the result of a job that is done. Raises Problem if there is none."""
        file = self.scheduler.context.result(job_id)
        if not await to_thread.run_sync(file.is_file):
            raise Problem(404, "the job has no result because no row of its dataset could be read", "see the job's bad rows")
        return file

    async def report(self, job: Job) -> Path:
        """Return the path of a job's report, which is written when it is first asked for.

        Raises Problem if it cannot be written, for example because the dataset has been deleted or has changed.
        """
        file, step = self.scheduler.context.report(job.id), "write a report of any dataset with `reflogp report`"
        if await to_thread.run_sync(file.is_file):
            return file
        if job.summary is not None and job.summary["rows"] > _MOST_REPORTED:
            raise Problem(404, f"the job has no report: its dataset has more than {_MOST_REPORTED:,} rows", step)
        claim = await to_thread.run_sync(self.ledger.claim_of, job.id)
        if claim is None:
            raise _unknown(job.id)
        reason, is_lasting = await self._write_report(await self.scheduler.order(claim))
        if reason and is_lasting:
            raise Problem(404, f"the job has no report: {reason}", step)
        if reason:
            raise Problem(503, f"the report cannot be written now: {reason}", "try again later", {"Retry-After": "30"})
        if await to_thread.run_sync(self.ledger.claim_of, job.id) is None:  # it was deleted meanwhile
            file.unlink(missing_ok=True)
            raise _unknown(job.id)
        return file

    async def _write_report(self, order: JobOrder) -> tuple[str, bool]:
        """Write a job's report. Return the reason why there is none, or "", and whether it is the same at the next call."""
        source, file = order.claim.source, order.context.report(order.claim.id)
        async with self._reporting:
            if await to_thread.run_sync(file.is_file):  # written for another caller meanwhile
                return "", False
            try:
                process = await start_process("report", order)
            except (OSError, EOFError) as error:
                return f"no process can be started: {error}", False
            why = f"it takes more than {_REPORT_SECONDS:g} s"
            late = asyncio.get_running_loop().call_later(_REPORT_SECONDS, process.kill, why)
            try:
                frame, ended = await process.receive(), await process.wait()
            finally:
                late.cancel()
            if frame is not None:
                return frame[0]["error"].replace(source["file"], source["name"]), frame[0]["is_lasting"]
            return ("", False) if await to_thread.run_sync(file.is_file) else (ended, bool(process.killed_for))

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
            file, digest = self.uploads.resolve(dataset.upload)
            return {"name": dataset.upload, "file": str(file), "digest": digest, "split": dataset.split}
        if dataset.path is not None:
            file, digest = resolve_path(dataset.path, self.settings)
            return {"name": dataset.path, "file": str(file), "digest": digest, "split": dataset.split, "path": dataset.path}
        assert dataset.uri is not None
        check_uri(dataset.uri, self.settings, dataset.config)
        config = {} if dataset.config is None else {"config": dataset.config}
        return {"name": hide_secrets(dataset.uri), "uri": dataset.uri, "split": dataset.split, **config}

    async def keep_house(self) -> None:
        """Delete old jobs and unneeded dataset files every hour."""
        while True:
            moment = datetime.now(UTC) - timedelta(days=self.settings.keep_days)
            try:
                await to_thread.run_sync(self._forget_before, moment)
                await to_thread.run_sync(self.datasets.collect)
            except (LedgerError, OSError) as error:
                logger.warning("old jobs and datasets could not be deleted: %s", error)
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)

    def _forget_before(self, moment: datetime) -> None:
        jobs = self.ledger.ended_before(moment)
        for job in jobs:  # its files first, so that an interrupted deletion leaves no files without a job
            self.scheduler.context.result(job).unlink(missing_ok=True)
            self.scheduler.context.report(job).unlink(missing_ok=True)
        if jobs:
            self.ledger.forget(jobs)


def _unknown(job: str) -> Problem:
    step = "GET /v1/jobs lists all jobs; ended jobs are deleted after some days (the service's setting keep_days)"
    return Problem(404, f"there is no job {job}", step)
