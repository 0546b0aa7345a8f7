"""Score misses (sequences that the store lacks) with one engine in this process."""

from __future__ import annotations

import queue
from collections.abc import Callable
from importlib.metadata import version

from reflogp.scoring.engines import Engine
from reflogp.scoring.runs.committer import COMMIT_SECONDS, COMMIT_SEQUENCES
from reflogp.scoring.runs.pending import Miss, OutcomeCallbacks, Work
from reflogp.scoring.runs.pipeline import Committed, Ended, Event, Failed, Scored, ScoringPipeline
from reflogp.scoring.torch_engine.sequences import TokenCounts
from reflogp.scoring.tracing import span
from reflogp.store import LogprobTable

#: Seconds between two attempts to queue a group of misses.
_LOOK_SECONDS = 0.02


class LocalScorer:
    """A Scorer with one engine. It computes values in one thread and commits them in another (see ScoringPipeline).

    Args:
        make_engine: function that loads the engine. The first call to `score` calls it, so no model is loaded if the store
            already has all values.
        commit_sequences: maximum number of sequences between two commits.
        commit_seconds: maximum number of seconds between two commits.
        closes_engine: whether `close` also closes the engine.

    Attributes:
        batch: number of misses to collect before calling `score`; see Scorer.batch.
        scored: number of misses that have values.
        done: number of misses that have values or could not be scored.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        commit_sequences: int = COMMIT_SEQUENCES,
        commit_seconds: float = COMMIT_SECONDS,
        *,
        closes_engine: bool = True,
    ) -> None:
        self.batch = min(commit_sequences, COMMIT_SEQUENCES)
        self.scored = self.done = 0
        self._make_engine = make_engine
        self._commit_sequences = commit_sequences
        self._commit_seconds = commit_seconds
        self._closes_engine = closes_engine
        self._counted_before = TokenCounts()
        self._engine: Engine | None = None
        self._table: LogprobTable | None = None
        self._computing: ScoringPipeline | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._work = Work()

    @property
    def seconds(self) -> float:
        """Number of seconds during which the engine was computing."""
        return 0.0 if self._computing is None else self._computing.seconds

    def open(self, table: LogprobTable) -> None:
        """See Scorer.open."""
        self._table = table

    def is_starved(self) -> bool:
        """See Scorer.is_starved."""
        return self._computing is None or self._computing.is_starved()

    def score(self, misses: list[Miss], to_come: int, callbacks: OutcomeCallbacks) -> None:
        """See Scorer.score. This method returns as soon as the misses are queued for the engine."""
        computing, engine = self._begin()
        problems = engine.problems([miss.sequence for miss in misses])
        for index, problem in problems.items():
            self.done += 1
            callbacks.failed(misses[index], problem)
        group = [miss for index, miss in enumerate(misses) if index not in problems]
        while group and not computing.put(group):
            self._tell(callbacks, _LOOK_SECONDS)
        self._tell(callbacks)

    def tell(self, callbacks: OutcomeCallbacks) -> None:
        """See Scorer.tell."""
        self._tell(callbacks)

    def finish(self, callbacks: OutcomeCallbacks) -> None:
        """See Scorer.finish."""
        if self._computing is not None:
            self._computing.finish()
            while not self._tell(callbacks, None):
                pass

    def stop(self) -> None:
        """See Scorer.stop."""
        if self._computing is not None:
            self._computing.stop()

    def work(self) -> Work:
        """See Scorer.work."""
        if self._engine is not None and self._computing is not None:
            self._work.seconds = self._computing.seconds
            self._work.token_counts = self._engine.token_counts() - self._counted_before
        return self._work

    def close(self) -> None:
        """Stop computing, and close the engine if it was loaded."""
        self.stop()
        if self._engine is not None and self._closes_engine:
            self._engine.close()

    def _begin(self) -> tuple[ScoringPipeline, Engine]:
        if self._engine is None or self._computing is None:
            assert self._table is not None, "`open` is called before `score`"
            with span("load model"):
                self._engine = self._make_engine()
            self._counted_before = self._engine.token_counts()
            self._work.workers = 1
            self._work.provenance = {"reflogp": version("reflogp"), **self._engine.provenance()}
            self._computing = ScoringPipeline(
                self._engine,
                self._table,
                self._work.provenance,
                self._events.put,
                self._commit_sequences,
                self._commit_seconds,
            )
        return self._computing, self._engine

    def _tell(self, callbacks: OutcomeCallbacks, patience: float | None = 0.0) -> bool:
        """Report the pipeline's events to the callbacks. Return True if the pipeline has ended.

        Args:
            callbacks: callbacks for outcomes; they are called in the caller's thread.
            patience: seconds to wait for the first event; None for no limit.

        Raises the error that stopped the pipeline.
        """
        while True:
            try:
                event = self._events.get(timeout=patience) if patience != 0.0 else self._events.get_nowait()
            except queue.Empty:
                return False
            patience = 0.0
            match event:
                case Scored(miss):
                    self.scored += 1
                    self.done += 1
                    callbacks.scored(miss)
                case Failed(miss, problem):
                    self.done += 1
                    callbacks.failed(miss, problem)
                case Committed(misses, snapshot):
                    callbacks.committed(misses, snapshot)
                case Ended(error):
                    if error is not None:
                        raise error
                    return True
