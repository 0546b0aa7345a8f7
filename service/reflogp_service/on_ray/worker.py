"""The actor: an engine on some node, which scores units and commits them itself. Values never travel to the run's process.

Knows one reference and one store. Does not know what else is in line. Made by `scorer`, as a Ray actor.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from reflogp_service.allocator import growing_segments
from reflogp_service.commits import Commits
from reflogp_service.engine.sequences import Logps
from reflogp_service.engines import Engine, EngineChoice
from reflogp_service.on_ray.cluster import this_node
from reflogp_service.on_ray.shared import require_seen
from reflogp_service.on_ray.unit import decode
from reflogp_store import LogprobStore, LogprobTable, Reference, UsageError, describe_reference, resolve_model


class ScoringWorker:
    """One engine. Made of plain values; does nothing before it is asked.

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
        self._commits: Commits
        self._provenance: dict[str, Any]

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
        self._commits = Commits(self._table)
        self._engine = self._choice.make(str(folder), wanted)
        self._provenance = {"reflogp": version("reflogp"), **self._engine.provenance()}
        return self._provenance

    def score(self, content: bytes, again: bool) -> dict[str, Any]:
        """Score a unit and commit what could be scored.

        Args:
            content: of unit.encode.
            again: some of it may be stored already, by a worker that was lost; that is not computed again.

        Returns:
            problems (index -> why there are no values), snapshot (that has the others; None where there are none), flops,
            seconds.

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
        done: list[tuple[int, Logps]] = []
        flops = 0.0
        try:
            for index, logps in self._engine.stream(unit.sequences, skip=skip):
                if isinstance(logps, str):
                    problems[index] = logps
                    continue
                done.append((index, logps))
                flops += self._engine.flops(unit.sequences[index])
        finally:
            if done:
                indices = [index for index, _ in done]
                snapshot = self._commits.commit(
                    unit.keys.take(indices),
                    [unit.sequences[index] for index in indices],
                    unit.completion_lens[indices],
                    [logps for _, logps in done],
                    self._provenance,
                )
        return {"problems": problems, "snapshot": snapshot, "flops": flops, "seconds": time.monotonic() - started}

    def peak(self) -> float | None:
        """As Engine.peak_flops_per_second."""
        return self._engine.peak_flops_per_second()
