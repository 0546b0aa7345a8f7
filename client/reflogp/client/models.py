"""What a service accepts and returns: datasets, uploads, jobs, references, stored values and scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from reflogp.store.texts import counted, short_repr

Format: TypeAlias = Literal["preference", "kto", "sft", "tokens"]
JobState = Literal["queued", "running", "done", "failed", "cancelled"]
#: The states of a job that has ended.
FINAL_STATES: tuple[JobState, ...] = ("done", "failed", "cancelled")


@dataclass(frozen=True)
class ServicePath:
    """A dataset file or folder on the service's machine, inside a folder that the service's settings allow.

    Attributes:
        path: absolute path on that machine.
    """

    path: str


@dataclass(frozen=True)
class ServiceUri:
    """A dataset that the service downloads from a URI, if the service's settings allow this URI.

    Attributes:
        uri: URI with the scheme s3, gs, az or hf. For a dataset on the
            Hugging Face Hub, use hf://datasets/ORGANISATION/NAME for the split that is passed to `submit`, or
            hf://datasets/ORGANISATION/NAME/FILE for one file. Both forms can have @REVISION after NAME.
        config: config (subset) of a dataset on the Hub, or None for the default config.
    """

    uri: str
    config: str | None = None


@dataclass(frozen=True)
class Uploaded:
    """An uploaded dataset, identified by its name on the service.

    Attributes:
        name: name of the file on the service, as in UploadInfo.
    """

    name: str


@dataclass(frozen=True)
class UploadInfo:
    """A file that was uploaded to a service.

    Attributes:
        name: name of the file on the service.
        bytes: size of the file in bytes.
        sha256: SHA-256 digest of the file, 64 hex digits.
        uploaded_at: time of the upload, with a time zone.
    """

    name: str
    bytes: int
    sha256: str
    uploaded_at: datetime


@dataclass(frozen=True)
class JobProgress:
    """The progress of a job's latest attempt.

    Attributes:
        rows: number of rows read so far.
        sequences: total number of sequences; an estimate while the job runs, and 0 while unknown.
        done: number of finished sequences: hits, duplicates, scored sequences and failures.
        hits: number of sequences whose values were in the store.
        scored: number of sequences whose values were computed.
        bad_rows: number of rows read so far that have no values because of an error.
        tokens: number of prompt and completion tokens in the scored sequences.
        tokens_per_second: scoring rate: in the last few seconds while the job runs, in the whole run once it is done.
        seconds: number of seconds since the latest attempt began.
        seconds_left: estimated seconds left at the attempt's average rate, or None while unknown.
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

    def line(self, running: bool) -> str:
        """Describe the progress; the rate and the time left only if the job is running."""
        return (
            f"{self.done:,} of {counted(self.sequences, 'sequence')}: {counted(self.hits, 'hit')}, {self.scored:,} scored"
            + (f", {counted(self.bad_rows, 'bad row')}" if self.bad_rows else "")
            + (f"; {self.tokens_per_second:,.0f} tokens/s" if running and self.tokens else "")
            + (f", {self.seconds_left:,.0f} s left" if running and self.seconds_left is not None else "")
        )


@dataclass(frozen=True)
class Job:
    """The state of a job at one point in time.

    Attributes:
        id: id of the job, 16 hex digits.
        state: "queued", "running", "done", "failed" or "cancelled".
        reference_id: id of the reference with which the dataset is scored, 32 hex digits.
        settings: the job's reference, format, max_length, truncation_mode, ld_alpha, priority and title.
        dataset: a dict with the keys upload, path, uri, split and config. Exactly one of upload, path and uri is not None; the
            uri has no credentials and no query.
        progress: the progress of the latest attempt.
        created_at: time of the submission, with a time zone.
        note: what a queued job is waiting for, or why the job was last interrupted; None otherwise. The reason for an
            interruption is kept even if a later attempt completes the job.
        error: why the job failed, or None if it has not failed.
        summary: a dict that includes the fields that `reflogp score --json` prints, or None if the job is not done.
        started_at: start of the latest attempt, or None before the first attempt.
        finished_at: time when the job was completed, failed or was cancelled, or None if it has not ended.
        attempts: number of times that the job has been started.
        submitted_by: name of the token with which the job was first submitted.
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

    def __repr__(self) -> str:
        return short_repr(
            "Job",
            self._named(),
            self.progress.line(self.state == "running") if self.progress.sequences else "",
            f"reference {self.reference_id}" + (f", snapshot {self.summary.get('snapshot')}" if self.summary else ""),
            f"note: {self.note}" if self.note else "",
            f"error: {self.error}" if self.error else "",
        )

    def _named(self) -> str:
        scored = " with ".join(filter(None, (dataset_name(self), str(self.settings.get("reference") or ""))))
        return f"{self.id}: {self.state}" + (f", {scored}" if scored else "")

    @property
    def finished(self) -> bool:
        return self.state in FINAL_STATES

    def as_dict(self) -> dict[str, Any]:
        """Return the job as a dict that can be written as JSON."""
        return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(self).items()}


def dataset_name(job: Job) -> str:
    return next((str(job.dataset[kind]) for kind in ("upload", "path", "uri") if job.dataset.get(kind)), "")


_TIMES = ("created_at", "started_at", "finished_at")


def known(kind: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of `entry` that are fields of the dataclass `kind`: a newer service may send other items too."""
    return {one.name: entry[one.name] for one in fields(kind) if one.name in entry}


def job_from(entry: dict[str, Any]) -> Job:
    times = {name: datetime.fromisoformat(entry[name]) for name in _TIMES if entry.get(name)}
    progress = JobProgress(**known(JobProgress, entry["progress"]))
    return Job(**known(Job, entry) | times | {"progress": progress, "dataset": entry["dataset"] or {}})


@dataclass(frozen=True)
class JobPage:
    """A page of jobs, newest first.

    Attributes:
        jobs: the jobs on this page.
        counts: dict from each state to the number of jobs in this state, on all pages.
        next_before: value to pass as `before` in order to get the next page, or None on the last page.
    """

    jobs: list[Job]
    counts: dict[str, int]
    next_before: str | None


@dataclass(frozen=True)
class ReferenceInfo:
    """A reference model that is named in a service's settings, or has values in the service's store.

    Attributes:
        name: name of the reference in the service's settings, or None if only the service's store contains the reference.
        reference_id: id of the reference, 32 hex digits.
        model: name of the model's folder, or the model's hub id.
        dtype: dtype in which the model computes.
        lm_head_dtype: dtype of the model's logits.
        snapshot: number of the latest snapshot, or None if nothing is stored.
        sequences: number of stored sequences.
    """

    name: str | None
    reference_id: str
    model: str
    dtype: str
    lm_head_dtype: str
    snapshot: int | None
    sequences: int


@dataclass(frozen=True)
class Lookup:
    """The values that a store has for n keys.

    Attributes:
        lengths: number of stored values for each key, int32 of shape (n,); -1 for a miss.
        sums: sum of each key's values in nats, float64 of shape (n,), or NaN for a miss.
        token_logps: list with one item for each key: a float32 array, or None for a miss. If values were not requested,
            `token_logps` itself is None.
        reference_id: id of the reference whose values were looked up.
        snapshot: number of the snapshot in which the keys were looked up.
    """

    lengths: npt.NDArray[np.int32]
    sums: npt.NDArray[np.float64]
    token_logps: list[npt.NDArray[np.float32] | None] | None
    reference_id: str
    snapshot: int

    def __repr__(self) -> str:
        found = f"{int((self.lengths >= 0).sum()):,} of {counted(len(self.lengths), 'key')}"
        return short_repr("Lookup", f"{found} found in snapshot {self.snapshot} of reference {self.reference_id}")


@dataclass(frozen=True)
class Scores:
    """The log-probs of n sequences.

    If the sequences were sent in several requests, engine_seconds and queue_seconds are totals over these requests.

    Attributes:
        token_logps: list with one float32 array for each sequence, in the order of the request. Each array has one value per
            completion token, in nats.
        reference_id: id of the reference model that computed the values.
        hits: number of sequences whose values came from the store.
        engine_seconds: seconds from the start of the computation to its last value; 0 if all values came from the store. If the
            service computed other requests together with this one, the time can include work on them.
        queue_seconds: seconds that the request waited before its computation started, including the time to load the model.
    """

    token_logps: list[npt.NDArray[np.float32]]
    reference_id: str
    hits: int
    engine_seconds: float
    queue_seconds: float

    def __repr__(self) -> str:
        values = sum(map(len, self.token_logps))
        return short_repr(
            "Scores",
            f"{counted(len(self.token_logps), 'sequence')}, {counted(values, 'log-prob')}: {counted(self.hits, 'hit')}",
            f"{self.engine_seconds:.2f} s computing, {self.queue_seconds:.2f} s in the queue",
            f"reference {self.reference_id}",
        )
