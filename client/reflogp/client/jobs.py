"""Read jobs and uploads from a service's JSON, and describe datasets as the service does."""

from __future__ import annotations

import re
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from reflogp.client import protocol
from reflogp.client.files import is_dataset_name
from reflogp.client.models import Job, JobPage, JobProgress, ReferenceInfo, ServicePath, ServiceUri, Uploaded, UploadInfo

#: Pattern of "ORGANISATION/NAME", the name of a dataset on the Hugging Face Hub. It does not match paths that begin with a
#: dot, such as ./data.
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)
_TIMES = ("created_at", "started_at", "finished_at")


def _known(kind: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the items of `entry` that are fields of the dataclass `kind`: a newer service may send other items too."""
    return {one.name: entry[one.name] for one in fields(kind) if one.name in entry}


def job_from(entry: dict[str, Any]) -> Job:
    times = {name: datetime.fromisoformat(entry[name]) for name in _TIMES if entry.get(name)}
    progress = JobProgress(**_known(JobProgress, entry["progress"]))
    return Job(**_known(Job, entry) | times | {"progress": progress, "dataset": entry["dataset"] or {}})


def job_of(response: httpx.Response) -> Job:
    return protocol.parsed(response, job_from)


def page_of(response: httpx.Response) -> JobPage:
    return protocol.parsed(
        response, lambda body: JobPage([job_from(entry) for entry in body["jobs"]], body["counts"], body["next_before"])
    )


def upload_of(response: httpx.Response) -> UploadInfo:
    return protocol.parsed(
        response,
        lambda entry: UploadInfo(**_known(UploadInfo, entry) | {"uploaded_at": datetime.fromisoformat(entry["uploaded_at"])}),
    )


def references_of(response: httpx.Response) -> list[ReferenceInfo]:
    return protocol.parsed(
        response, lambda body: [ReferenceInfo(**_known(ReferenceInfo, entry)) for entry in body["references"]]
    )


def path(job: str, more: str = "") -> str:
    return f"/v1/jobs/{quote(job, safe='')}{more}"


def on_hub(dataset: str | Path) -> ServiceUri | None:
    """Return the URI of the dataset on the Hugging Face Hub if `dataset` has the form "ORGANISATION/NAME", or None.

    Existing files and folders on this machine, and names with a dataset file's suffix, come first, as in `reflogp score`.
    """
    if not isinstance(dataset, str) or not _HUB_NAME.fullmatch(dataset) or is_dataset_name(dataset):
        return None
    return None if Path(dataset).exists() else ServiceUri(f"hf://datasets/{dataset}")


def described(dataset: ServicePath | ServiceUri | Uploaded) -> dict[str, str]:
    """Return the dataset as the body of POST /v1/jobs names it."""
    match dataset:
        case ServicePath(where):
            return {"path": where}
        case ServiceUri(uri, config):
            return {"uri": uri} | ({} if config is None else {"config": config})
        case Uploaded(name):
            return {"upload": name}
