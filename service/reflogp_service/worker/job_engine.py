"""The engine as a job sees it: passes in turn with online requests, and a search for the sequence that kills workers.

Knows keys of what is being computed, so that the service can say what a dead worker was at. Called by `job`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from reflogp_service.engine import Outcome, Sequence
from reflogp_service.engine.operations import Operations
from reflogp_service.engines import PassEngine
from reflogp_service.worker.engine_loop import EngineLoop
from reflogp_store import sequence_keys


class JobEngine:
    """What `score_dataset` needs of an engine, computed by the engine loop.

    Args:
        loop: whose turns are taken.
        engine: the loop's, for what needs no turn.
        reference_id: of the engine.
        suspects: keys (hex) one of which may kill the worker: they are scored before the others, in halves, each alone.
        poison: key (hex) -> why that sequence is not scored.
        announce: told the keys (hex) that the device is at; none when it is at none of this job's.
        check: called now and then; raises to stop the job.
    """

    def __init__(
        self,
        loop: EngineLoop,
        engine: PassEngine,
        reference_id: str,
        suspects: Collection[str],
        poison: dict[str, str],
        announce: Callable[[list[str]], None],
        check: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._engine = engine
        self._reference_id = reference_id
        self._suspects = set(suspects)
        self._poison = poison
        self._announce = announce
        self._check = check
        self._operations = Operations()

    def problems(self, sequences: list[Sequence]) -> dict[int, str]:
        """As Engine.problems, and the known poison."""
        found = self._engine.problems(sequences)
        if self._poison:
            keys = _keys(sequences)
            found |= {at: self._poison[key] for at, key in enumerate(keys) if key in self._poison}
        return found

    def stream(self, sequences: list[Sequence], skip: Collection[int] = ()) -> Iterator[tuple[int, Outcome]]:
        """As Engine.stream."""
        keys = _keys(sequences)
        suspects = [at for at, key in enumerate(keys) if key in self._suspects and at not in skip]
        for group in _halves(suspects):
            yield from self._group(sequences, keys, set(range(len(sequences))) - set(group))
        yield from self._group(sequences, keys, {*skip, *suspects})

    def provenance(self) -> dict[str, Any]:
        return self._engine.provenance()

    def operations(self) -> Operations:
        """As Engine.operations, of this job's passes alone."""
        return self._operations

    def peak_flops_per_second(self) -> float | None:
        return self._engine.peak_flops_per_second()

    def close(self) -> None:
        """Nothing: the engine is the loop's."""

    def _group(self, sequences: list[Sequence], keys: list[str], skip: Collection[int]) -> Iterator[tuple[int, Outcome]]:
        if len(skip) == len(sequences):
            return
        flying: set[str] = set()

        def before(indices: list[int]) -> None:
            flying.update(keys[at] for at in indices)
            self._announce(sorted(flying))

        for landed, operations in self._loop.passes(self._reference_id, sequences, skip, before, self._check):
            self._operations += operations
            flying.difference_update(keys[at] for at, _ in landed)
            yield from landed
        self._announce([])


def _halves(suspects: list[int]) -> Iterator[list[int]]:
    """Groups that together are `suspects`: half of them, half of the rest, …, so that each death halves what is suspected."""
    while suspects:
        middle = (len(suspects) + 1) // 2
        yield suspects[:middle]
        suspects = suspects[middle:]


def _keys(sequences: list[Sequence]) -> list[str]:
    """Keys in hex; of sequences as they are scored, which a max_length may have cut."""
    prompts = [np.asarray(sequence.prompt_ids, np.int64) for sequence in sequences]
    completions = [np.asarray(sequence.completion_ids, np.int64) for sequence in sequences]
    return [key.hex() for key in sequence_keys(prompts, completions).to_pylist()]
