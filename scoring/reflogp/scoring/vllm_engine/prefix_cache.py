"""Which sequences may read vLLM's prefix cache without losing a log-prob.

Pure: token ids in, flags out. vLLM computes no values for positions that it finds in its cache, and has no way to ask that a
hit ends where the completion begins: such values are absent, or, in its older runner, whatever lay in memory. Called by both
engines, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from itertools import pairwise

import numpy as np

from reflogp.scoring.torch_engine.sequences import Sequence


def sharing_order(sequences: Several[Sequence]) -> list[int]:
    """Indices in an order that puts sequences with long common prefixes side by side: as words in a dictionary."""
    # Big-endian bytes compare as the numbers do.
    return sorted(range(len(sequences)), key=lambda at: sequences[at].ids().astype(">u4").tobytes())


def may_read_cache(ordered: Several[Sequence], block_size: int) -> list[bool]:
    """Whether each sequence may read a cache that nothing but these sequences wrote.

    vLLM reuses whole blocks. A hit on a sequence with P prompt tokens must not reach beyond P - 1, the position that predicts
    its first completion token. The longest that any other sequence has in common with it is what a neighbour in the order
    of `sharing_order` has, so a hit is at most floor(that / block_size) * block_size long.

    Args:
        ordered: in the order of `sharing_order`.
        block_size: tokens of a cache block.
    """
    common = [0, *(common_prefix(a, b) for a, b in pairwise(ordered)), 0]
    longest = [max(before, after) for before, after in pairwise(common)]
    return [
        length // block_size * block_size <= len(sequence.prompt_ids) - 1
        for length, sequence in zip(longest, ordered, strict=True)
    ]


def common_prefix(one: Sequence, other: Sequence) -> int:
    """Tokens that two sequences, prompt and completion, have in common from their beginning."""
    a, b = one.ids(), other.ids()
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
