"""Build the requests for scoring jobs and uploads, and parse the service's responses, without sending anything."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import httpx

from reflogp.client import protocol
from reflogp.client.errors import JobFailedError, NotAllowedError, RequestRefusedError, ServiceFailedError
from reflogp.client.files import LocalFile, is_dataset_name
from reflogp.client.models import Job, JobPage, JobProgress, JobSettings, ServicePath, ServiceUri, Uploaded, UploadInfo

#: Pattern of "ORGANISATION/NAME", the name of a dataset on the Hugging Face Hub. It does not match paths that begin with a
#: dot, such as ./data.
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)
_TIMES = ("created_at", "started_at", "finished_at")


def job_from(entry: dict[str, Any]) -> Job:
    """Parse a job from a service's JSON; unknown fields from a newer service are ignored."""
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
    """Return the job unchanged, or raise JobFailedError if `check` is True and the job is not done."""
    if check and job.state != "done":
        raise JobFailedError(job)
    return job


def job_call(job: str) -> protocol.Call:
    return protocol.Call("GET", _path(job))


def jobs_call(state: str | None, before: str | None, limit: int) -> protocol.Call:
    asked = {"state": state, "before": before, "limit": limit}
    return protocol.Call("GET", "/v1/jobs", {name: value for name, value in asked.items() if value is not None})


def events_call(job: str, wait: float) -> protocol.Call:
    """Return the request for a job's event stream. The request fails if no byte arrives for `wait` seconds."""
    return protocol.Call("GET", _path(job, "/events"), headers={"accept": "text/event-stream"}, wait=wait)


def report_call(job: str) -> protocol.Call:
    return protocol.Call("GET", _path(job, "/report"))


def result_call(job: str, into: IO[bytes]) -> protocol.Call:
    # The response is not compressed, so that Content-Length is the length of the file.
    return protocol.Call("GET", _path(job, "/result"), headers={"accept-encoding": "identity"}, into=into)


def retry_call(job: str) -> protocol.Call:
    # The request is not sent again if the service may have seen it. If somebody has cancelled the job since then, a second
    # request would queue the job again.
    return protocol.Call("POST", _path(job, "/retry"), again=protocol.NOT_SENT)


def check_settings(settings: JobSettings) -> None:
    """Raise TypeError if `settings` contains a name that is not a job setting.

    Clients call this before they upload a dataset, so that a misspelled setting is reported at once.
    """
    if unknown := settings.keys() - JobSettings.__annotations__.keys():
        raise TypeError(
            f"unknown job setting{'s' * (len(unknown) > 1)} {', '.join(sorted(unknown))}; "
            f"choose from {', '.join(JobSettings.__annotations__)}"
        )


def on_hub(dataset: str | Path) -> ServiceUri | None:
    """Return the URI of the dataset on the Hugging Face Hub if `dataset` has the form "ORGANISATION/NAME"; otherwise, None.

    Also returns None if NAME ends in the suffix of a dataset file, or if `dataset` is the path of an existing file or folder on
    this machine. Local files and folders take precedence, as in `reflogp score`.
    """
    if not isinstance(dataset, str) or not _HUB_NAME.fullmatch(dataset) or is_dataset_name(dataset):
        return None
    return None if Path(dataset).exists() else ServiceUri(f"hf://datasets/{dataset}")


def submit_call(
    dataset: ServicePath | ServiceUri | Uploaded,
    reference: str,
    split: str,
    idempotency_key: str | None,
    settings: JobSettings,
) -> protocol.Call:
    """Return the request that submits a job.

    The request is safe to repeat: the service recognizes the job by `idempotency_key` or, if that is None, by its reference,
    its settings (except priority and title), and its dataset's content or URI.
    """
    where: dict[str, str]
    match dataset:
        case ServicePath(path):
            where = {"path": path}
        case ServiceUri(uri, config):
            where = {"uri": uri} | ({} if config is None else {"config": config})
        case Uploaded(name):
            where = {"upload": name}
    given = {name: value for name, value in settings.items() if value is not None}
    asked = {"reference": reference, **given, "dataset": where | {"split": split}}
    headers = {} if idempotency_key is None else {"idempotency-key": idempotency_key}
    headers["content-type"] = "application/json"
    return protocol.Call("POST", "/v1/jobs", content=json.dumps(asked).encode(), headers=headers)


def cancel_plan(job: str) -> protocol.Plan[Job]:
    """Cancel a job, and return the Job that the service reports. If the job was running, it may not have stopped yet.

    The call is safe to repeat: a job that is already cancelled is returned unchanged.
    """
    try:
        return job_of((yield protocol.Call("DELETE", _path(job))))
    except RequestRefusedError as error:
        if error.status != 409:
            raise
        found = job_of((yield job_call(job)))
        if found.state != "cancelled":
            raise
        return found


def upload_plan(file: LocalFile) -> protocol.Plan[UploadInfo]:
    """Upload the file unless the service already has it, and return the file's UploadInfo.

    The upload is safe to repeat: the same content is stored under the same name. Raises ServiceFailedError if the file arrived
    damaged.
    """
    path = f"/v1/uploads/{quote(file.name, safe='')}"
    try:
        there = _upload_of((yield protocol.Call("GET", path)))
    except (RequestRefusedError, NotAllowedError) as error:
        if error.status not in (403, 404):  # a token may have permission to upload but not to read
            raise
    else:
        if (there.bytes, there.sha256) == (file.size, file.sha256):
            if file.progress is not None:
                file.progress(file.size, file.size)
            return there
    headers = {"content-type": "application/octet-stream", "content-length": str(file.size)}
    sent = _upload_of((yield protocol.Call("PUT", path, content=file, headers=headers)))
    if sent.sha256 != file.sha256:
        raise ServiceFailedError(
            f"{file.path} arrived with the sha256 digest {sent.sha256} instead of {file.sha256}; upload the file again"
        )
    return sent


def _upload_of(response: httpx.Response) -> UploadInfo:
    def read(entry: dict[str, Any]) -> UploadInfo:
        return UploadInfo(**protocol.known(UploadInfo, entry) | {"uploaded_at": datetime.fromisoformat(entry["uploaded_at"])})

    return protocol.parsed(response, read)


def _path(job: str, more: str = "") -> str:
    return f"/v1/jobs/{quote(job, safe='')}{more}"
