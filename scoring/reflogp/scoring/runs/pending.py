"""Define the interface between a scoring run and a scorer: misses, outcome callbacks, and the Scorer protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from reflogp.scoring.torch_engine.sequences import Operations, Sequence
from reflogp.store import LogprobTable


@dataclass(eq=False, slots=True)
class Miss:
    """A sequence that the store lacks, and the rows that need it.

    Attributes:
        key: key of the whole sequence.
        sequence: the sequence as it is scored; its completion may be truncated.
        completion_len: number of tokens of the whole completion.
        rows: numbers of the rows that need the sequence; grows until the miss is done.
    """

    key: bytes
    sequence: Sequence
    completion_len: int
    rows: list[int]


class OutcomeCallbacks(Protocol):
    """Callbacks for the outcomes of misses."""

    def scored(self, miss: Miss) -> None:
        """Report that the values of a miss are computed; a later `committed` reports that they are in the store."""

    def failed(self, miss: Miss, problem: str) -> None:
        """Report that a miss has no values, and why."""

    def committed(self, misses: list[Miss], snapshot: int) -> None:
        """Report that the values of these misses are in the store, from snapshot number `snapshot` on."""


@dataclass
class Work:
    """The time and operations that scoring took.

    Attributes:
        seconds: seconds in which an engine computed.
        operations: operations of the scored sequences.
        peak: matrix product rate of all devices together, operations per second; None if nothing was computed or an engine
            cannot measure it.
        provenance: how the values were computed; None if nothing was computed.
        workers: largest number of engines that computed at the same time.
    """

    seconds: float = 0.0
    operations: Operations = field(default_factory=Operations)
    peak: float | None = None
    provenance: dict[str, Any] | None = field(default=None)
    workers: int = 0


class Scorer(Protocol):
    """Scores misses and commits their values."""

    @property
    def batch(self) -> int:
        """Number of misses worth collecting before `score` is called, unless the scorer is starved."""

    def open(self, table: LogprobTable) -> None:
        """Set the table that workers commit values to. Called once, before any other method."""

    def is_starved(self) -> bool:
        """Return True if the scorer would compute misses at once, however few."""

    def score(self, misses: list[Miss], to_come: int, callbacks: OutcomeCallbacks) -> None:
        """Queue misses; return when there is room for more. Remaining outcomes are reported by a later call.

        Args:
            misses: misses to score. A key whose outcome is not reported yet may come again only with a longer part of its
                completion.
            to_come: about how many more sequences the run still has to read.
            callbacks: called during this call, in this thread.

        Raises:
            ReflogpError: the scorer cannot go on. Computed values are committed.
        """

    def tell(self, callbacks: OutcomeCallbacks) -> None:
        """Report outcomes without waiting; called while there are no misses to score. Raises the errors of `score`."""

    def finish(self, callbacks: OutcomeCallbacks) -> None:
        """Return when the outcomes of all misses are reported. Raises the errors of `score`."""

    def stop(self) -> None:
        """Begin no further pass; return when computed values are committed. No further outcomes are reported."""

    def work(self) -> Work:
        """Return the time and operations that scoring took."""
