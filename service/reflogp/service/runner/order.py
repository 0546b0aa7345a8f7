"""What the service tells the process that runs a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reflogp.store import Reference


@dataclass(frozen=True)
class JobOrder:
    """A job.

    Attributes:
        model, revision: the model whose tokenizer and image processor the job uses.
        file: path of the dataset (a file or folder), with symbolic links resolved.
        digest: digest of the dataset's content.
        root: allowed root folder that contains the dataset, or None if the dataset is in the service's own folder. Other users
            may be able to write to a root folder, but not to the service's own folder.
        max_length, truncation_mode, ld_alpha: see TrainerSettings.
        result, report: paths of the job's result, which the runner writes, and of its report.
        request, traceparent: X-Request-Id and W3C trace context of the request that submitted the job, or None if unknown.
    """

    job: str
    reference: Reference
    model: str
    revision: str | None
    trust_remote_code: bool
    file: str
    digest: str
    root: str | None
    split: str
    format: str | None
    max_length: int | None
    truncation_mode: str
    ld_alpha: float | None
    top_k: int
    result: str
    report: str
    request: str | None
    traceparent: str | None


@dataclass(frozen=True)
class JobContext:
    """Settings that all jobs of a service share.

    Attributes:
        tokens: folder of the token-id cache.
        row_seconds: maximum CPU time in seconds for tokenizing one row.
    most_bytes: maximum memory of a job's process, without the process that reads the dataset.
    """

    store: str
    tokens: Path
    max_tokens_bytes: int
    row_seconds: float
    most_bytes: int
