"""A worker of a run: an engine, loaded where the worker is, and the units that it is given.

Knows one reference and one store. Does not know what else is in line. Made in a process of its own, by `local` or by Ray.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.machine.allocator import growing_segments
from reflogp.scoring.runs.spread.units import Units
from reflogp.store import Reference, Store, UsageError, describe_reference, resolve_model


class ScoringWorker:
    """One engine. Made of plain values; does nothing before it is asked.

    Args:
        model: folder or hub id, as this machine finds it.
        revision: of a hub id.
        reference: Reference.to_json of the model; a machine whose weights are others refuses.
        choice: fields of an EngineChoice.
        store: URI.
        threads: of the processor, where the engine computes on it.
    """

    def __init__(
        self, model: str, revision: str | None, reference: str, choice: dict[str, Any], store: str, threads: int
    ) -> None:
        self._model = model
        self._revision = revision
        self._reference = Reference.from_json(reference)
        self._choice = EngineChoice(**choice)
        self._store = store
        self._threads = threads
        self._units: Units

    def prepare(self) -> dict[str, Any]:
        """Load the engine and open the store; provenance of the values to come.

        Raises:
            UsageError: no such model here, or another one.
            ReflogpError: the store or the engine cannot be used here.
        """
        os.environ.update(growing_segments(os.environ))  # torch reads it when it first uses the GPU
        if not self._choice.gpus():
            torch.set_num_threads(self._threads)
        wanted = self._reference
        folder = resolve_model(self._model, self._revision)
        found = describe_reference(self._model, wanted.dtype, lm_head_dtype=wanted.lm_head_dtype, revision=self._revision)
        if found.reference_id != wanted.reference_id:
            raise UsageError(f"{self._model} is another model there: reference {found.reference_id}, not {wanted.reference_id}")
        table = Store(self._store).table(wanted.reference_id)
        self._units = Units(self._choice.make(str(folder), wanted), table)
        return self._units.provenance

    def score(self, content: bytes, again: bool) -> dict[str, Any]:
        """As Units.score; may be called while another call is under way."""
        return self._units.score(content, again)

    def peak(self) -> float | None:
        """As Engine.peak_flops_per_second."""
        return self._units.peak()

    def stop(self) -> None:
        """As Units.stop."""
        self._units.stop()
