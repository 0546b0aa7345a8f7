"""Name jobs and their datasets on pages."""

from __future__ import annotations

from reflogp.service.models import DatasetSpec, Job
from reflogp.store.safe_text import hide_secrets


def dataset_name(dataset: DatasetSpec | None) -> str:
    """Return where the rows come from. A URI is shown without user and query: a signed URI has its secrets there."""
    if dataset is None:
        return ""
    if dataset.uri is not None:
        return hide_secrets(dataset.uri).removesuffix("?…")
    return dataset.upload or dataset.path or ""


def job_name(job: Job) -> str:
    """Return the job's title. Without a title, return the last part of the dataset's name, or else the job's id."""
    return job.settings.title.strip() or dataset_name(job.dataset).rstrip("/").rpartition("/")[2] or job.id
