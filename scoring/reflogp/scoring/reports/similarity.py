"""Compute the similarity of two completions, token by token: exactly, and only if the two can be nearly the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def shared_starts(left: pa.LargeListArray, right: pa.LargeListArray) -> npt.NDArray[np.int32]:
    """Return the number of leading tokens that left[i] and right[i] share, int32 (n,).

    Args:
        left, right: large_list<uint32>, n lists each, as returned by `keys.token_lists`.
    """
    left_at, right_at = left.offsets.to_numpy(), right.offsets.to_numpy()
    compared = np.minimum(np.diff(left_at), np.diff(right_at))
    begins = np.concatenate([[0], np.cumsum(compared)])
    within = np.arange(begins[-1]) - np.repeat(begins[:-1], compared)
    tokens = [
        lists.values.to_numpy()[np.repeat(at[:-1], compared) + within] for lists, at in ((left, left_at), (right, right_at))
    ]
    differs_at = np.where(tokens[0] == tokens[1], np.iinfo(np.int64).max, within)
    first = np.minimum.reduceat(np.append(differs_at, 0), begins[:-1]) if len(compared) else compared
    return np.where(compared > 0, np.minimum(first, compared), 0).astype(np.int32)


def similarities(left: pa.LargeListArray, right: pa.LargeListArray, at_least: float) -> npt.NDArray[np.float32]:
    """Return the `similarity` of left[i] and right[i], float32 (n,); 0 for one below `at_least`."""
    left_at, right_at = left.offsets.to_numpy(), right.offsets.to_numpy()
    lengths = np.diff(left_at), np.diff(right_at)
    most = 2 * np.minimum(*lengths) / np.maximum(lengths[0] + lengths[1], 1)
    found = np.zeros(len(left), np.float32)
    left_ids, right_ids = left.values.to_numpy(), right.values.to_numpy()
    for i in np.flatnonzero(most >= at_least):
        value = similarity(
            left_ids[left_at[i] : left_at[i + 1]].tolist(), right_ids[right_at[i] : right_at[i + 1]].tolist(), at_least
        )
        found[i] = value if value >= at_least else 0.0
    return found


def similarity(left: Sequence[int], right: Sequence[int], at_least: float = 0.0) -> float:
    """Return the share of both sides' tokens in their longest common subsequence: 1 for equal sides, 0 for nothing shared.

    A result below `at_least` may be an upper bound instead: common tokens in any order are counted first, which is fast.
    """
    both = len(left) + len(right)
    if not both:
        return 1.0
    bound = 2 * (Counter(left) & Counter(right)).total() / both
    return bound if bound < at_least else 2 * _common_subsequence(left, right) / both


def _common_subsequence(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common subsequence; each row of the table is the bits of one integer (Hyyrö, 2004)."""
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
