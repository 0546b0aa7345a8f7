"""The engine as a job sees it: passes in turn with online requests, and a search for the sequence that kills workers.

Knows keys of what is being computed, so that the service can say what a dead worker was at. Called by `job`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from reflogp.scoring.engines import PassEngine
from reflogp.scoring.torch_engine import Outcome, Sequence
from reflogp.scoring.torch_engine.operations import Operations
from reflogp.service.worker.engine_loop import EngineLoop
from reflogp.store import sequence_keys


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

    def flow(self, groups: Iterable[list[Sequence]]) -> Generator[list[tuple[int, Outcome]]]:
        """As Engine.flow. Nothing else is under way while suspects are computed."""
        coming = _Coming(groups, self._suspects)
        while not coming.is_end:
            yield from self._part(coming)
            for half in _halves(coming.take_suspects()):
                yield from self._part([half])

    def provenance(self) -> dict[str, Any]:
        return self._engine.provenance()

    def operations(self) -> Operations:
        """As Engine.operations, of this job's passes alone."""
        return self._operations

    def peak_flops_per_second(self) -> float | None:
        return self._engine.peak_flops_per_second()

    def close(self) -> None:
        """Nothing: the engine is the loop's."""

    def _part(self, groups: Iterable[list[_Numbered]]) -> Iterator[list[tuple[int, Outcome]]]:
        """What the loop makes of some groups; the keys that the device is at are announced."""
        begun: dict[int, _Numbered] = {}
        flying: set[str] = set()
        announcing = threading.Lock()

        def sequences() -> Iterator[list[Sequence]]:
            count = 0
            for group in groups:
                begun.update(enumerate(group, count))
                count += len(group)
                yield [entry.sequence for entry in group]

        def before(numbers: list[int]) -> None:
            with announcing:
                flying.update(begun[number].key for number in numbers)
                self._announce(sorted(flying))

        for landed, operations in self._loop.flow(self._reference_id, sequences(), before, self._check):
            self._operations += operations
            done = [(begun.pop(number), outcome) for number, outcome in landed]
            with announcing:
                flying.difference_update(entry.key for entry, _ in done)
                if done and not flying:  # the job may be reading for long
                    self._announce([])
            yield [(entry.number, outcome) for entry, outcome in done]
        self._announce([])


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A sequence, its number in the job's flow, and its key."""

    number: int
    sequence: Sequence
    key: str


class _Coming(Iterator[list[_Numbered]]):
    """Groups as they come, without their suspects. Pauses behind a group that has some: then they are there to be taken."""

    def __init__(self, groups: Iterable[list[Sequence]], suspects: set[str]) -> None:
        self.is_end = False
        self._groups = iter(groups)
        self._suspects = suspects
        self._held: list[_Numbered] = []
        self._rest: list[_Numbered] = []
        self._count = 0

    def __next__(self) -> list[_Numbered]:
        if self._held:
            raise StopIteration
        if self._rest:
            rest, self._rest = self._rest, []
            return rest
        sequences = next(self._groups, None)
        if sequences is None:
            self.is_end = True
            raise StopIteration
        if not sequences:
            return []
        group = [
            _Numbered(number, sequence, key)
            for number, (sequence, key) in enumerate(zip(sequences, _keys(sequences), strict=True), self._count)
        ]
        self._count += len(group)
        self._held = [entry for entry in group if entry.key in self._suspects]
        if not self._held:
            return group
        self._rest = [entry for entry in group if entry.key not in self._suspects]
        raise StopIteration

    def take_suspects(self) -> list[_Numbered]:
        """The suspects that the present pause is for."""
        held, self._held = self._held, []
        return held


def _halves(suspects: list[_Numbered]) -> Iterator[list[_Numbered]]:
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
