"""What jobs and their datasets are called on pages. Called by the templates."""

from __future__ import annotations

from urllib.parse import urlsplit

from reflogp_service.server.models import DatasetSpec, Job


def dataset_name(dataset: DatasetSpec) -> str:
    """Where the rows come from; of a URI neither the query nor who asks, for a signed one holds a secret there."""
    if dataset.uri is not None:
        parts = urlsplit(dataset.uri)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return dataset.upload or dataset.path or ""


def job_name(job: Job) -> str:
    """The title, or the dataset's last part where there is none."""
    return job.settings.title.strip() or dataset_name(job.dataset).rstrip("/").rpartition("/")[2] or job.id
