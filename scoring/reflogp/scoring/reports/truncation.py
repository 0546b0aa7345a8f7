"""Count the tokens that a given max_length would cut, and the examples that it would cut or drop. No log-probs are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reflogp.store.windows import window_lengths

#: Values of max_length whose effects a report shows, together with the effect of the user's value. `cuts` leaves out
#: values that are larger than needed to keep all tokens.
MAX_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
#: Default max_length of TRL's DPOConfig and KTOConfig.
TRL_MAX_LENGTH = 1024

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Lengths:
    """The lengths of n examples, in tokens, int32 (n,).

    Attributes:
        completions: one array per side (chosen and rejected, or completion).
        shared: number of leading tokens that the two completions of a pair have in common; None if the examples are not pairs.
    """

    prompts: Int32s
    completions: Sequence[Int32s]
    shared: Int32s | None = None

    def whole(self) -> Int32s:
        longest: Int32s = self.prompts + np.maximum.reduce(list(self.completions))
        return longest


@dataclass(frozen=True)
class Cut:
    """The effect of a max_length on a dataset.

    Attributes:
        dropped: number of examples that TRL drops because the prompt alone fills max_length (keep_start only).
        touched: number of examples that are kept but lose tokens.
        tokens: number of completion tokens whose log-probs the trainer would use without a max_length.
        lost: number of these tokens that kept examples lose. With keep_end, this includes a completion's first remaining token
            if no prompt token is left, because this token is then only context.
        dropped_tokens: number of these tokens in dropped examples.
        same: number of cut pairs whose remaining completions are equal; None if the examples are not pairs or the mode is
            keep_end.
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
    prompts, completions = lengths.prompts.astype(np.int64), [side.astype(np.int64) for side in lengths.completions]
    left = [window_lengths(prompts, completion, max_length, truncation_mode) for completion in completions]
    dropped = left[0].dropped
    touched = (lengths.whole() > max_length) & ~dropped
    tokens = np.sum([window_lengths(prompts, completion).needed for completion in completions], 0)
    lost = tokens - np.sum([side.needed for side in left], 0)
    same = None
    if lengths.shared is not None and truncation_mode == "keep_start":
        chosen, rejected = (side.needed + side.bare for side in left)
        same = int(((chosen == rejected) & (lengths.shared >= chosen) & touched).sum())
    return Cut(
        max_length,
        len(dropped),
        int(dropped.sum()),
        int(touched.sum()),
        int(tokens.sum()),
        int(lost[~dropped].sum()),
        int(tokens[dropped].sum()),
        same,
    )


def cuts(lengths: Lengths, asked: int | None, truncation_mode: str) -> list[Cut]:
    """Return the effects of the values in MAX_LENGTHS and of `asked`, in ascending order of max_length.

    The list ends with the first max_length that is at least `asked` and neither cuts nor drops any example. `asked` is the
    user's max_length, or None if the user set none.
    """
    found = []
    for max_length in sorted({*MAX_LENGTHS, *([] if asked is None else [asked])}):
        found.append(cut(lengths, max_length, truncation_mode))
        if not found[-1].touched and not found[-1].dropped and max_length >= (asked or 0):
            break
    return found


def max_length_for_share(lengths: Lengths, share: float) -> int:
    ordered = np.sort(lengths.whole())
    return int(ordered[max(0, int(np.ceil(share * len(ordered))) - 1)])
