"""What a worker is told: how it shall work, when it starts, and each job. Made by the service, sent as JSON.

Knows names only; imports neither torch nor fastapi, since both sides use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ModelPlace:
    """Where a reference's model is, its numerics, and what computes: fields of EngineChoice, but those of the worker."""

    model: str
    dtype: str
    lm_head_dtype: str | None
    revision: str | None
    engine: dict[str, Any]

    @property
    def trust_remote_code(self) -> bool:
        return bool(self.engine["trust_remote_code"])


@dataclass(frozen=True)
class WorkerConfiguration:
    """How a worker shall work.

    Attributes:
        device: "auto", "cpu", "cuda:1", …
        visible: CUDA_VISIBLE_DEVICES of its process; None leaves it as it is.
        workers: of the service.
        sharing: of these, such as compute on this machine's processor.
        token_budget: tokens of one pass, or "auto".
        models: reference id -> its model.
        capacity: engines that may be loaded at a time.
        pinned: reference id that is loaded at the start and stays, or None.
        store: URI.
        tokens: folder for kept token ids.
        max_tokens_bytes: of it.
        commit_seconds: the longest that computed values of a job wait for a commit.
        window_seconds: how long an online request waits for others to be merged with.
        row_bytes, dataset_bytes, group_bytes: bounds of reading datasets.
        row_seconds: processor time that tokenising one row may take.
    """

    device: str
    visible: str | None
    workers: int
    sharing: int
    token_budget: int | Literal["auto"]
    models: dict[str, ModelPlace]
    capacity: int
    pinned: str | None
    store: str
    tokens: str
    max_tokens_bytes: int
    commit_seconds: float
    window_seconds: float
    row_bytes: int
    dataset_bytes: int
    group_bytes: int
    row_seconds: float


@dataclass(frozen=True)
class HelpOrder:
    """Part in a job that another worker has.

    Attributes:
        poison: as of JobOrder.
    """

    job: str
    reference_id: str
    poison: dict[str, str]


@dataclass(frozen=True)
class JobOrder:
    """A job as the service sends it to a worker.

    Attributes:
        file: the dataset, a file or folder; its path has no links.
        digest: of its content.
        root: folder below which others may have put the dataset; None for a file of the service's own folder.
        result, report: files to write.
        suspects, poison: see JobEngine.
    """

    job: str
    reference_id: str
    file: str
    digest: str
    root: str | None
    split: str
    format: str | None
    max_length: int | None
    truncation_mode: str
    ld_alpha: float | None
    result: str
    report: str
    suspects: list[str]
    poison: dict[str, str]
