"""Measure how much of a pair's two completions is the same.

The similarity is computed exactly, but only if two upper bounds of it reach the required minimum. The first bound is computed
from the lengths of the completions, the second from the number of times that each token occurs in them. Longer completions
than MOST_COMPARED are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.torch_engine.sequences import common_prefix

#: Maximum number of tokens in a completion that is compared with the pair's other one; the time grows with the square.
MOST_COMPARED = 8192


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
