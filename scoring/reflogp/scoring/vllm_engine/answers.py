"""Define requests to vLLM and its responses, and check that a response holds the log-probs of the completion.

The responses of both transports are checked here before their values reach a store.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reflogp.scoring.torch_engine.sequences import NOT_FINITE, Sequence

#: A value that is further above 0 is not a log-prob: vLLM's older runner leaves such values where it computed nothing.
_ROUNDING = 1e-3


class Request(NamedTuple):
    """A sequence to score.

    Attributes:
        ids: token ids of prompt and completion, int64 (tokens,).
        prompt_len: number of prompt tokens.
        reads_cache: True if vLLM may read the prefix cache for this sequence.
    """

    ids: npt.NDArray[np.int64]
    prompt_len: int
    reads_cache: bool


class Answer(NamedTuple):
    """A response of vLLM.

    Attributes:
        at: index of the request.
        values: float32 values of the completion, or None.
        cached: number of tokens read from the cache.
    """

    at: int
    values: Any
    cached: int


class VllmEndedError(Exception):
    """vLLM ended before it had answered all requests; it can be started again."""


def believable(values: Any, cached: int, sequence: Sequence) -> bool:
    """Return True if the values can be the completion's log-probs: complete, finite, not positive, not read from the cache.

    Args:
        values: float32 array, or None.
        cached: number of tokens that vLLM read from its cache and did not compute.
        sequence: the sequence that was scored.
    """
    if values is None or len(values) != len(sequence.completion_ids) or cached > len(sequence.prompt_ids) - 1:
        return False
    return bool(np.isfinite(values).all() and (values <= _ROUNDING).all())


def problem_of_answer(values: Any) -> str:
    """Return what is wrong with a response that is not believable even without the cache."""
    if values is not None and not np.isfinite(values).all():
        return NOT_FINITE
    return "vLLM gave no log-probs for it, with and without its prefix cache"
