"""Define the JSON models of the HTTP API for jobs and uploads.

The OpenAPI document is generated from these models.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from reflogp.store.texts import hide_secrets
from reflogp.store.windows import TruncationMode

#: The final states are done, failed and cancelled. A failed or cancelled job can be queued again (retry).
JobState = Literal["queued", "running", "done", "failed", "cancelled"]
JOB_STATES: tuple[JobState, ...] = get_args(JobState)
UNFINISHED: tuple[JobState, ...] = ("queued", "running")

#: Pattern of names that are safe in URLs and as file names. They contain no slash and do not begin with a dot.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
_WithoutSecrets = Annotated[str, AfterValidator(hide_secrets)]
#: Pattern of the names of uploads. The suffix determines the format. Text formats may be compressed.
UPLOAD_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,180}\.((jsonl|ndjson|json|csv)(\.(gz|bz2|zst|lz4))?|parquet|arrow|feather)$"


def _one_source(schema: dict[str, Any]) -> None:
    """Add two rules to DatasetSpec's JSON schema: exactly one of upload, path and uri is required; config requires uri."""
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
    """The dataset of a job, given by exactly one of upload, path and uri."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_one_source)
    upload: Name | None = Field(None, description="Name of an upload (PUT /v1/uploads/NAME).")
    path: str | None = Field(
        None,
        pattern="^/",
        max_length=4096,
        description="Path of a file or folder on the service's machine, inside a folder that the setting dataset_roots lists.",
    )
    uri: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9+.-]*://",
        max_length=4096,
        description="URI of the dataset (s3://…, gs://…, az://… or hf://datasets/ORGANISATION/NAME). The setting dataset_uris "
        "must allow it.",
    )
    split: str = Field(
        "train", max_length=200, description="Split to score, for a saved DatasetDict or hf://datasets/ORGANISATION/NAME."
    )
    config: str | None = Field(
        None,
        max_length=200,
        description="Config (subset) of hf://datasets/ORGANISATION/NAME. If null, the default config is used.",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> DatasetSpec:
        if sum(source is not None for source in (self.upload, self.path, self.uri)) != 1:
            raise ValueError("set exactly one of `upload`, `path` and `uri`")
        if self.config is not None and self.uri is None:
            raise ValueError(
                "only a dataset on the Hub has configs: to use `config`, set `uri` to hf://datasets/ORGANISATION/NAME"
            )
        return self


class JobOptions(BaseModel):
    """The settings of a job that have defaults. Those that also exist in the configs of TRL's trainers have the same names."""

    format: Literal["preference", "kto", "sft", "tokens"] | None = Field(
        None, description="Format of the rows. If null, the format is detected from the columns."
    )
    max_length: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="Maximum total number of tokens in a prompt and its completion. Longer sequences are truncated. If null,"
        " there is no maximum.",
    )
    truncation_mode: TruncationMode = Field(
        "keep_start", description="Which end of a sequence to keep when it is truncated to max_length."
    )
    ld_alpha: float | None = Field(
        None,
        ge=0,
        le=1,
        description="LD-DPO weight for the log-prob sums in the result. In a pair's longer completion, the log-probs of all"
        " tokens beyond the length of the shorter completion are multiplied by this weight. If null, no weight is applied.",
    )
    priority: int = Field(
        0, ge=-100, le=100, description="Jobs of higher priority run first, and interrupt jobs of lower priority."
    )
    title: str = Field("", max_length=200, description="Title of the job on the service's pages.")


_NAMES_REFERENCE = "Name or id of one of this service's references."


class QuerySettings(JobOptions):
    """The settings of a job in the query string, which are used only if the request's body is the dataset itself."""

    reference: str | None = Field(None, min_length=1, max_length=200, description=_NAMES_REFERENCE)


class JobSettings(JobOptions):
    """The settings of a job."""

    model_config = ConfigDict(extra="forbid")
    reference: str = Field(min_length=1, max_length=200, description=_NAMES_REFERENCE)


class JobRequest(JobSettings):
    """A request for a precompute job, which scores a dataset with a reference."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"reference": "sft", "dataset": {"upload": "pairs.jsonl"}, "max_length": 1024}]},
    )
    dataset: DatasetSpec = Field(description="Dataset to score.")


class JobProgress(BaseModel):
    """The progress of a job's latest attempt."""

    rows: int = Field(0, description="Number of rows that the latest attempt has read so far.")
    sequences: int = Field(0, description="Total number of sequences; estimated until the job is done, and 0 while unknown.")
    done: int = Field(
        0,
        description="Number of finished sequences: those with values already in the store, duplicates, and those that were"
        " scored or failed.",
    )
    hits: int = Field(0, description="Number of sequences whose values were already in the store.")
    scored: int = Field(0, description="Number of sequences that were scored.")
    bad_rows: int = Field(
        0, description="Number of rows that have failed so far. For each of them, the result has an error instead of values."
    )
    tokens: int = Field(0, description="Number of tokens in the scored sequences.")
    tokens_per_second: float = Field(
        0.0,
        description="Tokens scored per second: in the last few seconds while the job runs; in the whole run once it is done.",
    )
    seconds: float = Field(0.0, description="Seconds since the latest attempt began.")
    seconds_left: float | None = Field(
        None, description="Estimated seconds until the job is done, or null if there is no estimate yet."
    )


class Job(BaseModel):
    """A job, with its settings, state, progress and outcome."""

    id: str = Field(description="Id of the job. All routes for a job take this id.")
    state: JobState = Field(description="State of the job: `queued`, `running`, `done`, `failed` or `cancelled`.")
    settings: JobSettings = Field(description="Settings that the job was submitted with.")
    dataset: DatasetSpec = Field(description="Dataset of the job.")
    reference_id: str = Field(description="Id of the job's reference: a digest of the model's content and dtypes.")
    submitted_by: str = Field(description="Name of the token that first submitted the job.")
    created_at: datetime = Field(description="Time when the job was first submitted.")
    started_at: datetime | None = Field(None, description="Time when the latest attempt began.")
    finished_at: datetime | None = Field(None, description="Time when the job finished, failed or was cancelled.")
    attempts: int = Field(0, description="Number of times that the job has been started.")
    progress: JobProgress = Field(description="Progress of the latest attempt.")
    note: _WithoutSecrets | None = Field(
        None, description="Reason why the latest attempt was interrupted, or what a queued job is waiting for."
    )
    error: _WithoutSecrets | None = Field(None, description="Reason why the job failed.")
    summary: dict[str, Any] | None = Field(
        None,
        description="Summary of a completed job, including the fields of `reflogp score --json`. `bad_row_reasons` lists the"
        " 20 most frequent reasons why rows have no values, each with its number of rows (`rows`) and the numbers of the first"
        " five of these rows (`examples`). The result has the reason for every row.",
    )

    @field_validator("dataset")
    @classmethod
    def _hide_signature(cls, dataset: DatasetSpec) -> DatasetSpec:
        """Remove secrets from the dataset's URI, because every caller with the scope `read` can see the job.

        The dataset is still fetched from the full URI.
        """
        if dataset.uri is None:
            return dataset
        return dataset.model_copy(update={"uri": hide_secrets(dataset.uri)})


class Jobs(BaseModel):
    """A page of jobs, newest first."""

    jobs: list[Job] = Field(description="Jobs on this page, newest first.")
    counts: dict[JobState, int] = Field(description="Number of jobs in each state, across all pages.")
    next_before: str | None = Field(description="Value of `before` for the next page; null on the last page.")


class Upload(BaseModel):
    """An uploaded dataset file."""

    name: str = Field(description="Name that jobs use to refer to the upload.")
    bytes: int = Field(description="Size of the file in bytes.")
    sha256: str = Field(description="SHA-256 digest of the file.")
    uploaded_at: datetime = Field(description="Time at which the upload was completed.")


class Uploads(BaseModel):
    """All uploads."""

    uploads: list[Upload] = Field(description="Uploads, sorted by name.")
