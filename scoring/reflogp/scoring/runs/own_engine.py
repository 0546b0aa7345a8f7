"""The engine of the run's own process, as the scheduler uses it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from reflogp.scoring.engines import Engine
from reflogp.scoring.runs.misses import Ended, Event, Failed, Miss, Work
from reflogp.scoring.runs.pipeline import ScoringPipeline
from reflogp.scoring.torch_engine.sequences import TokenCounts
from reflogp.scoring.tracing import span
from reflogp.store import LogprobTable


class OwnEngine:
    """An engine that is loaded when it gets its first misses. It computes in one thread and commits in another."""

    def __init__(
        self, make_engine: Callable[[], Engine], commit_sequences: int, commit_seconds: float, closes_engine: bool
    ) -> None:
        self._make_engine = make_engine
        self._commits = commit_sequences, commit_seconds
        self._closes_engine = closes_engine
        self._engine: Engine | None = None
        self._pipeline: ScoringPipeline | None = None
        self._counted_before = TokenCounts()
        self._table: LogprobTable
        self._tell: Callable[[Event | Ended], None]

    def open(self, table: LogprobTable, tell: Callable[[Event | Ended], None]) -> None:
        """Set the table for the values, and the function that is called, in any thread, with what becomes of the misses."""
        self._table, self._tell = table, tell

    def is_starved(self) -> bool:
        """Return True if no misses are waiting for the engine. `give` may then be called."""
        return self._pipeline is None or self._pipeline.is_starved()

    def give(self, misses: list[Miss]) -> None:
        pipeline, engine = self._begin()
        problems = engine.problems([miss.sequence for miss in misses])
        for index, problem in problems.items():
            self._tell(Failed(misses[index], problem))
        if group := [miss for index, miss in enumerate(misses) if index not in problems]:
            pipeline.put(group)

    def finish(self) -> bool:
        """Declare that `give` will not be called again. Return False if it was never called, so that no Ended will follow."""
        if self._pipeline is not None:
            self._pipeline.finish()
        return self._pipeline is not None

    def stop(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()

    def close(self) -> None:
        self.stop()
        if self._engine is not None and self._closes_engine:
            self._engine.close()

    def per_second(self) -> float | None:
        if self._pipeline is None or not self._pipeline.seconds:
            return None
        return self._pipeline.scored / self._pipeline.seconds or None

    def work(self) -> Work:
        if self._engine is None or self._pipeline is None:
            return Work()
        counts = self._engine.token_counts() - self._counted_before
        return Work(self._pipeline.seconds, counts, self._pipeline.provenance, 1)

    def _begin(self) -> tuple[ScoringPipeline, Engine]:
        if self._engine is None or self._pipeline is None:
            with span("load model"):
                self._engine = self._make_engine()
            self._counted_before = self._engine.token_counts()
            provenance = {"reflogp": version("reflogp"), **self._engine.provenance()}
            self._pipeline = ScoringPipeline(self._engine, self._table, provenance, self._tell, *self._commits)
        return self._pipeline, self._engine
