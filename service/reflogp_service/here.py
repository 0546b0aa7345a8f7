"""Misses scored in this process, by one engine.

Knows when to commit. Does not know where misses come from. Made by the command line and by a service's job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import pyarrow as pa

from reflogp_service.commits import COMMIT_SECONDS, COMMIT_SEQUENCES, Commits
from reflogp_service.engine.sequences import Logps
from reflogp_service.engines import Engine
from reflogp_service.misses import Miss, Told, Work
from reflogp_store import LogprobTable


class Here:
    """A Scorer around one engine.

    Args:
        make_engine: called on the first miss; a run of hits loads no model.
        commit_sequences, commit_seconds: commit when either is reached.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        commit_sequences: int = COMMIT_SEQUENCES,
        commit_seconds: float = COMMIT_SECONDS,
    ) -> None:
        self.batch = commit_sequences
        self._make_engine = make_engine
        self._commit_seconds = commit_seconds
        self._engine: Engine | None = None
        self._commits: Commits | None = None
        self._work = Work()

    def open(self, table: LogprobTable) -> None:
        """As Scorer.open."""
        self._commits = Commits(table)

    def score(self, misses: list[Miss], to_come: int, told: Told) -> None:
        """As Scorer.score; everything is told. An interrupt or an engine's error commits what is computed and passes on."""
        if self._engine is None:
            self._engine = self._make_engine()
            self._work.workers = 1
            self._work.provenance = {"reflogp": version("reflogp"), **self._engine.provenance()}
        sequences = [miss.sequence for miss in misses]
        problems = self._engine.problems(sequences)
        done: list[tuple[Miss, Logps]] = []
        began = committed_at = time.monotonic()
        try:
            for index, logps in self._engine.stream(sequences, skip=problems):
                if isinstance(logps, str):
                    problems[index] = logps
                    continue
                done.append((misses[index], logps))
                told.scored(misses[index])
                if len(done) >= self.batch or time.monotonic() - committed_at > self._commit_seconds:
                    self._commit(done, told)
                    done, committed_at = [], time.monotonic()
        finally:
            self._work.seconds += time.monotonic() - began  # commits in between too: a device computes its next pass meanwhile
            self._commit(done, told)
        for index, problem in problems.items():
            told.failed(misses[index], problem)

    def finish(self, told: Told) -> None:
        """As Scorer.finish: nothing is ever left."""

    def work(self) -> Work:
        """As Scorer.work."""
        if self._engine is not None and self._work.seconds > 0:
            self._work.operations = self._engine.operations()
            self._work.peak = self._engine.peak_flops_per_second()
        return self._work

    def close(self) -> None:
        """End the engine, where one was made."""
        if self._engine is not None:
            self._engine.close()

    def _commit(self, done: list[tuple[Miss, Logps]], told: Told) -> None:
        if not done:
            return
        assert self._commits is not None, "opened before"
        misses = [miss for miss, _ in done]
        snapshot = self._commits.commit(
            pa.array([miss.key for miss in misses], pa.binary()),
            [miss.sequence for miss in misses],
            np.array([miss.completion_len for miss in misses], np.int32),
            [logps for _, logps in done],
            self._work.provenance or {},
        )
        told.committed(snapshot)
