"""Choose which sequences may read vLLM's prefix cache without losing a log-prob. Token ids in, flags out.

vLLM computes no values for positions that it finds in its cache, and a request cannot limit a hit to the prompt. The values of
such positions are absent, or, in vLLM's older runner, uninitialized memory.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from itertools import pairwise

import numpy as np

from reflogp.scoring.torch_engine.sequences import Sequence


def sharing_order(sequences: Several[Sequence]) -> list[int]:
    """Return indices in dictionary order of the token ids, so that sequences with long common prefixes are neighbours."""
    # Big-endian bytes sort like the numbers.
    return sorted(range(len(sequences)), key=lambda at: sequences[at].ids().astype(">u4").tobytes())


def may_read_cache(ordered: Several[Sequence], block_size: int) -> list[bool]:
    """Return for each sequence whether it may read a cache that only these sequences write to.

    vLLM reuses whole blocks. A hit of a sequence with P prompt tokens must cover at most P - 1 tokens, because token P - 1
    (counted from 0) predicts the first completion token. In the order of `sharing_order` the longest prefix that a sequence has
    in common with any other sequence is the one with a neighbour. A hit is at most that length, rounded down to whole blocks.

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
    """Return how many tokens the common prefix of two sequences has; prompt and completion both count."""
    a, b = one.ids(), other.ids()
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
