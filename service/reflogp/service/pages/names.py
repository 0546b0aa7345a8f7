"""What jobs and their datasets are called on pages. Called by the templates."""

from __future__ import annotations

from reflogp.service.models import DatasetSpec, Job
from reflogp.store.safe_text import hide_secrets


def dataset_name(dataset: DatasetSpec | None) -> str:
    """Where the rows come from; of a URI neither the user nor the query, where a signed one has its secrets."""
    if dataset is None:
        return ""
    if dataset.uri is not None:
        return hide_secrets(dataset.uri).removesuffix("?…")
    return dataset.upload or dataset.path or ""


def job_name(job: Job) -> str:
    """The title, or the dataset's last part where there is none."""
    return job.settings.title.strip() or dataset_name(job.dataset).rstrip("/").rpartition("/")[2] or job.id
