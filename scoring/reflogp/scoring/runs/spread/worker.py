"""Load an engine in a worker's process and score the units that the run sends."""

from __future__ import annotations

import os
from typing import Any

import torch

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.machine.allocator import growing_segments
from reflogp.scoring.runs.spread.units import UnitScorer
from reflogp.store import Reference, Store, UsageError, describe_reference, resolve_model


class ScoringWorker:
    """A worker with one engine. Its arguments are plain values, and nothing is loaded before `prepare`.

    Args:
        model: folder or hub id, as this machine resolves it.
        revision: revision of a hub id.
        reference: Reference.to_json of the model; `prepare` raises UsageError if the weights here differ.
        choice: fields of an EngineChoice.
        store: URI of the store.
        threads: torch's CPU threads, for an engine that computes on the CPU.
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
        self._units: UnitScorer

    def prepare(self) -> dict[str, Any]:
        """Load the engine and open the store; return the provenance of the values to come.

        Raises:
            UsageError: the model is not found on this machine, or its weights are not the reference's.
            ReflogpError: the store or the engine cannot be used on this machine.
        """
        os.environ.update(growing_segments(os.environ))  # torch reads the setting when it first uses the GPU
        if not self._choice.gpus():
            torch.set_num_threads(self._threads)
        wanted = self._reference
        folder = resolve_model(self._model, self._revision)
        found = describe_reference(self._model, wanted.dtype, lm_head_dtype=wanted.lm_head_dtype, revision=self._revision)
        if found.reference_id != wanted.reference_id:
            raise UsageError(
                f"{self._model} is another model on this worker's machine: reference {found.reference_id}, "
                f"not {wanted.reference_id}"
            )
        table = Store(self._store).table(wanted.reference_id)
        self._units = UnitScorer(self._choice.make(str(folder), wanted), table)
        return self._units.provenance

    def score(self, content: bytes, again: bool) -> dict[str, Any]:
        """Score and commit a unit; see Units.score. Several calls may run at the same time."""
        return self._units.score(content, again)

    def peak(self) -> float | None:
        """Return the matrix product rate of the device; see Engine.peak_flops_per_second."""
        return self._units.peak()

    def stop(self) -> None:
        """Compute no further pass and commit computed values; see Units.stop."""
        self._units.stop()
