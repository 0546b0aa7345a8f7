"""What a service says of jobs and uploads, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal

JobState = Literal["queued", "running", "done", "failed", "cancelled"]
#: States that a job does not leave by itself.
FINAL: tuple[JobState, ...] = ("done", "failed", "cancelled")


@dataclass(frozen=True)
class ServicePath:
    """A dataset file or folder on the service's machine, under a root that its settings allow."""

    path: str


@dataclass(frozen=True)
class ServiceUri:
    """A dataset that the service fetches: https://, s3://, …, where its settings allow it."""

    uri: str


@dataclass(frozen=True)
class Uploaded:
    """A dataset that was uploaded, by its name there."""

    name: str


@dataclass(frozen=True)
class UploadInfo:
    """A file that a service keeps."""

    name: str
    bytes: int
    sha256: str
    uploaded_at: datetime


@dataclass(frozen=True)
class JobProgress:
    """How far a job's latest attempt is.

    Attributes:
        rows: read so far; `bad_rows` of them have no values.
        sequences: in all, as far as can be told; 0 while nothing can.
        done: hits, scored and failed ones.
        hits: ones that needed no computing.
        scored: ones that were computed; `tokens` is their tokens.
        seconds: running so far; `seconds_left` at the present rate, None while nothing can be said.
    """

    rows: int = 0
    sequences: int = 0
    done: int = 0
    hits: int = 0
    scored: int = 0
    bad_rows: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    seconds_left: float | None = None


@dataclass(frozen=True)
class Job:
    """A job as a service knew it at one moment.

    Attributes:
        state: queued, running, done, failed or cancelled.
        settings: reference, format, max_length, truncation_mode, ld_alpha, priority, title.
        dataset: one of upload, path and uri (without its query); split. Empty for a token that may not read, where another
            token submitted the job.
        note: why the latest attempt did not end the job, or what a job in line waits for.
        error: why it failed.
        summary: what `reflogp score --json` says of a run; when it is done.
        started_at: of the latest attempt.
        attempts: times that a worker began it.
        submitted_by: name of the token that submitted it; empty like `dataset`.
        throughput: (seconds running, tokens per second) over the latest attempt.
    """

    id: str
    state: str
    reference_id: str
    settings: Mapping[str, Any]
    dataset: Mapping[str, Any]
    progress: JobProgress
    created_at: datetime
    note: str | None = None
    error: str | None = None
    summary: Mapping[str, Any] | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    attempts: int = 0
    submitted_by: str = ""
    throughput: list[tuple[float, float]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.state in FINAL

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class JobPage:
    """Some jobs, the newest first.

    Attributes:
        counts: jobs of each state, on all pages.
        next_before: the `before` of the next page; None on the last.
    """

    jobs: list[Job]
    counts: dict[str, int]
    next_before: str | None
