"""What the service tells the process that runs a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reflogp.service.models import JobSettings
from reflogp.service.settings import ReferenceSettings
from reflogp.store import Reference


@dataclass(frozen=True)
class Claim:
    """A job, as the ledger knows it."""

    id: str
    settings: JobSettings
    source: dict[str, str]  # where its dataset is; see Submission
    reference_id: str
    priority: int
    request: str | None = None  # X-Request-Id and W3C trace context of the last submission that queued the job
    traceparent: str | None = None


@dataclass(frozen=True)
class JobContext:
    """Settings that all jobs of a service share."""

    store: str
    results: Path  # folder for results and reports
    tokens: Path  # folder of the token-id cache
    max_tokens_bytes: int
    row_seconds: float  # maximum CPU time for tokenizing one row
    most_bytes: int  # maximum memory of a job's process, without the process that reads the dataset

    def result(self, job_id: str) -> Path:
        """Return the path of a job's result.

        The runner writes the file at the end of the job, and only if at least one row of the dataset could be read.
        """
        return self.results / f"{job_id}.parquet"

    def report(self, job_id: str) -> Path:
        return self.results / f"{job_id}.report.html"


@dataclass(frozen=True)
class JobOrder:
    """A job, with what else its process needs."""

    claim: Claim
    reference: Reference
    model: ReferenceSettings  # has the job's tokenizer; several references can have the same weights, and so the same id
    root: str | None  # allowed folder that contains the dataset; None if it is in the service's own folder
    context: JobContext
