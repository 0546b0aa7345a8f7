"""Compute MinHash sketches of examples, find near duplicates, and measure the similarity of two completions.

Each example has two sketches, one of its prompt and one of its completions. A sketch describes the set of all runs (three
adjacent tokens) in its text. It has 64 entries, one for each of 64 hash functions. An entry is the minimum of its hash
function over all runs (Broder, 1997). Entries are shortened to 16 bits, so the two sketches take 256 bytes. The fraction of
entries in which two sketches agree estimates the Jaccard similarity of their sets of runs.

The 64 entries form 16 groups of four. Two examples are compared only if their completion sketches agree in all four entries of
a group, which happens in a given group with probability 0.41 at a similarity of 0.8. If more than two examples agree in a
group, each of these examples is compared only with the first of them and with the one directly before it. The work therefore
grows with the number of examples, not with its square.

The similarity of a pair's chosen and rejected completion is not estimated from sketches. It is computed exactly, but only if
two upper bounds of the similarity reach the required minimum. The first bound is computed from the lengths of the completions,
the second from the number of times that each token occurs in them. Longer completions than MOST_COMPARED are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.torch_engine.sequences import common_prefix
from reflogp.store.keys import list_lengths
from reflogp.store.windows import without_first

#: Number of tokens in a run.
RUN_TOKENS = 3
HASHES = 64
#: Two examples are near duplicates if the estimated similarity of their prompts and that of their completions both reach this
#: minimum.
NEAR = 0.8
#: Maximum number of examples that are sketched. The two sketches of an example take 256 bytes.
MOST_SKETCHED = 1_000_000
#: Maximum number of tokens in a completion that is compared with the pair's other one; the time grows with the square.
MOST_COMPARED = 8192
_COMPARED_AT_ONCE = 1 << 14
_NO_TOKEN = 0xFFFFFFFF
_EMPTY = np.uint32(0xFFFFFFFF)

Uint32s = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class NearPairs:
    """The indices of n pairs of examples, and the estimated similarities of their prompts and of their completions."""

    first: npt.NDArray[np.int64]
    second: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.float64]
    completions: npt.NDArray[np.float64]

    def __getitem__(self, places: npt.NDArray[Any]) -> NearPairs:
        return NearPairs(self.first[places], self.second[places], self.prompts[places], self.completions[places])


class Sketches:
    def __init__(self) -> None:
        numbers = np.random.default_rng(0)  # a fixed seed, so that reports are reproducible
        self._factors = numbers.integers(0, 1 << 32, HASHES, dtype=np.uint32) | np.uint32(1)
        self._shifts = numbers.integers(0, 1 << 32, HASHES, dtype=np.uint32)
        self._prompts: list[npt.NDArray[np.uint16]] = []
        self._completions: list[npt.NDArray[np.uint16]] = []
        self._start: Uint32s | None = None
        self.count = 0

    def add(self, prompts: pa.LargeListArray, completions: Sequence[pa.LargeListArray]) -> None:
        """Add the sketches of n examples. Examples after the first MOST_SKETCHED are ignored.

        If all prompts of the first call begin with the same tokens (a system prompt, a template), these tokens are ignored in
        every prompt that begins with them.

        Args:
            prompts: large_list<uint32> with n lists.
            completions: for each completion column, a large_list<uint32> with n lists. All completions of an example go into
                one sketch.
        """
        room = MOST_SKETCHED - self.count
        if room <= 0 or not len(prompts):
            return
        prompts, completions = prompts.slice(0, room), [lists.slice(0, room) for lists in completions]
        if self._start is None:
            self._start = _shared_start(prompts)
        self._prompts.append(self._minima(without_first(prompts, _begins_with(prompts, self._start))).astype(np.uint16))
        both = np.minimum.reduce([self._minima(lists) for lists in completions])
        self._completions.append(both.astype(np.uint16))
        self.count += len(prompts)

    def near(self, repeats: npt.NDArray[np.bool_]) -> NearPairs:
        """Return pairs of near duplicates, most similar first. In each pair, `second` is the example that was added later.

        `repeats` is True for exact duplicates of earlier examples, bool (n,). These are ignored.
        """
        self._prompts, self._completions = [np.concatenate(self._prompts)], [np.concatenate(self._completions)]
        examples = np.flatnonzero(~repeats[: self.count])
        prompts, completions = self._prompts[0][examples], self._completions[0][examples]
        first, second = _candidates(completions.view(np.uint64))
        of_prompts, of_completions = np.zeros(len(first)), np.zeros(len(first))
        for at in range(0, len(first), _COMPARED_AT_ONCE):
            part = slice(at, at + _COMPARED_AT_ONCE)
            of_prompts[part] = (prompts[first[part]] == prompts[second[part]]).mean(1)
            of_completions[part] = (completions[first[part]] == completions[second[part]]).mean(1)
        least = np.minimum(of_prompts, of_completions)
        order = np.lexsort((second, first, -least))
        return NearPairs(examples[first], examples[second], of_prompts, of_completions)[order[least[order] >= NEAR]]

    def _minima(self, lists: pa.LargeListArray) -> Uint32s:
        """For each list, return the smallest value of each hash function over the list's runs, uint32 (n, HASHES)."""
        offsets = lists.offsets.to_numpy()
        offsets, values = offsets - offsets[0], lists.values.to_numpy()[offsets[0] : offsets[-1]]
        runs = _runs(values, offsets)
        minima = np.full((len(lists), HASHES), _EMPTY)
        filled = np.flatnonzero(np.diff(offsets))
        if len(filled):
            for number, (factor, shift) in enumerate(zip(self._factors, self._shifts, strict=True)):
                minima[filled, number] = np.minimum.reduceat(runs * factor + shift, offsets[:-1][filled])
        return minima


def _runs(values: Uint32s, offsets: npt.NDArray[np.int64]) -> Uint32s:
    """For each token, return a hash of the run that begins at it; runs that extend beyond the end of a list are padded."""
    ends = np.repeat(offsets[1:], np.diff(offsets))
    places = np.arange(len(values))
    runs = np.zeros(len(values), np.uint32)
    padded = np.concatenate([values, np.full(RUN_TOKENS, _NO_TOKEN, np.uint32)])
    for ahead in range(RUN_TOKENS):
        token = np.where(places + ahead < ends, padded[ahead : ahead + len(values)], np.uint32(_NO_TOKEN))
        runs = (runs ^ token) * np.uint32(0x9E3779B1)
        runs ^= runs >> np.uint32(15)
    runs *= np.uint32(0x85EBCA6B)
    runs ^= runs >> np.uint32(13)
    return runs


def _candidates(bands: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the indices of the examples to compare: first[i] with second[i]. In `bands`, uint64 (n, 16), each group of four
    16-bit entries of the completions' sketches is one number."""
    count = len(bands)
    codes: list[npt.NDArray[np.int64]] = []
    for band in range(bands.shape[1]):
        order = np.argsort(bands[:, band], kind="stable")
        same = np.concatenate([[False], np.diff(bands[order, band]) == 0])
        heads = order[np.maximum.accumulate(np.where(same, 0, np.arange(count)))]
        later = np.flatnonzero(same)
        codes += [heads[later] * count + order[later], order[later - 1] * count + order[later]]
    found = np.unique(np.concatenate(codes))
    return found // max(1, count), found % max(1, count)


def _shared_start(prompts: pa.LargeListArray) -> Uint32s:
    offsets, values = prompts.offsets.to_numpy(), prompts.values.to_numpy()
    start: Uint32s = values[offsets[0] : offsets[0] + list_lengths(prompts).min()]
    for at in offsets[:-1]:
        start = start[: common_prefix(start, values[at : at + len(start)])]
    return start


def _begins_with(prompts: pa.LargeListArray, start: Uint32s) -> npt.NDArray[np.int64]:
    """Return len(start) for each prompt that begins with `start`, and 0 for every other prompt."""
    offsets, values = prompts.offsets.to_numpy(), prompts.values.to_numpy()
    long_enough = np.flatnonzero(list_lengths(prompts) >= len(start))
    cut = np.zeros(len(prompts), np.int64)
    if len(start) and len(long_enough):
        first = values[offsets[:-1][long_enough][:, None] + np.arange(len(start))]
        cut[long_enough[(first == start).all(1)]] = len(start)
    return cut


def shared_starts(left: pa.LargeListArray, right: pa.LargeListArray) -> npt.NDArray[np.int32]:
    """Return the number of leading tokens that left[i] and right[i] have in common, int32 (n,)."""
    pairs = zip(*(np.split(lists.values.to_numpy(), lists.offsets.to_numpy())[1:-1] for lists in (left, right)), strict=True)
    return np.array([common_prefix(one, other) for one, other in pairs], np.int32)


def similarities(left: pa.LargeListArray, right: pa.LargeListArray, at_least: float) -> npt.NDArray[np.float32]:
    """Return the `similarity` of left[i] and right[i] for each i, or 0 where it is below `at_least`: float32 (n,)."""
    left_at, right_at = left.offsets.to_numpy(), right.offsets.to_numpy()
    lengths = np.diff(left_at), np.diff(right_at)
    most = 2 * np.minimum(*lengths) / np.maximum(lengths[0] + lengths[1], 1)
    most[np.maximum(*lengths) > MOST_COMPARED] = 0.0
    found = np.zeros(len(left), np.float32)
    left_ids, right_ids = left.values.to_numpy(), right.values.to_numpy()
    for i in np.flatnonzero(most >= at_least):
        value = similarity(
            left_ids[left_at[i] : left_at[i + 1]].tolist(), right_ids[right_at[i] : right_at[i + 1]].tolist(), at_least
        )
        found[i] = value if value >= at_least else 0.0
    return found


def similarity(left: Sequence[int], right: Sequence[int], at_least: float = 0.0) -> float:
    """Return the fraction of the two lists' tokens that are in their longest common subsequence.

    If an upper bound, from tokens regardless of their order, is below `at_least`, the bound is returned instead.
    """
    both = len(left) + len(right)
    if not both:
        return 1.0
    bound = 2 * (Counter(left) & Counter(right)).total() / both
    return bound if bound < at_least else 2 * _common_subsequence(left, right) / both


def _common_subsequence(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common subsequence (bit-parallel algorithm; Hyyrö, 2004)."""
    shorter, longer = sorted((left, right), key=len)
    places: dict[int, int] = {}
    for at, token in enumerate(shorter):
        places[token] = places.get(token, 0) | 1 << at
    every = (1 << len(shorter)) - 1
    row = every
    for token in longer:
        matches = row & places.get(token, 0)
        row = ((row + matches) | (row - matches)) & every
    return len(shorter) - row.bit_count()
