"""Score sequences with vLLM: choose which sequences may read the prefix cache, check responses, and restart vLLM if it ended.

A Transport connects the engine to vLLM: a process of this machine or a server.

vLLM computes no values for positions that it finds in its prefix cache, and a request cannot limit a hit to the prompt. The
values of such positions are absent, or, in vLLM's older runner, uninitialized memory. So the engine chooses which sequences may
read the cache without losing a log-prob.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine.sequences import (
    Logps,
    Operations,
    Outcome,
    Sequence,
    SequenceImages,
    in_order,
    passes_over,
    problem_of,
)
from reflogp.scoring.vllm_engine.answers import (
    Answer,
    Request,
    RequestImages,
    VllmEndedError,
    believable,
    problem_of_answer,
)
from reflogp.store import Reference


def sharing_order(sequences: Several[Sequence]) -> list[int]:
    """Return indices that sort the sequences lexicographically by token ids, so that long common prefixes are adjacent."""
    # Big-endian bytes sort like the numbers.
    return sorted(range(len(sequences)), key=lambda at: sequences[at].ids().astype(">u4").tobytes())


def may_read_cache(ordered: Several[Sequence], block_size: int) -> list[bool]:
    """Return, for each sequence, True if it may read a cache that only these sequences write to.

    vLLM reuses whole blocks. A cache hit of a sequence with P prompt tokens must cover at most P - 1 tokens, because token P -
    1 (counted from 0) predicts the first completion token. In the order of `sharing_order` the longest prefix that a sequence
    has in common with any other sequence is shared with a neighbour. A cache hit is at most as long as this prefix, rounded
    down to whole blocks.

    Args:
        ordered: sequences in the order of `sharing_order`.
        block_size: number of tokens of a cache block.
    """
    common = [0, *(common_prefix(a, b) for a, b in pairwise(ordered)), 0]
    longest = [max(before, after) for before, after in pairwise(common)]
    return [
        length // block_size * block_size <= len(sequence.prompt_ids) - 1
        for length, sequence in zip(longest, ordered, strict=True)
    ]


def common_prefix(one: Sequence, other: Sequence) -> int:
    """Return the number of tokens in the common prefix of two sequences, which may extend into the completions."""
    a, b = one.ids(), other.ids()
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size


#: Number of sequences that are ordered together and share a cache.
_WINDOW = 8_192
#: Maximum number of bytes of the encoded images of a pass. Two passes are in flight.
_IMAGE_BYTES = 256 << 20
#: Number of passes that vLLM has at the same time, so that it never waits for the next pass.
PASSES = 2
#: A sequence is left out after vLLM has ended this many times while it scored that sequence alone.
_STRIKES = 2
#: Maximum number of times in a row that vLLM may end without returning a value; ends during a search by halving do not count.
_DEATHS = 6


class Transport(Protocol):
    """A connection to vLLM."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens in a sequence that vLLM can score."""

    @property
    def token_budget(self) -> int:
        """Number of tokens of one pass; two passes are in flight at the same time."""

    @property
    def reads_cache(self) -> bool:
        """True if prefixes may be read from vLLM's cache."""

    @property
    def block_size(self) -> int | None:
        """Number of tokens of a block of vLLM's cache; None if vLLM itself reports which values it did not compute."""

    def problem_of_images(self, images: SequenceImages) -> str | None:
        """Return why vLLM cannot score a sequence with these images, as a clause, or None if vLLM can."""

    def ask(self, requests: list[Request], salt: str) -> Iterator[Answer]:
        """Send all requests now; yield responses as they arrive. Requests with the same salt share a cache.

        Raises, while responses are read:
            VllmEndedError: vLLM ended before it had answered all requests, and can be started again.
            EngineError: there will be no response.
        """

    def revive(self) -> bool:
        """Start vLLM again if it has ended; return True if it was started. Raises EngineError if vLLM cannot be started."""

    def provenance(self) -> dict[str, Any]:
        """Return vLLM's version and settings, and the method of its requests."""

    def close(self) -> None:
        """End vLLM's process, or close the connections to the server."""


class VllmEngine:
    """Scores sequences with vLLM.

    Prefixes that sequences share are computed once, unless reading them from vLLM's prefix cache would lose log-probs. An
    invalid response is discarded, and its sequence is sent once more without the cache. If vLLM ends, it is started again and
    scoring continues; a sequence that makes vLLM end is found and left out.

    Args:
        transport: connection to vLLM, which has the reference model loaded.
        reference: the reference whose values are computed.

    Attributes:
        token_budget: number of tokens of one pass.
        pass_seconds: has no effect, because vLLM itself interleaves the requests of several passes.
        retries: number of sequences that were sent again without the cache.
        restarts: number of times that vLLM ended and was started again.
        vocab_size: number of tokens of the model's vocabulary.
        claim: provenance of a server's weights, which cannot be read; see `server.check_claim`. Empty for a local process.
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
        """Return token_logps of each sequence, float32, in order.

        Raises InvalidSequencesError if some sequences cannot be scored.
        """
        problems = self.problems(sequences)
        return in_order(len(sequences), problems, self.stream(sequences, skip=problems))

    def problems(self, sequences: list[Sequence]) -> dict[int, str]:
        """Return the problems of the sequences that vLLM cannot score, by index."""
        found = ((index, self._problem(sequence)) for index, sequence in enumerate(sequences))
        return {index: problem for index, problem in found if problem}

    def stream(self, sequences: list[Sequence], skip: Collection[int] = ()) -> Iterator[tuple[int, Outcome]]:
        """Yield (index, outcome) of one sequence at a time, as passes finish."""
        for landed in self.passes(sequences, skip):
            yield from landed

    def passes(
        self,
        sequences: list[Sequence],
        skip: Collection[int] = (),
        temperature: float = 1.0,
        before: Callable[[list[int]], None] | None = None,
    ) -> Iterator[list[tuple[int, Outcome]]]:
        """Yield a list of (index, outcome) for each pass, in an order in which neighbours share prefixes.

        `before` is called with the indices of each pass before the pass is sent.

        Raises:
            EngineError: the temperature is not 1 (vLLM computes log-probs of given tokens at temperature 1 only), or vLLM
                cannot be started again.
        """
        return passes_over(sequences, skip, _WINDOW, before, lambda groups, told: self.flow(groups, temperature, told))

    def flow(
        self,
        groups: Iterable[list[Sequence]],
        temperature: float = 1.0,
        before: Callable[[list[int]], None] | None = None,
    ) -> Generator[list[tuple[int, Outcome]]]:
        """Score groups of sequences as they arrive; see PassEngine.flow.

        The next group's first pass is sent to vLLM while a group's last pass is computed. Raises the errors of `passes`.
        """
        if temperature != 1.0:
            raise EngineError(
                f"temperature {temperature}: vLLM computes log-probs of given tokens at 1 only; use --engine torch"
            )
        sequences: dict[int, Sequence] = {}
        for landed in self._flow(iter(groups), sequences, before):
            for number, _ in landed:
                del sequences[number]
            yield landed

    def operations(self) -> Operations:
        """Return 0 for both counts: the operations of vLLM's layers cannot be counted here."""
        return Operations()

    def peak_flops_per_second(self) -> float | None:
        """Return None: the device belongs to vLLM."""
        return None

    def provenance(self) -> dict[str, Any]:
        """Return how this engine computes values; it is stored with the values."""
        return {**self._transport.provenance(), "dtype": self._dtype, **self.claim}

    def close(self) -> None:
        """End vLLM's process, or close the connections to the server; see Engine.close."""
        self._transport.close()

    def _problem(self, sequence: Sequence) -> str | None:
        if sequence.attention_mask is not None:
            return "the sequence is a row of a padded batch, which vLLM cannot score; use --engine torch"
        if sequence.images is not None:
            reason = self._transport.problem_of_images(sequence.images)
            if reason is not None:
                return f"the sequence has images, and {reason}; use --engine torch"
        if len(sequence) > self._transport.max_tokens:
            return (
                f"the sequence has {len(sequence)} tokens, but vLLM has room for {self._transport.max_tokens}; set a "
                "max_length, or use --engine torch"
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
                    salt = uuid.uuid4().hex  # this group must not read cache entries of other groups
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
                if deaths > _DEATHS + len(sequences).bit_length():  # a search by halving ends vLLM fewer times
                    raise EngineError(f"vLLM ended {deaths} times and gave no value in between") from None
                self.restarts += self._transport.revive()
                strikes = strikes + 1 if len(lost) == 1 else 0
                if strikes < _STRIKES:
                    salt = uuid.uuid4().hex
                    parts = _halves(lost) if suspects and len(lost) > 1 else [lost]
                    line.extendleft(_Pass(part, salt) for part in reversed(parts))
                    suspects.update(lost)
                    continue
                landed = [(lost[0], f"vLLM ended {_STRIKES} times while it scored this sequence alone")]
            else:
                self.retries += flying.popleft().retries
                deaths = 0
            strikes = 0
            numbers_done = {index for index, _ in landed}
            suspects -= numbers_done
            readers -= numbers_done
            yield landed

    def _readers(self, sequences: Mapping[int, Sequence], ordered: list[int]) -> set[int]:
        """Return the indices of the sequences that may read the cache."""
        if not self._transport.reads_cache:
            return set()
        if self._transport.block_size is None:
            return set(ordered)
        safe = may_read_cache([sequences[index] for index in ordered], self._transport.block_size)
        return {index for index, reads in zip(ordered, safe, strict=True) if reads}

    def _split(self, sequences: Mapping[int, Sequence], ordered: list[int]) -> Iterator[list[int]]:
        """Split `ordered` into passes of at most `token_budget` tokens and _IMAGE_BYTES of images.

        A sequence that exceeds one of the limits is a pass of its own.
        """
        batch: list[int] = []
        tokens = size = 0
        digests: set[bytes] = set()
        for index in ordered:
            images = sequences[index].images
            pictures = {} if images is None else {picture.digest: picture.size for picture in images.pictures}
            added = sum(pictures[digest] for digest in pictures.keys() - digests)
            if batch and (tokens + len(sequences[index]) > self.token_budget or size + added > _IMAGE_BYTES):
                yield batch
                batch, tokens, size, digests, added = [], 0, 0, set(), sum(pictures.values())
            batch.append(index)
            tokens += len(sequences[index])
            size += added
            digests |= pictures.keys()
        if batch:
            yield batch


@dataclass(frozen=True)
class _Pass:
    """Indices of sequences that are sent together, and the salt of the cache that they share."""

    indices: list[int]
    salt: str


class _Flight:
    """A pass in flight.

    Attributes:
        indices: indices of its sequences.
        retries: number of sequences whose responses were discarded and that were sent again.
    """

    def __init__(self, transport: Transport, sequences: Mapping[int, Sequence], asked: _Pass, readers: Collection[int]) -> None:
        self.indices = asked.indices
        self.retries = 0
        self._transport = transport
        self._sequences = sequences
        self._salt = asked.salt
        self._files: dict[bytes, bytes] = {}
        self._unread: list[tuple[int, Outcome]] = []
        self._asked, self._answers = self._ask(self.indices, readers)

    def land(self) -> list[tuple[int, Outcome]]:
        """Wait for all responses and return the outcomes of the pass. Raises VllmEndedError."""
        outcomes: list[tuple[int, Outcome]] = []
        doubtful: list[int] = []
        for at, values, cached, problem in self._answers:
            index = self._asked[at]
            if problem is not None:
                outcomes.append((index, problem))
            elif believable(values, cached, self._sequences[index]):
                outcomes.append((index, values))
            else:
                doubtful.append(index)
        self.retries += len(doubtful)
        again, answers = self._ask(doubtful, ())
        for at, values, cached, problem in answers:
            good = problem is None and believable(values, cached, self._sequences[again[at]])
            outcomes.append((again[at], values if good else problem or problem_of_answer(values)))
        return [*self._unread, *outcomes]

    def _ask(self, indices: list[int], readers: Collection[int]) -> tuple[list[int], Iterator[Answer]]:
        """Send the requests of some sequences; return the indices of the sequences that were sent, and the responses.

        If an image can no longer be read, the error is the outcome of its sequences.
        """
        requests: dict[int, Request] = {}
        for index in indices:
            sequence = self._sequences[index]
            try:
                images = self._images(sequence)
            except ValueError as error:
                self._unread.append((index, str(error)))
                continue
            requests[index] = Request(sequence.ids(), len(sequence.prompt_ids), index in readers, images)
        return list(requests), self._transport.ask(list(requests.values()), self._salt)

    def _images(self, sequence: Sequence) -> RequestImages | None:
        images = sequence.images
        if images is None:
            return None
        for picture in images.pictures:
            if picture.digest not in self._files:
                self._files[picture.digest] = picture.encoded()
        files = tuple(self._files[digest] for digest in images.digests)
        return RequestImages(images.digests, images.counts, files, images.vision.image_token_id)


def _halves(indices: list[int]) -> list[list[int]]:
    middle = (len(indices) + 1) // 2
    return [indices[:middle], indices[middle:]]
