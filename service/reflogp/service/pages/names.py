"""Names of jobs and datasets on the web pages."""

from __future__ import annotations

from reflogp.service.models import DatasetSpec, Job
from reflogp.store.texts import hide_secrets


def dataset_name(dataset: DatasetSpec | None) -> str:
    """Return the location of a dataset (its URI, upload name or path), or an empty string if `dataset` is None.

    The user name, password, query and fragment of a URI are removed, because they may contain secrets.
    """
    if dataset is None:
        return ""
    if dataset.uri is not None:
        return hide_secrets(dataset.uri).removesuffix("?…")
    return dataset.upload or dataset.path or ""


def job_name(job: Job) -> str:
    """Return the name that pages show for a job: its title, else the last part of its dataset's location, else its id."""
    return job.settings.title.strip() or dataset_name(job.dataset).rstrip("/").rpartition("/")[2] or job.id
