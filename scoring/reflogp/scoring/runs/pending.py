"""Define the interface between a scoring run and a scorer: misses, callbacks for outcomes, and the Scorer protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from reflogp.scoring.torch_engine.sequences import Sequence, TokenCounts
from reflogp.store import LogprobTable


@dataclass(eq=False, slots=True)
class Miss:
    """A sequence that the store lacks, and the rows that need it.

    Attributes:
        key: key of the sequence. With keep_start, it is computed from the whole completion.
        sequence: the sequence as it is scored; its completion may be truncated.
        completion_len: number of tokens in the completion. With keep_start, this includes tokens that are cut off.
        rows: numbers of the rows that need the sequence. Further rows may be added until the miss is reported as failed or
            committed.
    """

    key: bytes
    sequence: Sequence
    completion_len: int
    rows: list[int]


class OutcomeCallbacks(Protocol):
    """Callbacks for the outcomes of misses."""

    def scored(self, miss: Miss) -> None:
        """Report that the values of a miss have been computed. A later call to `committed` reports that they are stored."""

    def failed(self, miss: Miss, problem: str) -> None:
        """Report that a miss cannot be scored; `problem` is the reason."""

    def committed(self, misses: list[Miss], snapshot: int) -> None:
        """Report that the store contains the values of these misses in snapshot number `snapshot` and all later snapshots."""


@dataclass
class Work:
    """The time that scoring took, the number of tokens, and how the values were computed.

    Attributes:
        seconds: number of seconds during which at least one engine was computing.
        token_counts: token counts of the scored sequences.
        provenance: how the values were computed; None if nothing was computed.
        workers: largest number of engines that were computing at the same time.
    """

    seconds: float = 0.0
    token_counts: TokenCounts = field(default_factory=TokenCounts)
    provenance: dict[str, Any] | None = field(default=None)
    workers: int = 0


class Scorer(Protocol):
    """An object that scores misses and commits their values."""

    @property
    def batch(self) -> int:
        """Number of misses to collect before calling `score`.

        `score` may be called with fewer misses, for example while `is_starved` returns True.
        """

    def open(self, table: LogprobTable) -> None:
        """Set the table to which values are committed. This method is called once, before any other method."""

    def is_starved(self) -> bool:
        """Return True if the scorer needs more misses now, even if only a few have been collected."""

    def score(self, misses: list[Miss], to_come: int, callbacks: OutcomeCallbacks) -> None:
        """Queue misses, and return when there is room for more.

        Outcomes that are not known yet are reported by a later call to `score`, `tell` or `finish`.

        Args:
            misses: misses to score. Until a miss is reported as failed or committed, a second miss with the same key may be
                passed only if it contains more tokens of the completion than the first.
            to_come: estimated number of sequences that the run has not read yet.
            callbacks: callbacks for outcomes; they are called before this method returns, in the caller's thread.

        Raises:
            ReflogpError: the scorer cannot continue. A call to `stop` then commits the values that are already computed, unless
                a commit has failed.
        """

    def tell(self, callbacks: OutcomeCallbacks) -> None:
        """Report the outcomes that are known now, without waiting for further outcomes.

        This method is called several times a second while the run waits for rows. Raises the same errors as `score`.
        """

    def finish(self, callbacks: OutcomeCallbacks) -> None:
        """Wait until the outcomes of all misses are reported. Raises the same errors as `score`."""

    def stop(self) -> None:
        """Stop scoring, and commit the values that are already computed. No further outcomes are reported."""

    def work(self) -> Work:
        """Return the time that scoring took, the number of tokens, and how the values were computed."""
