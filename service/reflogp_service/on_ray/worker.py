"""The actor: an engine on some node, which scores units and commits them itself. Values never travel to the run's process.

Knows one reference and one store. Does not know what else is in line. Made by `scorer`, as a Ray actor.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from reflogp_service.allocator import growing_segments
from reflogp_service.computing import Committed, Computing, Ended, Event, Failed
from reflogp_service.engine.operations import Operations
from reflogp_service.engines import Engine, EngineChoice
from reflogp_service.misses import Miss
from reflogp_service.on_ray.cluster import this_node
from reflogp_service.on_ray.shared import require_seen
from reflogp_service.on_ray.unit import decode
from reflogp_store import LogprobStore, LogprobTable, Reference, UsageError, describe_reference, resolve_model

#: Seconds between two looks whether the engine has room for a unit.
_LOOK_SECONDS = 0.01


class ScoringWorker:
    """One engine. Made of plain values; does nothing before it is asked.

    `score` may be called while another call is under way, so that the engine need not wait for the next unit.

    Args:
        model: folder or hub id, as this node finds it.
        revision: of a hub id.
        reference: Reference.to_json of the model; a node whose weights are others refuses.
        choice: fields of an EngineChoice.
        store: URI.
    """

    def __init__(self, model: str, revision: str | None, reference: str, choice: dict[str, Any], store: str) -> None:
        self._model = model
        self._revision = revision
        self._reference = Reference.from_json(reference)
        self._choice = EngineChoice(**choice)
        self._store = store
        self._engine: Engine
        self._table: LogprobTable
        self._computing: Computing
        self._asked: dict[Miss, _Asked] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._landed_at = 0.0
        self._counted = Operations()

    def place(self) -> str:
        """The node that it is on, in words."""
        return this_node()

    def prepare(self, probe: str | None) -> dict[str, Any]:
        """Load the engine and open the store; provenance of the values to come.

        Args:
            probe: a file in the store's folder, where it is one.

        Raises:
            UsageError: no such model here, or another one.
            ReflogpError: the store or the engine cannot be used here.
        """
        if probe is not None:
            require_seen(probe)
        os.environ.update(growing_segments(os.environ))  # torch reads it when it first uses the GPU
        if not self._choice.gpus():
            torch.set_num_threads(1)  # what it asked Ray for
        wanted = self._reference
        folder = resolve_model(self._model, self._revision)
        found = describe_reference(self._model, wanted.dtype, lm_head_dtype=wanted.lm_head_dtype, revision=self._revision)
        if found.reference_id != wanted.reference_id:
            raise UsageError(f"{self._model} is another model there: reference {found.reference_id}, not {wanted.reference_id}")
        self._table = LogprobStore(self._store).table(wanted.reference_id)
        self._engine = self._choice.make(str(folder), wanted)
        provenance = {"reflogp": version("reflogp"), **self._engine.provenance()}
        self._computing = Computing(self._engine, self._table, provenance, self._happened)
        return provenance

    def score(self, content: bytes, again: bool) -> dict[str, Any]:
        """Score a unit and commit what could be scored.

        Args:
            content: of unit.encode.
            again: some of it may be stored already, by a worker that was lost; that is not computed again.

        Returns:
            problems (index -> why there are no values), snapshot (that has the others; None where there are none), operations
            and seconds (since the unit before was done, where that was later than the call).

        Raises what the engine and the store raise; what was computed is committed.
        """
        started = time.monotonic()
        unit = decode(content)
        problems = self._engine.problems(unit.sequences)
        skip = set(problems)
        snapshot: int | None = None
        if again:
            now = self._table.snapshot()
            snapshot = now.number
            stored = now.stored_lengths(unit.keys)
            needed = np.array([len(sequence.completion_ids) for sequence in unit.sequences])
            skip |= set(np.flatnonzero(stored >= needed).tolist())
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
        """As Engine.peak_flops_per_second."""
        return self._engine.peak_flops_per_second()

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
                    self._error = error
            self._changed.notify_all()


@dataclass(eq=False)
class _Asked:
    """What becomes of a unit.

    Attributes:
        problems: index -> why there are no values.
        snapshot: that has the others.
        left: sequences that have neither values in the store nor a problem yet.
    """

    problems: dict[int, str]
    snapshot: int | None
    left: int
