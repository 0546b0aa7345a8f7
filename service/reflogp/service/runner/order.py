"""What the service tells the process that runs a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reflogp.service.models import JobSettings
from reflogp.service.settings import ReferenceSettings
from reflogp.store import Reference


@dataclass(frozen=True)
class Claim:
    """A job, as the ledger knows it.

    Attributes:
        source: where its dataset is; see Submission.
        request, traceparent: X-Request-Id and W3C trace context of the last submission that queued the job.
    """

    id: str
    settings: JobSettings
    source: dict[str, str]
    reference_id: str
    priority: int
    request: str | None = None
    traceparent: str | None = None


@dataclass(frozen=True)
class JobContext:
    """Settings that all jobs of a service share.

    Attributes:
        results: folder for results and reports.
        tokens: folder of the token-id cache.
        row_seconds: maximum CPU time in seconds for tokenizing one row.
        most_bytes: maximum memory of a job's process, without the process that reads the dataset.
    """

    store: str
    results: Path
    tokens: Path
    max_tokens_bytes: int
    row_seconds: float
    most_bytes: int

    def result(self, job_id: str) -> Path:
        """Return the path of a job's result.

        The runner writes the file at the end of the job, and only if at least one row of the dataset could be read.
        """
        return self.results / f"{job_id}.parquet"

    def report(self, job_id: str) -> Path:
        return self.results / f"{job_id}.report.html"


@dataclass(frozen=True)
class JobOrder:
    """A job, with what else its process needs.

    Attributes:
        model: the model whose tokenizer and image processor the job uses. Several references in the settings can have the same
            weights, and so the same id, with different tokenizers.
        root: allowed root folder that contains the dataset, or None if the dataset is in the service's own folder. Other users
            may be able to write to a root folder, but not to the service's own folder.
    """

    claim: Claim
    reference: Reference
    model: ReferenceSettings
    root: str | None
    context: JobContext
