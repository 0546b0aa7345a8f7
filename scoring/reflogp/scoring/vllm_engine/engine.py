"""Score sequences with vLLM: decide which sequences may read the prefix cache, check responses, and restart vLLM if it exits.

A Transport connects the engine to vLLM, which runs as a local process or as a server.

vLLM computes no log-probs for positions that it reads from its prefix cache: for these positions, the response contains no
values or, with vLLM's older model runner, the contents of uninitialized memory. A request cannot tell vLLM to read only prompt
positions from the cache. Therefore, the engine lets a sequence read the cache only if vLLM would still compute all log-probs of
the completion.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from reflogp.scoring.errors import EngineError
from reflogp.scoring.isolation import Isolation
from reflogp.scoring.torch_engine.sequences import (
    Logps,
    Outcome,
    Sequence,
    SequenceImages,
    TokenCounts,
    TopLogps,
    common_prefix,
    in_order,
    passes_over,
    picture_files,
    prefix_order,
    problem_of,
    top_logps_of,
)
from reflogp.scoring.vllm_engine.answers import Answer, Request, VllmEndedError, believable, problem_of_answer
from reflogp.scoring.wire import sent_images
from reflogp.store import Reference


def may_read_cache(ordered: Several[Sequence], block_size: int) -> list[bool]:
    """Return, for each sequence, whether it may read vLLM's prefix cache without losing log-probs.

    The result is valid only if the cache contains no tokens of sequences outside `ordered`. vLLM reuses whole blocks. For a
    sequence with P prompt tokens, a cache hit may cover at most P - 1 tokens, because the last prompt token predicts the first
    completion token. Because the sequences are sorted, each of them has its longest common prefix with the sequence directly
    before or after it. A cache hit is at most as long as that prefix, rounded down to whole blocks.
    """
    common = [0, *(common_prefix(a, b) for a, b in pairwise(sequence.ids() for sequence in ordered)), 0]
    longest = [max(before, after) for before, after in pairwise(common)]
    return [
        length // block_size * block_size <= len(sequence.prompt_ids) - 1
        for length, sequence in zip(longest, ordered, strict=True)
    ]


#: `passes` splits its sequences into groups of at most this many. The sequences of a group are sorted together, and can read
#: each other's cached prefixes.
_WINDOW = 8_192
#: Maximum total size of a pass's encoded images, in bytes. Two passes are in flight at the same time.
_IMAGE_BYTES = 256 << 20
#: Number of passes in flight at the same time, so that vLLM never has to wait for the next pass.
PASSES = 2
#: Maximum number of consecutive times that vLLM may exit without returning a value. `flow` increases this maximum by the
#: number of exits that a search by halving may need.
_DEATHS = 6


class Transport(Protocol):
    """A connection to vLLM.

    Attributes:
        token_budget: maximum number of tokens in a pass. Two passes are in flight at the same time.
        block_size: number of tokens in a block of vLLM's cache. None if responses show which values vLLM did not compute. In
            this case, every sequence may read the cache.
    """

    max_tokens: int
    token_budget: int
    reads_cache: bool
    block_size: int | None

    def problem_of_images(self, images: SequenceImages) -> str | None:
        """Return why vLLM cannot score a sequence with these images, as part of an error message; None if it can."""

    def ask(self, requests: list[Request], salt: str) -> Iterator[Answer]:
        """Send all requests at once; yield responses as they arrive.

        Only requests with the same salt can reuse each other's cached prefixes. If a request fails, the error is raised while
        the caller iterates over the responses.

        Raises:
            VllmEndedError: vLLM exited before it had responded to all requests. It can be restarted.
            EngineError: a request failed and will not be retried, or the engine was closed.
        """

    def revive(self) -> bool:
        """Restart vLLM if it has exited; return True if it was restarted. Raise EngineError if it cannot be restarted."""

    def provenance(self) -> dict[str, Any]:
        """Return vLLM's version and settings, including the method that reflogp uses to request log-probs."""

    def close(self) -> None: ...


class VllmEngine:
    """Scores sequences with vLLM.

    Prefixes that sequences share are computed once, unless reading them from vLLM's prefix cache would lose log-probs. If a
    response is invalid, it is discarded and its sequence is sent again without the cache. If vLLM exits, it is restarted and
    scoring continues. A sequence that makes vLLM exit is identified and skipped.

    Attributes:
        pass_seconds: maximum device time of a pass in seconds (see PassEngine). This engine ignores the limit, because vLLM
            interleaves the requests of several passes.
        claim: dict of entries that `provenance` adds. If vLLM runs as a server, whose weights reflogp cannot read, the entries
            say whether `server.check_claim` has compared the server's log-probs with locally computed log-probs. The dict is
            empty if vLLM runs as a local process.
    """

    def __init__(self, transport: Transport, reference: Reference, top_k: int = 0) -> None:
        self._transport = transport
        self.top_k = top_k
        self._dtype = reference.dtype
        self.vocab_size = int(reference.config.get("text_config", reference.config)["vocab_size"])
        self.token_budget = transport.token_budget
        self.pass_seconds: float | None = None
        self.claim: dict[str, Any] = {}
        self.retries = 0
        self.restarts = 0

    def score(self, sequences: list[Sequence]) -> list[Logps]:
        problems = self.problems(sequences)
        return in_order(len(sequences), problems, self.stream(sequences, skip=problems))

    def problems(self, sequences: list[Sequence]) -> dict[int, str]:
        found = ((index, self._problem(sequence)) for index, sequence in enumerate(sequences))
        return {index: problem for index, problem in found if problem}

    def stream(self, sequences: list[Sequence], skip: Collection[int] = ()) -> Iterator[tuple[int, Outcome]]:
        for landed in self.passes(sequences, skip):
            yield from landed

    def passes(
        self,
        sequences: list[Sequence],
        skip: Collection[int] = (),
        temperature: float = 1.0,
    ) -> Iterator[list[tuple[int, Outcome]]]:
        """Sequences are sorted before they are sent, so that sequences with common prefixes are adjacent."""
        return passes_over(sequences, skip, _WINDOW, lambda groups: self.flow(groups, temperature))

    def flow(
        self,
        groups: Iterable[list[Sequence]],
        temperature: float = 1.0,
    ) -> Generator[list[tuple[int, Outcome]]]:
        """The first pass of the next group is sent to vLLM while the last pass of the current group is still being computed."""
        if temperature != 1.0:
            raise EngineError(
                f"temperature {temperature}: vLLM computes log-probs of given tokens only at temperature 1; use --engine torch"
            )
        coming = iter(groups)
        sequences: dict[int, Sequence] = {}
        line: deque[_Pass] = deque()
        readers: set[int] = set()
        flying: deque[_Flight] = deque()
        suspects: set[int] = set()
        isolation: Isolation[int] = Isolation()
        deaths = count = 0
        group: list[Sequence] | None = []
        while True:
            while len(flying) < (1 if suspects else PASSES):
                if not line and group is not None and (group := next(coming, None)):
                    numbers = range(count, count := count + len(group))
                    sequences.update(zip(numbers, group, strict=True))
                    ordered = [numbers[at] for at in prefix_order([sequence.ids() for sequence in group])]
                    readers |= self._readers(sequences, ordered)
                    salt = uuid.uuid4().hex  # this group must not read other groups' cache entries
                    line.extend(_Pass(part, salt) for part in self._split(sequences, ordered))
                if not line:
                    break
                flying.append(_Flight(self._transport, sequences, line.popleft(), readers, self.top_k))
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
                if deaths > _DEATHS + len(sequences).bit_length():  # a search by halving needs fewer exits
                    raise EngineError(
                        f"vLLM exited {deaths} times without returning a value; set REFLOGP_VLLM_LOG=1 to see vLLM's log"
                    ) from None
                self.restarts += self._transport.revive()
                salt = uuid.uuid4().hex
                parts, killer = isolation.died(lost)
                line.extendleft(_Pass(part, salt) for part in reversed(parts))
                suspects.update(lost)
                if killer is None:
                    continue
                landed = [(killer, "vLLM exited twice while it was scoring this sequence alone; use --engine torch")]
            else:
                self.retries += flying.popleft().retries
                deaths = 0
            numbers_done = {index for index, _ in landed}
            suspects -= numbers_done
            readers -= numbers_done
            for number in numbers_done:
                del sequences[number]
            yield landed

    def token_counts(self) -> TokenCounts:
        """Return counts of 0, because this process does not know which tokens vLLM reads from its prefix cache."""
        return TokenCounts()

    def provenance(self) -> dict[str, Any]:
        return {**self._transport.provenance(), "dtype": self._dtype, **self.claim}

    def close(self) -> None:
        self._transport.close()

    def _problem(self, sequence: Sequence) -> str | None:
        if sequence.attention_mask is not None:
            return "the sequence is a row of a padded batch, and vLLM cannot score such rows; use --engine torch"
        if sequence.images is not None:
            reason = self._transport.problem_of_images(sequence.images)
            if reason is not None:
                return f"the sequence has images, but {reason}; use --engine torch"
        if len(sequence) > self._transport.max_tokens:
            return (
                f"the sequence has {len(sequence)} tokens, but vLLM accepts at most {self._transport.max_tokens}; "
                f"set max_length to at most {self._transport.max_tokens}, or use --engine torch"
            )
        return problem_of(sequence, self.vocab_size, None)

    def _readers(self, sequences: Mapping[int, Sequence], ordered: list[int]) -> set[int]:
        if not self._transport.reads_cache:
            return set()
        if self._transport.block_size is None:
            return set(ordered)
        safe = may_read_cache([sequences[index] for index in ordered], self._transport.block_size)
        return {index for index, reads in zip(ordered, safe, strict=True) if reads}

    def _split(self, sequences: Mapping[int, Sequence], ordered: list[int]) -> Iterator[list[int]]:
        """Split `ordered` into passes, each with at most `token_budget` tokens and `_IMAGE_BYTES` bytes of encoded images."""
        batch: list[int] = []
        tokens = size = 0
        digests: set[bytes] = set()
        for index in ordered:
            pictures = {picture.digest: picture.size for picture in sequences[index].pictures}
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
    indices: list[int]
    salt: str


class _Flight:
    def __init__(
        self,
        transport: Transport,
        sequences: Mapping[int, Sequence],
        asked: _Pass,
        readers: Collection[int],
        top_k: int,
    ) -> None:
        self._top_k = top_k
        self.indices = asked.indices
        self.retries = 0
        self._transport = transport
        self._sequences = sequences
        self._salt = asked.salt
        self._files, unreadable = picture_files(sequences[index] for index in self.indices)
        self._unread: list[tuple[int, Outcome]] = [(self.indices[at], problem) for at, problem in unreadable.items()]
        self._asked = [index for at, index in enumerate(self.indices) if at not in unreadable]
        self._answers = self._ask(self._asked, readers)

    def land(self) -> list[tuple[int, Outcome]]:
        outcomes: list[tuple[int, Outcome]] = []
        doubtful: list[int] = []
        for at, values, cached, problem in self._answers:
            index = self._asked[at]
            if problem is not None:
                outcomes.append((index, problem))
            elif believable(values, cached, self._sequences[index], self._top_k):
                outcomes.append((index, self._outcome(values)))
            else:
                doubtful.append(index)
        self.retries += len(doubtful)
        for at, values, cached, problem in self._ask(doubtful, ()):
            good = problem is None and believable(values, cached, self._sequences[doubtful[at]], self._top_k)
            outcomes.append((doubtful[at], self._outcome(values) if good else problem or problem_of_answer(values)))
        return [*self._unread, *outcomes]

    def _outcome(self, values: Any) -> Outcome:
        if not self._top_k:
            outcome: Outcome = values
            return outcome
        found = top_logps_of(values.reshape(-1, 1 + 2 * self._top_k))
        order = np.lexsort((found.ids, -found.logps))  # of equal log-probs, the lower id comes first
        logps, ids = np.take_along_axis(found.logps, order, 1), np.take_along_axis(found.ids, order, 1)
        return TopLogps(found.token_logps, logps, ids)

    def _ask(self, indices: list[int], readers: Collection[int]) -> Iterator[Answer]:
        requests = []
        for index in indices:
            sequence = self._sequences[index]
            requests.append(
                Request(sequence.ids(), len(sequence.prompt_ids), index in readers, sent_images(sequence, self._files))
            )
        return self._transport.ask(requests, self._salt)
