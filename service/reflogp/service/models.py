"""Define the JSON of the HTTP API for jobs, their reports, and uploads. The OpenAPI document is made from these models."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from reflogp.store.texts import hide_secrets
from reflogp.store.windows import TruncationMode

#: A queued or running job ends in one of the other states. A failed or cancelled job can be queued again (retry).
JobState = Literal["queued", "running", "done", "failed", "cancelled"]
JOB_STATES: tuple[JobState, ...] = get_args(JobState)
UNFINISHED: tuple[JobState, ...] = ("queued", "running")

#: A name in a URL or a folder: no slash, no leading dot.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
#: The suffix of an upload's name says its format; text formats may be compressed.
UPLOAD_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,180}\.((jsonl|ndjson|json|csv)(\.(gz|bz2|zst|lz4))?|parquet|arrow|feather)$"


def _one_source(schema: dict[str, Any]) -> None:
    """State in DatasetSpec's JSON schema that exactly one of its sources is given, and that only a URI has a config."""
    names = ("upload", "path", "uri")
    absent = {"type": "null"}
    others = dict.fromkeys(names, absent)
    schema["oneOf"] = [
        {
            "required": [name],
            "properties": {**others, name: {"type": "string"}, **({} if name == "uri" else {"config": absent})},
        }
        for name in names
    ]


class DatasetSpec(BaseModel):
    """Where a job's rows come from: exactly one of upload, path and uri."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_one_source)
    upload: Name | None = Field(None, description="Name of an upload (PUT /v1/uploads/NAME).")
    path: str | None = Field(
        None, pattern="^/", max_length=4096, description="File or folder on the service's machine, under an allowed root."
    )
    uri: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9+.-]*://",
        max_length=4096,
        description="https://, s3://, hf://datasets/ORGANISATION/NAME (or a file of it), where the settings allow it.",
    )
    split: str = Field(
        "train", max_length=200, description="Split of a saved DatasetDict or of hf://datasets/ORGANISATION/NAME."
    )
    config: str | None = Field(
        None, max_length=200, description="Config (subset) of hf://datasets/ORGANISATION/NAME; None for its default."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> DatasetSpec:
        if sum(source is not None for source in (self.upload, self.path, self.uri)) != 1:
            raise ValueError("name the dataset by exactly one of upload, path and uri")
        if self.config is not None and self.uri is None:
            raise ValueError("only a dataset of the Hub has configs: give its uri, hf://datasets/ORGANISATION/NAME")
        return self


class JobSettings(BaseModel):
    """How a job reads its dataset. Settings that a trainer also has are named as in the trainer's config."""

    model_config = ConfigDict(extra="forbid")
    reference: str = Field(min_length=1, max_length=200, description="Name of a reference of this service, or its id.")
    format: Literal["preference", "kto", "tokens"] | None = Field(None, description="None: detected from the columns.")
    max_length: int | None = Field(None, ge=1, le=2**31 - 1, description="Tokens of prompt and completion together.")
    truncation_mode: TruncationMode = Field("keep_start", description="Which end a longer sequence keeps.")
    ld_alpha: float | None = Field(None, ge=0, le=1, description="LD-DPO's weight of a pair's longer tail, in the result.")
    priority: int = Field(0, ge=-100, le=100, description="Jobs of higher priority run first, and interrupt lower ones.")
    title: str = Field("", max_length=200, description="A label for people.")


class JobRequest(JobSettings):
    """A precompute job: a dataset to score with a reference."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"reference": "sft", "dataset": {"upload": "pairs.jsonl"}, "max_length": 1024}]},
    )
    dataset: DatasetSpec = Field(description="What to score.")


class JobProgress(BaseModel):
    """Progress of a job. A sequence counts as done when it is a hit, was scored, or failed."""

    rows: int = Field(0, description="Rows read so far, in this attempt.")
    sequences: int = Field(0, description="Total number of sequences, as far as it is known.")
    done: int = Field(0, description="Sequences that were hits, were scored or failed.")
    hits: int = Field(
        0, description="Sequences that needed no computing: the store had them, or they occur twice in the dataset."
    )
    scored: int = Field(0, description="Sequences that were computed.")
    bad_rows: int = Field(0, description="Rows without values so far; the result says why.")
    tokens: int = Field(0, description="Tokens of the scored sequences.")
    tokens_per_second: float = Field(0.0, description="Tokens of the scored sequences, divided by the time spent scoring.")
    seconds: float = Field(0.0, description="Seconds that this attempt has been running.")
    seconds_left: float | None = Field(None, description="Seconds left at the current rate; None while it is unknown.")


class Job(BaseModel):
    """A job: what was submitted, its state, its progress, and how it ended."""

    id: str = Field(description="Identifies the job in all other routes.")
    state: JobState = Field(description="queued, running, done, failed or cancelled.")
    settings: JobSettings = Field(description="As submitted.")
    dataset: DatasetSpec | None = Field(
        description="As submitted, without the query of a URI. None if the caller's token may not read and did not submit it."
    )
    reference_id: str = Field(description="Digest of the model's content and numerics.")
    submitted_by: str = Field(description="Name of the token that submitted it; empty if dataset is None.")
    created_at: datetime = Field(description="When it was submitted first.")
    started_at: datetime | None = Field(None, description="When the latest attempt began.")
    finished_at: datetime | None = Field(None, description="When it was done, failed or cancelled.")
    attempts: int = Field(0, description="How many times a worker has begun it.")
    progress: JobProgress = Field(description="Progress of its latest attempt.")
    throughput: list[tuple[float, float]] = Field(
        default_factory=list, description="(seconds running, tokens per second) over the latest attempt, at most 200 points."
    )
    note: str | None = Field(None, description="Why the latest attempt did not end the job, or what a queued job waits for.")
    error: str | None = Field(None, description="Why it failed.")
    summary: dict[str, Any] | None = Field(None, description="Of a done job: counts, as `reflogp score --json` prints them.")

    @field_validator("dataset")
    @classmethod
    def _hide_signature(cls, dataset: DatasetSpec | None) -> DatasetSpec | None:
        """Hide the secrets of a URI, since every token that may read sees the job. The fetch uses the full URI."""
        if dataset is None or dataset.uri is None:
            return dataset
        return dataset.model_copy(update={"uri": hide_secrets(dataset.uri)})

    @field_validator("note", "error")
    @classmethod
    def _hide_secrets(cls, text: str | None) -> str | None:
        return None if text is None else hide_secrets(text)

    def for_stranger(self, asked: JobRequest | None = None) -> Job:
        """Return the job for a token that may not read and did not submit it: its progress, and what this token submitted."""
        settings = self.settings.model_copy(update={"title": "", "priority": 0})
        return self.model_copy(
            update={
                "settings": settings if asked is None else JobSettings(**asked.model_dump(exclude={"dataset"})),
                "dataset": None if asked is None else self._hide_signature(asked.dataset),
                "submitted_by": "",
                "note": None,
                "error": None,
                "summary": None,
                "throughput": [],
            }
        )


class Jobs(BaseModel):
    """A page of jobs, newest first."""

    jobs: list[Job] = Field(description="The newest first.")
    counts: dict[JobState, int] = Field(description="Number of jobs in each state, over all pages.")
    next_before: str | None = Field(description="Value of `before` for the next page; None on the last page.")


class Histogram(BaseModel):
    """Counts between edges: len(edges) == len(counts) + 1."""

    edges: list[float] = Field(description="Edges of the bars, ascending.")
    counts: list[int] = Field(description="Number of values between each edge and the next.")


class Outlier(BaseModel):
    """A row that stands out, with its text."""

    row: int = Field(description="Its number in the dataset, from 0.")
    why: str = Field(description="What stands out.")
    value: float = Field(description="The number that stands out: a mean log-prob per token, or a margin; nats.")
    prompt: str = Field(description="Text of its prompt, shortened.")
    completions: dict[str, str] = Field(description="Column (chosen, rejected, completion) -> text.")
    images: list[str] = Field(
        default_factory=list, description="Small copies of its first two images, as data URIs of PNG files; empty for text."
    )


class RowProblem(BaseModel):
    """A row without values."""

    row: int = Field(description="Its number in the dataset, from 0.")
    error: str = Field(description="Why it has no values.")


class Report(BaseModel):
    """A report on the values of a done job."""

    histograms: dict[str, Histogram] = Field(
        description="chosen, rejected (or completion): mean log-prob per token, nats; margin: chosen sum minus rejected sum."
    )
    outliers: list[Outlier] = Field(description="Up to four rows of each kind.")
    bad_rows: list[RowProblem] = Field(description="The first hundred bad rows; the result has all.")
    dropped_rows: int = Field(description="Rows that training drops too: the prompt alone fills max_length.")


class Upload(BaseModel):
    """A dataset file that was uploaded."""

    name: str = Field(description="Name by which a job refers to it.")
    bytes: int = Field(description="Its size.")
    sha256: str = Field(description="Its digest.")
    uploaded_at: datetime = Field(description="When it was complete.")


class Uploads(BaseModel):
    """All uploads."""

    uploads: list[Upload] = Field(description="Sorted by name.")
