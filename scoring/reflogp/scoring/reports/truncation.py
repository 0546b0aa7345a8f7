"""What a max_length would cut, from lengths alone: exact for every example, whether it has values or not.

Knows what `reflogp.store.windows` makes of TRL's max_length and truncation_mode. Does not know tokens. Called by `build`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: What is looked at; up to the first that cuts nothing.
MAX_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
#: max_length of TRL's DPOConfig and KTOConfig where it is not set.
TRL_MAX_LENGTH = 1024

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Lengths:
    """Tokens of n examples.

    Attributes:
        prompts: (n,).
        completions: one (n,) for each completion of an example.
        shared: leading tokens that both completions of a pair share, (n,); None where there are no pairs.
    """

    prompts: Int32s
    completions: Sequence[Int32s]
    shared: Int32s | None = None

    def whole(self) -> Int32s:
        """Tokens of each example's longest sequence."""
        longest: Int32s = self.prompts + np.maximum.reduce(list(self.completions))
        return longest


@dataclass(frozen=True)
class Cut:
    """What one max_length does to a dataset.

    Attributes:
        max_length: tokens of prompt and completion together.
        examples: all of them.
        dropped: examples that TRL leaves out, because the prompt alone fills max_length (keep_start only).
        touched: examples that are kept, and lose tokens of a sequence.
        tokens: completion tokens of all examples; `lost`: the kept ones' outside of the window; `dropped_tokens`: the others'.
        same: pairs that are kept and whose completions differ only in what is cut; None where that is not looked at.
    """

    max_length: int
    examples: int
    dropped: int
    touched: int
    tokens: int
    lost: int
    dropped_tokens: int
    same: int | None


def cut(lengths: Lengths, max_length: int, truncation_mode: str) -> Cut:
    """What a max_length does under "keep_start" or "keep_end"."""
    from_start = truncation_mode == "keep_start"
    dropped = (lengths.prompts >= max_length) & from_start
    kept = ~dropped
    touched = np.zeros(len(kept), bool)
    lost = 0
    for completion in lengths.completions:
        over = np.maximum(lengths.prompts.astype(np.int64) + completion - max_length, 0)
        touched |= over > 0
        lost += int((over if from_start else np.maximum(completion.astype(np.int64) - max_length, 0))[kept].sum())
    same = None
    if lengths.shared is not None and from_start:
        left, right = (np.minimum(completion, max_length - lengths.prompts) for completion in lengths.completions)
        alike = (left == right) & (lengths.shared >= left)
        same = int((alike & kept & touched).sum())
    tokens = [completion.sum(dtype=np.int64) for completion in lengths.completions]
    dropped_tokens = [completion[dropped].sum(dtype=np.int64) for completion in lengths.completions]
    return Cut(
        max_length,
        len(kept),
        int(dropped.sum()),
        int((touched & kept).sum()),
        int(sum(tokens)),
        lost,
        int(sum(dropped_tokens)),
        same,
    )


def cuts(lengths: Lengths, asked: int | None, truncation_mode: str) -> list[Cut]:
    """Of MAX_LENGTHS and the one that is asked for, up to the first that cuts nothing."""
    found = []
    for max_length in sorted({*MAX_LENGTHS, *([] if asked is None else [asked])}):
        found.append(cut(lengths, max_length, truncation_mode))
        if not found[-1].touched and not found[-1].dropped and max_length >= (asked or 0):
            break
    return found


def enough_for(lengths: Lengths, share: float) -> int:
    """The least max_length that leaves this share of the examples whole."""
    ordered = np.sort(lengths.whole())
    return int(ordered[max(0, int(np.ceil(share * len(ordered))) - 1)])
