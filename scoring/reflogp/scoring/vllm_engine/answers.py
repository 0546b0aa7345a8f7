"""What vLLM is asked and what it answers, which answers are log-probs, and what to say of one that is not.

Pure. Whatever way an answer came, what reaches a store went through here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reflogp.scoring.torch_engine.sequences import NOT_FINITE, Sequence

#: A log-prob above 0 by more than rounding is none: vLLM's older runner leaves such where it computed nothing.
_ROUNDING = 1e-3


class Request(NamedTuple):
    """A sequence to score: ids of prompt and completion (int64), how many are the prompt, whether the cache may be read."""

    ids: npt.NDArray[np.int64]
    prompt_len: int
    reads_cache: bool


class Answer(NamedTuple):
    """An answer: the request's index, float32 values of the completion or None, and tokens read from the cache."""

    at: int
    values: Any
    cached: int


class VllmEndedError(Exception):
    """vLLM ended before it had answered; it can be started again."""


def believable(values: Any, cached: int, sequence: Sequence) -> bool:
    """Whether these are the completion's log-probs: all there, finite, none positive, none of them read from the cache.

    Args:
        values: float32 array, or None.
        cached: tokens that vLLM read from its cache, and computed nothing for.
    """
    if values is None or len(values) != len(sequence.completion_ids) or cached > len(sequence.prompt_ids) - 1:
        return False
    return bool(np.isfinite(values).all() and (values <= _ROUNDING).all())


def problem_of_answer(values: Any) -> str:
    """What is wrong with an answer that was not believable, and was asked for without the cache."""
    if values is not None and not np.isfinite(values).all():
        return NOT_FINITE
    return "vLLM gave no log-probs for it, with and without its prefix cache"
