"""Misses (sequences that the store lacks), and the events that report what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reflogp.scoring.torch_engine.sequences import Sequence, TokenCounts


@dataclass(eq=False, slots=True)
class Miss:
    """A sequence that the store lacks, and the rows that need it.

    Attributes:
        key: key of the sequence. With keep_start, it is computed from the whole completion.
        sequence: the sequence as it is scored; its completion may be truncated.
        completion_len: number of tokens in the completion. With keep_start, this includes tokens that are cut off.
        rows: numbers of the rows that need the sequence. Further rows may be added until the miss has failed or is committed.
    """

    key: bytes
    sequence: Sequence
    completion_len: int
    rows: list[int]


@dataclass(frozen=True)
class Scored:
    """Event: these misses have been scored; their values will be committed later."""

    misses: list[Miss]


@dataclass(frozen=True)
class Failed:
    """Event: a miss cannot be scored; `problem` is the reason."""

    miss: Miss
    problem: str


@dataclass(frozen=True)
class Committed:
    """Event: the store contains the values of these misses, in this snapshot and all later snapshots."""

    misses: list[Miss]
    snapshot: int


@dataclass(frozen=True)
class Ended:
    """The last event of a pipeline.

    `error` is the error that stopped the engine or the commits, or None. Computed values are lost only if a commit failed.
    """

    error: BaseException | None


Event = Scored | Failed | Committed


@dataclass
class Work:
    """How long scoring took, how many tokens it computed, and how the values were computed."""

    seconds: float = 0.0
    token_counts: TokenCounts = field(default_factory=TokenCounts)
    provenance: dict[str, Any] | None = None
    workers: int = 0
