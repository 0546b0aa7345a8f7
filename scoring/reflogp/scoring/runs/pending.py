"""What a scoring run hands on: sequences that the store lacks, to something that scores and commits them, here or elsewhere.

Knows the words that a run and a scorer have in common. Knows neither engines nor datasets. Used by `scoring` and every scorer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from reflogp.scoring.torch_engine.operations import Operations
from reflogp.scoring.torch_engine.sequences import Sequence
from reflogp.store import LogprobTable


@dataclass(eq=False, slots=True)
class Miss:
    """A sequence to score, and the rows that wait for it.

    Attributes:
        key: of the whole sequence.
        sequence: as it is scored: its completion may be cut.
        completion_len: tokens of the whole completion.
        rows: numbers of the rows that need it; grows until the miss is done.
    """

    key: bytes
    sequence: Sequence
    completion_len: int
    rows: list[int]


class OutcomeCallbacks(Protocol):
    """Told what becomes of misses."""

    def scored(self, miss: Miss) -> None:
        """Its values are computed; a later `committed` says that they are in the store."""

    def failed(self, miss: Miss, problem: str) -> None:
        """It has no values, and why."""

    def committed(self, misses: list[Miss], snapshot: int) -> None:
        """The values of these are in the store, as of that snapshot."""


@dataclass
class Work:
    """What scoring took.

    Attributes:
        seconds: in which something was computed.
        operations: what the scored sequences took.
        peak: operations a second that all devices together reach; None where nothing ran or an engine cannot tell.
        provenance: how values were made; None where nothing ran.
        workers: engines that were at it; the most at a time.
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
        """Misses that are worth collecting before they are handed on, unless it is starved."""

    def open(self, table: LogprobTable) -> None:
        """Told once, before anything else, where values go."""

    def is_starved(self) -> bool:
        """Whether what computes would take misses now, however few."""

    def score(self, misses: list[Miss], to_come: int, callbacks: OutcomeCallbacks) -> None:
        """Take misses in. Returns when there is room for more; what is not `callbacks` by then, a later call tells.

        Args:
            misses: each key once among what is not told yet, unless a longer part of its completion is needed.
            to_come: about how many more sequences the run has to look at.
            callbacks: called here, in this thread.

        Raises:
            ReflogpError: it cannot go on. What was computed is committed.
        """

    def tell(self, callbacks: OutcomeCallbacks) -> None:
        """Tell what has happened, without waiting; called while there are no misses to hand on. Raises as `score`."""

    def finish(self, callbacks: OutcomeCallbacks) -> None:
        """Return when all misses are told. Raises as `score`."""

    def stop(self) -> None:
        """Begin nothing further; return when what is computed is committed. Nothing more is told."""

    def work(self) -> Work:
        """What was done."""
