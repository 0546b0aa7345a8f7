"""Precompute jobs and uploads: what a service says of them, and the requests about them.

Knows routes, bodies and typed results. Does not know how they are sent. Called by `client` and `events`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import IO, Any, Literal
from urllib.parse import quote

import httpx

from reflogp_client import wire
from reflogp_client.errors import JobFailedError, NotAllowedError, RequestRefusedError, ServiceFailedError
from reflogp_client.files import LocalFile

JobState = Literal["queued", "running", "done", "failed", "cancelled"]
#: States that a job does not leave by itself.
FINAL: tuple[JobState, ...] = ("done", "failed", "cancelled")
_TIMES = ("created_at", "started_at", "finished_at")


@dataclass(frozen=True)
class ServicePath:
    """A dataset file or folder on the service's machine, under a root that its settings allow."""

    path: str


@dataclass(frozen=True)
class ServiceUri:
    """A dataset that the service fetches: https://, s3://, …, where its settings allow it."""

    uri: str


@dataclass(frozen=True)
class Uploaded:
    """A dataset that was uploaded, by its name there."""

    name: str


@dataclass(frozen=True)
class UploadInfo:
    """A file that a service keeps."""

    name: str
    bytes: int
    sha256: str
    uploaded_at: datetime


@dataclass(frozen=True)
class JobProgress:
    """How far a job's latest attempt is.

    Attributes:
        rows: read so far; `bad_rows` of them have no values.
        sequences: in all, as far as can be told; 0 while nothing can.
        done: hits, scored and failed ones.
        hits: ones that needed no computing.
        scored: ones that were computed; `tokens` is their tokens.
        seconds: running so far; `seconds_left` at the present rate, None while nothing can be said.
    """

    rows: int = 0
    sequences: int = 0
    done: int = 0
    hits: int = 0
    scored: int = 0
    bad_rows: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    seconds_left: float | None = None


@dataclass(frozen=True)
class Job:
    """A job as a service knew it at one moment.

    Attributes:
        state: queued, running, done, failed or cancelled.
        settings: reference, format, max_length, truncation_mode, ld_alpha, priority, title.
        dataset: one of upload, path and uri (without its query); split. Empty for a token that may not read, where another
            token submitted the job.
        note: why the latest attempt did not end the job, or what a job in line waits for.
        error: why it failed.
        summary: what `reflogp score --json` says of a run; when it is done.
        started_at: of the latest attempt.
        attempts: times that a worker began it.
        submitted_by: name of the token that submitted it; empty like `dataset`.
        throughput: (seconds running, tokens per second) over the latest attempt.
    """

    id: str
    state: str
    reference_id: str
    settings: Mapping[str, Any]
    dataset: Mapping[str, Any]
    progress: JobProgress
    created_at: datetime
    note: str | None = None
    error: str | None = None
    summary: Mapping[str, Any] | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    attempts: int = 0
    submitted_by: str = ""
    throughput: list[tuple[float, float]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.state in FINAL

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class JobPage:
    """Some jobs, the newest first.

    Attributes:
        counts: jobs of each state, on all pages.
        next_before: the `before` of the next page; None on the last.
    """

    jobs: list[Job]
    counts: dict[str, int]
    next_before: str | None


def job_from(entry: dict[str, Any]) -> Job:
    """A job out of a service's JSON; fields that a newer service has are left out."""
    times = {name: datetime.fromisoformat(entry[name]) for name in _TIMES if entry.get(name)}
    progress = JobProgress(**wire.known(JobProgress, entry["progress"]))
    throughput = [(float(seconds), float(rate)) for seconds, rate in entry.get("throughput", [])]
    parts = {"progress": progress, "throughput": throughput, "dataset": entry["dataset"] or {}}
    return Job(**wire.known(Job, entry) | times | parts)


def job_of(response: httpx.Response) -> Job:
    return wire.parsed(response, job_from)


def page_of(response: httpx.Response) -> JobPage:
    return wire.parsed(
        response, lambda body: JobPage([job_from(entry) for entry in body["jobs"]], body["counts"], body["next_before"])
    )


def report_of(response: httpx.Response) -> dict[str, Any]:
    return wire.parsed(response, dict)


def checked(job: Job, check: bool) -> Job:
    """The job. Raises JobFailedError where it shall be done and is not."""
    if check and job.state != "done":
        raise JobFailedError(job)
    return job


def job_call(job: str) -> wire.Call:
    return wire.Call("GET", _path(job))


def jobs_call(state: str | None, before: str | None, limit: int) -> wire.Call:
    asked = {"state": state, "before": before, "limit": limit}
    return wire.Call("GET", "/v1/jobs", {name: value for name, value in asked.items() if value is not None})


def events_call(job: str, wait: float) -> wire.Call:
    """The stream of a job's changes; `wait`: seconds of silence after which it is given up."""
    return wire.Call("GET", _path(job, "/events"), headers={"accept": "text/event-stream"}, wait=wait)


def report_call(job: str) -> wire.Call:
    return wire.Call("GET", _path(job, "/report"))


def result_call(job: str, into: IO[bytes]) -> wire.Call:
    # Not compressed on the way, so that the announced length is the file's.
    return wire.Call("GET", _path(job, "/result"), headers={"accept-encoding": "identity"}, into=into)


def retry_call(job: str) -> wire.Call:
    # Not sent again once the service may have seen it: somebody may have cancelled the job since.
    return wire.Call("POST", _path(job, "/retry"), again=wire.NOT_SENT)


def submit_call(
    dataset: ServicePath | ServiceUri | Uploaded, split: str, idempotency_key: str | None, **settings: Any
) -> wire.Call:
    """A job with `settings` as the service names them; None is left to its default.

    Safe to repeat, with or without a key: the service knows a job by what its dataset holds, its reference and its settings.
    """
    match dataset:
        case ServicePath(path):
            where = {"path": path}
        case ServiceUri(uri):
            where = {"uri": uri}
        case Uploaded(name):
            where = {"upload": name}
    asked = {name: value for name, value in settings.items() if value is not None} | {"dataset": where | {"split": split}}
    headers = {} if idempotency_key is None else {"idempotency-key": idempotency_key}
    headers["content-type"] = "application/json"
    return wire.Call("POST", "/v1/jobs", content=json.dumps(asked).encode(), headers=headers)


def cancelling(job: str) -> wire.Plan[Job]:
    """The job, cancelled or about to be. Safe to repeat: one that is cancelled already is what was asked for."""
    try:
        return job_of((yield wire.Call("DELETE", _path(job))))
    except RequestRefusedError as error:
        if error.status != 409:
            raise
        found = job_of((yield job_call(job)))
        if found.state != "cancelled":
            raise
        return found


def uploading(file: LocalFile) -> wire.Plan[UploadInfo]:
    """The file on the service; sent only where it is not there yet. Safe to repeat: the name gets the same content."""
    path = f"/v1/uploads/{quote(file.name, safe='')}"
    try:
        there = _upload_of((yield wire.Call("GET", path)))
    except (RequestRefusedError, NotAllowedError) as error:
        if error.status not in (403, 404):  # a token may be allowed to send and not to look
            raise
    else:
        if (there.bytes, there.sha256) == (file.size, file.sha256):
            if file.progress is not None:
                file.progress(file.size, file.size)
            return there
    headers = {"content-type": "application/octet-stream", "content-length": str(file.size)}
    sent = _upload_of((yield wire.Call("PUT", path, content=file, headers=headers)))
    if sent.sha256 != file.sha256:
        raise ServiceFailedError(f"{file.path} arrived with another digest ({sent.sha256}, not {file.sha256}); send it again")
    return sent


def _upload_of(response: httpx.Response) -> UploadInfo:
    def read(entry: dict[str, Any]) -> UploadInfo:
        return UploadInfo(**wire.known(UploadInfo, entry) | {"uploaded_at": datetime.fromisoformat(entry["uploaded_at"])})

    return wire.parsed(response, read)


def _path(job: str, more: str = "") -> str:
    return f"/v1/jobs/{quote(job, safe='')}{more}"
