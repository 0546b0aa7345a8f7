"""Score units with one engine and commit them here, so that values never travel to the run."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.engines import Engine
from reflogp.scoring.errors import EngineError
from reflogp.scoring.runs.pending import Miss
from reflogp.scoring.runs.pipeline import Committed, Ended, Event, Failed, ScoringPipeline
from reflogp.scoring.runs.spread.unit import decode
from reflogp.scoring.torch_engine.operations import Operations
from reflogp.scoring.torch_engine.sequences import Sequence
from reflogp.store import LogprobTable, Snapshot

#: Units that a worker has at the same time: it commits one, scores the second, and need not wait for the third.
IN_FLIGHT = 3
#: Seconds between two checks whether the engine has room for a unit.
_LOOK_SECONDS = 0.01


class UnitScorer:
    """A scorer of units. It takes several units at the same time, so that the engine does not wait for the next unit.

    Args:
        engine: its `flow` runs in a thread of this object only.
        table: table of the values.

    Attributes:
        provenance: provenance of the values.
    """

    def __init__(self, engine: Engine, table: LogprobTable) -> None:
        self.provenance: dict[str, Any] = {"reflogp": version("reflogp"), **engine.provenance()}
        self._engine = engine
        self._table = table
        self._asked: dict[Miss, _Asked] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._landed_at = 0.0
        self._counted = Operations()
        self._computing = ScoringPipeline(engine, table, self.provenance, self._happened)

    def score(self, content: bytes, again: bool) -> dict[str, Any]:
        """Score a unit and commit its values. Each unit is scored in a thread of its own.

        Args:
            content: bytes of unit.encode.
            again: the store may have some of the sequences from a lost worker; those are not computed again.

        Returns:
            A dict with "problems" (index -> why there are no values), "snapshot" (number of the snapshot that has the other
            values; None if there are none), "operations" and "seconds" (since the call, or since the previous unit was done if
            that was later).

        Raises the errors of the engine and the store, and EngineError after `stop`; computed values are committed.
        """
        started = time.monotonic()
        unit = decode(content)
        problems = self._engine.problems(unit.sequences)
        skip = set(problems)
        snapshot: int | None = None
        if again:
            now = self._table.snapshot()
            snapshot = now.number
            skip |= set(np.flatnonzero(are_stored(now, unit.keys, unit.sequences)).tolist())
        misses = [
            Miss(key, sequence, int(completion_len), [index])
            for index, (key, sequence, completion_len) in enumerate(
                zip(unit.keys.to_pylist(), unit.sequences, unit.completion_lens, strict=True)
            )
            if index not in skip
        ]
        asked = _Asked(problems, snapshot, len(misses))
        with self._changed:
            self._asked.update((miss, asked) for miss in misses)
            while misses and self._error is None and not self._computing.put(misses, at_once=True):
                self._changed.wait(_LOOK_SECONDS)
            self._changed.wait_for(lambda: not asked.left or self._error is not None)
            if asked.left and self._error is not None:
                raise self._error
            seconds = time.monotonic() - max(started, self._landed_at)
            self._landed_at = time.monotonic()
            so_far = self._engine.operations()
            operations, self._counted = so_far - self._counted, so_far
        return {"problems": asked.problems, "snapshot": asked.snapshot, "operations": operations, "seconds": seconds}

    def peak(self) -> float | None:
        """Return the matrix product rate of the device; see Engine.peak_flops_per_second."""
        return self._engine.peak_flops_per_second()

    @property
    def error(self) -> BaseException | None:
        """The error that ended scoring, or None."""
        return self._error

    def stop(self) -> None:
        """Compute no further pass; return when computed values are committed."""
        self._computing.stop()

    def _happened(self, event: Event) -> None:
        with self._changed:
            match event:
                case Failed(miss, problem):
                    asked = self._asked.pop(miss)
                    asked.problems[miss.rows[0]] = problem
                    asked.left -= 1
                case Committed(misses, snapshot):
                    for miss in misses:
                        asked = self._asked.pop(miss)
                        asked.left -= 1
                        asked.snapshot = snapshot
                case Ended(error):
                    self._error = error or EngineError("the worker was stopped")
            self._changed.notify_all()


def are_stored(now: Snapshot, keys: pa.Array, sequences: list[Sequence]) -> npt.NDArray[np.bool_]:
    """Return which of these sequences have all their values in a snapshot, bool (n,).

    Args:
        now: the snapshot.
        keys: keys of the whole sequences, binary (n,).
        sequences: the sequences as they are scored, n.
    """
    return now.stored_lengths(keys) >= np.array([len(sequence.completion_ids) for sequence in sequences])


@dataclass(eq=False)
class _Asked:
    """The progress of a unit.

    Attributes:
        problems: index -> why there are no values.
        snapshot: number of the snapshot that has the other values; None if there is none yet.
        left: number of sequences that have neither values in the store nor a problem yet.
    """

    problems: dict[int, str]
    snapshot: int | None
    left: int
