"""Run a job's forward passes alternately with online requests, and isolate the sequences that crash workers.

JobEngine announces the keys of the sequences that are being computed on the device. If a worker dies, the service therefore
knows which sequences the worker was computing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from reflogp.scoring.engines import PassEngine
from reflogp.scoring.isolation import halves
from reflogp.scoring.torch_engine import Outcome, Sequence
from reflogp.scoring.torch_engine.sequences import TokenCounts
from reflogp.service.worker.engine_loop import EngineLoop
from reflogp.store import sequence_keys


class JobEngine:
    """An Engine for `score_dataset`. All forward passes are computed by the engine loop.

    Args:
        loop: engine loop that computes the forward passes.
        engine: the engine that the loop uses. JobEngine itself calls only methods of `engine` that run no forward
            pass.
        reference_id: id of the engine's reference.
        suspects: keys (hex) of sequences, one of which may crash the worker. Suspects are scored separately, before the other
            sequences in their group: half of the suspects first, then half of the remaining suspects, and so on.
        poison: sequences that must not be scored because they killed workers, as a dict from the sequence's key (hex) to the
            reason.
        announce: called with the keys (hex) of this job's sequences that are being computed on the device, or with an empty
            list if there are none.
        check: called repeatedly; raises an error to stop the job.
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
        self._token_counts = TokenCounts()

    def problems(self, sequences: list[Sequence]) -> dict[int, str]:
        """See Engine.problems. The result also contains the sequences whose keys are in `poison`."""
        found = self._engine.problems(sequences)
        if self._poison:
            keys = _keys(sequences)
            found |= {at: self._poison[key] for at, key in enumerate(keys) if key in self._poison}
        return found

    def flow(self, groups: Iterable[list[Sequence]]) -> Generator[list[tuple[int, Outcome]]]:
        """See Engine.flow. Suspects are never computed at the same time as the job's other sequences."""
        coming = _Coming(groups, self._suspects)
        while not coming.is_end:
            yield from self._part(coming)
            for half in _halves(coming.take_suspects()):
                yield from self._part([half])

    def provenance(self) -> dict[str, Any]:
        return self._engine.provenance()

    def token_counts(self) -> TokenCounts:
        """See Engine.token_counts. Only this job's passes are counted."""
        return self._token_counts

    def close(self) -> None:
        """Does nothing, because the engine belongs to the loop."""

    def _part(self, groups: Iterable[list[_Numbered]]) -> Iterator[list[tuple[int, Outcome]]]:
        """Let the engine loop compute groups of sequences, and yield the outcomes.

        Meanwhile, announce which of these sequences are being computed on the device.
        """
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

        for landed, token_counts in self._loop.flow(self._reference_id, sequences(), before, self._check):
            self._token_counts += token_counts
            done = [(begun.pop(number), outcome) for number, outcome in landed]
            with announcing:
                flying.difference_update(entry.key for entry, _ in done)
                if done and not flying:  # the device is now idle, and reading the next group may take a long time
                    self._announce([])
            yield [(entry.number, outcome) for entry, outcome in done]
        self._announce([])


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A sequence, its index among all sequences passed to `flow`, and its key (hex)."""

    number: int
    sequence: Sequence
    key: str


class _Coming(Iterator[list[_Numbered]]):
    """An iterator over incoming groups of sequences, which holds back the suspects.

    Iteration stops at a group that contains suspects. After a call to `take_suspects`, iteration continues with the rest of
    that group.

    Attributes:
        is_end: True if there are no further groups; False if iteration has only stopped at a group that contains suspects.
    """

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
        """Return the suspects that stopped the iteration, and let the iteration continue."""
        held, self._held = self._held, []
        return held


def _halves(suspects: list[_Numbered]) -> Iterator[list[_Numbered]]:
    """Split suspects into groups: half of the suspects, then half of the remaining suspects, and so on.

    If a worker dies while it computes one of these groups, only sequences of that group remain suspects: at most half of the
    suspects, rounded up.
    """
    while suspects:
        half, suspects = halves(suspects)
        yield half


def _keys(sequences: list[Sequence]) -> list[str]:
    """Return the keys (hex) of sequences as they are scored, that is, after truncation to max_length.

    If keep_start truncated a sequence, its key in the store is different, because that key is computed from the whole
    completion.
    """
    prompts = [np.asarray(sequence.prompt_ids, np.int64) for sequence in sequences]
    completions = [np.asarray(sequence.completion_ids, np.int64) for sequence in sequences]
    return [key.hex() for key in sequence_keys(prompts, completions).to_pylist()]
