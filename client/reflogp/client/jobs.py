"""Precompute jobs and uploads: what a service says of them, and the requests about them.

Knows routes, bodies and typed results. Does not know how they are sent. Called by `client` and `events`.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import IO, Any
from urllib.parse import quote

import httpx

from reflogp.client import protocol
from reflogp.client.errors import JobFailedError, NotAllowedError, RequestRefusedError, ServiceFailedError
from reflogp.client.files import LocalFile
from reflogp.client.models import Job, JobPage, JobProgress, ServicePath, ServiceUri, Uploaded, UploadInfo

_TIMES = ("created_at", "started_at", "finished_at")


def job_from(entry: dict[str, Any]) -> Job:
    """A job out of a service's JSON; fields that a newer service has are left out."""
    times = {name: datetime.fromisoformat(entry[name]) for name in _TIMES if entry.get(name)}
    progress = JobProgress(**protocol.known(JobProgress, entry["progress"]))
    throughput = [(float(seconds), float(rate)) for seconds, rate in entry.get("throughput", [])]
    parts = {"progress": progress, "throughput": throughput, "dataset": entry["dataset"] or {}}
    return Job(**protocol.known(Job, entry) | times | parts)


def job_of(response: httpx.Response) -> Job:
    return protocol.parsed(response, job_from)


def page_of(response: httpx.Response) -> JobPage:
    return protocol.parsed(
        response, lambda body: JobPage([job_from(entry) for entry in body["jobs"]], body["counts"], body["next_before"])
    )


def report_of(response: httpx.Response) -> dict[str, Any]:
    return protocol.parsed(response, dict)


def checked(job: Job, check: bool) -> Job:
    """The job. Raises JobFailedError where it shall be done and is not."""
    if check and job.state != "done":
        raise JobFailedError(job)
    return job


def job_call(job: str) -> protocol.Call:
    return protocol.Call("GET", _path(job))


def jobs_call(state: str | None, before: str | None, limit: int) -> protocol.Call:
    asked = {"state": state, "before": before, "limit": limit}
    return protocol.Call("GET", "/v1/jobs", {name: value for name, value in asked.items() if value is not None})


def events_call(job: str, wait: float) -> protocol.Call:
    """The stream of a job's changes; `wait`: seconds of silence after which it is given up."""
    return protocol.Call("GET", _path(job, "/events"), headers={"accept": "text/event-stream"}, wait=wait)


def report_call(job: str) -> protocol.Call:
    return protocol.Call("GET", _path(job, "/report"))


def result_call(job: str, into: IO[bytes]) -> protocol.Call:
    # Not compressed on the way, so that the announced length is the file's.
    return protocol.Call("GET", _path(job, "/result"), headers={"accept-encoding": "identity"}, into=into)


def retry_call(job: str) -> protocol.Call:
    # Not sent again once the service may have seen it: somebody may have cancelled the job since.
    return protocol.Call("POST", _path(job, "/retry"), again=protocol.NOT_SENT)


def submit_call(
    dataset: ServicePath | ServiceUri | Uploaded, split: str, idempotency_key: str | None, **settings: Any
) -> protocol.Call:
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
    return protocol.Call("POST", "/v1/jobs", content=json.dumps(asked).encode(), headers=headers)


def cancelling(job: str) -> protocol.Plan[Job]:
    """The job, cancelled or about to be. Safe to repeat: one that is cancelled already is what was asked for."""
    try:
        return job_of((yield protocol.Call("DELETE", _path(job))))
    except RequestRefusedError as error:
        if error.status != 409:
            raise
        found = job_of((yield job_call(job)))
        if found.state != "cancelled":
            raise
        return found


def uploading(file: LocalFile) -> protocol.Plan[UploadInfo]:
    """The file on the service; sent only where it is not there yet. Safe to repeat: the name gets the same content."""
    path = f"/v1/uploads/{quote(file.name, safe='')}"
    try:
        there = _upload_of((yield protocol.Call("GET", path)))
    except (RequestRefusedError, NotAllowedError) as error:
        if error.status not in (403, 404):  # a token may be allowed to send and not to look
            raise
    else:
        if (there.bytes, there.sha256) == (file.size, file.sha256):
            if file.progress is not None:
                file.progress(file.size, file.size)
            return there
    headers = {"content-type": "application/octet-stream", "content-length": str(file.size)}
    sent = _upload_of((yield protocol.Call("PUT", path, content=file, headers=headers)))
    if sent.sha256 != file.sha256:
        raise ServiceFailedError(f"{file.path} arrived with another digest ({sent.sha256}, not {file.sha256}); send it again")
    return sent


def _upload_of(response: httpx.Response) -> UploadInfo:
    def read(entry: dict[str, Any]) -> UploadInfo:
        return UploadInfo(**protocol.known(UploadInfo, entry) | {"uploaded_at": datetime.fromisoformat(entry["uploaded_at"])})

    return protocol.parsed(response, read)


def _path(job: str, more: str = "") -> str:
    return f"/v1/jobs/{quote(job, safe='')}{more}"
