"""The vLLM engine: sequences go to vLLM, wherever it runs, and values come back.

Knows what may read the prefix cache, which answers to believe, and what to do when vLLM ends. Does not know how vLLM is
reached: that is a Transport's. Made by `engines.EngineChoice`.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine.operations import Operations
from reflogp.scoring.torch_engine.sequences import Logps, Outcome, Sequence, in_order, passes_over, problem_of
from reflogp.scoring.vllm_engine.answers import Answer, Request, VllmEndedError, believable, problem_of_answer
from reflogp.scoring.vllm_engine.prefix_cache import may_read_cache, sharing_order
from reflogp.store import Reference

#: Sequences that are ordered together, and share a cache.
_WINDOW = 8_192
#: Passes that are in vLLM at a time, so that it never waits for the next one.
PASSES = 2
#: Ends of vLLM on one sequence alone, after which that sequence is given up.
_STRIKES = 2
#: Ends without a value in between, beyond those of a search.
_DEATHS = 6


class Transport(Protocol):
    """How vLLM is reached."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence."""

    @property
    def token_budget(self) -> int:
        """Tokens of one pass; two are under way at a time."""

    @property
    def reads_cache(self) -> bool:
        """Whether prefixes may be read from vLLM's cache."""

    @property
    def block_size(self) -> int | None:
        """Tokens of a block of that cache; None where vLLM says which values it did not compute."""

    def ask(self, requests: list[Request], salt: str) -> Iterator[Answer]:
        """Send requests at once; answers come as they are ready. Requests of one salt share a cache.

        Raises, while answers are read:
            VllmEndedError: vLLM ended before it had answered all, and can be started again.
            EngineError: there will be no answer.
        """

    def revive(self) -> bool:
        """Start vLLM again where it has ended; whether it had. Raises EngineError when it cannot be started."""

    def provenance(self) -> dict[str, Any]:
        """What vLLM is, and how it was asked."""

    def close(self) -> None:
        """Let go of vLLM."""


class VllmEngine:
    """Scores sequences with vLLM.

    What sequences share is computed once where vLLM's prefix cache can give it without losing a value. An answer that cannot
    be right is asked for once more without the cache, and never believed. When vLLM ends, it is started again and goes on; a
    sequence that ends it is found and left out.

    Args:
        transport: to vLLM, with the reference model loaded.
        reference: the model under the numerics that are wanted.

    Attributes:
        token_budget: tokens of one pass.
        pass_seconds: of no effect: vLLM itself computes requests of several passes in turns.
        retries: answers that were asked for again without the cache.
        restarts: times that vLLM ended and was started again.
        vocab_size: rows of the model's vocabulary.
        claim: what provenance says of weights that cannot be read; see `claim`.
    """

    def __init__(self, transport: Transport, reference: Reference) -> None:
        self._transport = transport
        self._dtype = reference.dtype
        self.vocab_size = int(reference.config.get("text_config", reference.config)["vocab_size"])
        self.token_budget = transport.token_budget
        self.pass_seconds: float | None = None
        self.claim: dict[str, Any] = {}
        self.retries = 0
        self.restarts = 0

    def score(self, sequences: list[Sequence]) -> list[Logps]:
        """token_logps of each sequence, float32, in order. Raises InvalidSequencesError where some cannot be scored."""
        problems = self.problems(sequences)
        return in_order(len(sequences), problems, self.stream(sequences, skip=problems))

    def problems(self, sequences: list[Sequence]) -> dict[int, str]:
        """Index -> why vLLM cannot score that sequence; empty when it can score all."""
        found = ((index, self._problem(sequence)) for index, sequence in enumerate(sequences))
        return {index: problem for index, problem in found if problem}

    def stream(self, sequences: list[Sequence], skip: Collection[int] = ()) -> Iterator[tuple[int, Outcome]]:
        """(index, token_logps) as they come."""
        for landed in self.passes(sequences, skip):
            yield from landed

    def passes(
        self,
        sequences: list[Sequence],
        skip: Collection[int] = (),
        temperature: float = 1.0,
        before: Callable[[list[int]], None] | None = None,
    ) -> Iterator[list[tuple[int, Outcome]]]:
        """Values pass by pass, in an order that shares prefixes; `before` is told each pass's indices.

        Raises:
            EngineError: a temperature other than 1, which vLLM does not apply to given tokens; vLLM cannot be started again.
        """
        return passes_over(sequences, skip, _WINDOW, before, lambda groups, told: self.flow(groups, temperature, told))

    def flow(
        self,
        groups: Iterable[list[Sequence]],
        temperature: float = 1.0,
        before: Callable[[list[int]], None] | None = None,
    ) -> Generator[list[tuple[int, Outcome]]]:
        """As Engine.flow. Passes of the next group are in vLLM while the last ones of a group are computed.

        Raises as `passes`.
        """
        if temperature != 1.0:
            raise EngineError(f"temperature {temperature}: vLLM computes given tokens' log-probs at 1 only; use --engine torch")
        sequences: dict[int, Sequence] = {}
        for landed in self._flow(iter(groups), sequences, before):
            for number, _ in landed:
                del sequences[number]
            yield landed

    def operations(self) -> Operations:
        """0 of both: the model's layers and the device are vLLM's, so nothing is counted."""
        return Operations()

    def peak_flops_per_second(self) -> float | None:
        """None: the device is vLLM's."""
        return None

    def provenance(self) -> dict[str, Any]:
        """How this engine makes values; stored beside them."""
        return {**self._transport.provenance(), "dtype": self._dtype, **self.claim}

    def close(self) -> None:
        """As Engine.close: vLLM's process ends, or connections to a server do."""
        self._transport.close()

    def _problem(self, sequence: Sequence) -> str | None:
        if sequence.attention_mask is not None:
            return "it is a row of a padded batch, which vLLM cannot score; use --engine torch"
        if len(sequence) > self._transport.max_tokens:
            return (
                f"it has {len(sequence)} tokens and vLLM was given room for {self._transport.max_tokens}; set a max_length, "
                "or use --engine torch"
            )
        return problem_of(sequence, self.vocab_size, None)

    def _flow(
        self,
        groups: Iterator[list[Sequence]],
        sequences: dict[int, Sequence],
        before: Callable[[list[int]], None] | None,
    ) -> Iterator[list[tuple[int, Outcome]]]:
        line: deque[_Pass] = deque()
        readers: set[int] = set()
        flying: deque[_Flight] = deque()
        suspects: set[int] = set()
        strikes = deaths = count = 0
        group: list[Sequence] | None = []
        while True:
            while len(flying) < (1 if suspects else PASSES):
                if not line and group is not None and (group := next(groups, None)):
                    numbers = range(count, count := count + len(group))
                    sequences.update(zip(numbers, group, strict=True))
                    ordered = [numbers[at] for at in sharing_order(group)]
                    readers |= self._readers(sequences, ordered)
                    salt = uuid.uuid4().hex  # what other groups left in the cache is not this one's
                    line.extend(_Pass(part, salt) for part in self._split(sequences, ordered))
                if not line:
                    break
                if before is not None:
                    before(line[0].indices)
                flying.append(_Flight(self._transport, sequences, line.popleft(), readers))
            if not flying:
                if group is None:
                    return
                yield []
                continue
            try:
                landed = flying[0].land()
            except VllmEndedError:
                lost = [index for flight in flying for index in flight.indices]
                flying.clear()
                deaths += 1
                if deaths > _DEATHS + len(sequences).bit_length():  # more than halving needs to find one that ends it
                    raise EngineError(f"vLLM ended {deaths} times and gave no value in between") from None
                self.restarts += self._transport.revive()
                strikes = strikes + 1 if len(lost) == 1 else 0
                if strikes < _STRIKES:
                    salt = uuid.uuid4().hex
                    parts = _halves(lost) if suspects and len(lost) > 1 else [lost]
                    line.extendleft(_Pass(part, salt) for part in reversed(parts))
                    suspects.update(lost)
                    continue
                landed = [(lost[0], f"vLLM ended {_STRIKES} times while it scored this alone")]
            else:
                self.retries += flying.popleft().retries
                deaths = 0
            strikes = 0
            numbers_done = {index for index, _ in landed}
            suspects -= numbers_done
            readers -= numbers_done
            yield landed

    def _readers(self, sequences: Mapping[int, Sequence], ordered: list[int]) -> set[int]:
        """Indices of the sequences that may read the cache."""
        if not self._transport.reads_cache:
            return set()
        if self._transport.block_size is None:
            return set(ordered)
        safe = may_read_cache([sequences[index] for index in ordered], self._transport.block_size)
        return {index for index, reads in zip(ordered, safe, strict=True) if reads}

    def _split(self, sequences: Mapping[int, Sequence], ordered: list[int]) -> Iterator[list[int]]:
        """`ordered` in passes of about `token_budget` tokens."""
        batch: list[int] = []
        tokens = 0
        for index in ordered:
            if batch and tokens + len(sequences[index]) > self.token_budget:
                yield batch
                batch, tokens = [], 0
            batch.append(index)
            tokens += len(sequences[index])
        if batch:
            yield batch


@dataclass(frozen=True)
class _Pass:
    """Sequences that are asked for together, and the salt of the cache that they share."""

    indices: list[int]
    salt: str


class _Flight:
    """A pass that vLLM is at.

    Attributes:
        retries: answers that were not believed, and asked for again.
    """

    def __init__(self, transport: Transport, sequences: Mapping[int, Sequence], asked: _Pass, readers: Collection[int]) -> None:
        self.indices = asked.indices
        self.retries = 0
        self._transport = transport
        self._sequences = sequences
        self._salt = asked.salt
        self._answers = transport.ask([self._request(index, index in readers) for index in self.indices], self._salt)

    def land(self) -> list[tuple[int, Outcome]]:
        """The pass's outcomes, once they are all here. Raises VllmEndedError."""
        outcomes: list[tuple[int, Outcome]] = []
        doubtful: list[int] = []
        for at, values, cached in self._answers:
            index = self.indices[at]
            if believable(values, cached, self._sequences[index]):
                outcomes.append((index, values))
            else:
                doubtful.append(index)
        self.retries += len(doubtful)
        for at, values, cached in self._transport.ask([self._request(index, False) for index in doubtful], self._salt):
            index = doubtful[at]
            good = believable(values, cached, self._sequences[index])
            outcomes.append((index, values if good else problem_of_answer(values)))
        return outcomes

    def _request(self, index: int, reads_cache: bool) -> Request:
        sequence = self._sequences[index]
        return Request(sequence.ids(), len(sequence.prompt_ids), reads_cache)


def _halves(indices: list[int]) -> list[list[int]]:
    middle = (len(indices) + 1) // 2
    return [indices[:middle], indices[middle:]]
