"""Apply a trainer's truncation to tokenized rows: find the sequences to look up, and how many log-probs of each are needed.

Truncation follows TRL's `max_length` and `truncation_mode` (trl/trainer/dpo_trainer.py, DataCollatorForPreference).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.store.errors import UsageError
from reflogp.store.keys import TokenLists, list_lengths, sequence_keys, token_lists

TruncationMode = Literal["keep_start", "keep_end"]
#: Why a row is dropped, in messages.
PROMPT_FILLS = "the prompt alone fills max_length"

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrainerSettings:
    """The settings in a trainer's config that affect a row's log-probs; see `join_logps`."""

    max_length: int | None = None
    truncation_mode: str = "keep_start"
    ld_alpha: float | None = None

    @property
    def scored_apart(self) -> dict[str, Any]:
        """The settings (as keyword arguments) for which a dataset must be scored separately: those of keep_end, if max_length
        is set.

        keep_start needs the first values of the whole sequence, and ld_alpha is applied to the stored values of single tokens.
        """
        if self.truncation_mode == "keep_start" or self.max_length is None:
            return {}
        return {"max_length": self.max_length, "truncation_mode": self.truncation_mode}


@dataclass(frozen=True)
class Windows:
    """The n sequences whose keys are looked up, and how many values of each completion are needed.

    If a sequence has no prompt token, its first completion token is moved to the prompt.

    Attributes:
        prompt_ids, completion_ids: token ids, large_list<uint32>; with keep_start, completions are whole.
        needed: number of values needed from the start of each completion, int64 of shape (n,).
        dropped: True for each sequence whose row TRL removes because the prompt alone fills max_length (only with
            keep_start), bool of shape (n,).
    """

    prompt_ids: pa.LargeListArray
    completion_ids: pa.LargeListArray
    needed: Int64s
    dropped: npt.NDArray[np.bool_]

    def keys(self) -> pa.FixedSizeBinaryArray:
        return sequence_keys(self.prompt_ids, self.completion_ids)


@dataclass(frozen=True)
class WindowLengths:
    """What truncation does to n sequences, computed from their lengths.

    Attributes:
        cut_prompts, cut_completions: number of tokens that are removed from the start of each prompt and completion (only
            with keep_end), int64 (n,).
        bare: True for each sequence of which no prompt token remains, so that the first remaining completion token becomes
            the prompt, bool (n,).
        needed, dropped: see Windows.
    """

    cut_prompts: Int64s
    cut_completions: Int64s
    bare: npt.NDArray[np.bool_]
    needed: Int64s
    dropped: npt.NDArray[np.bool_]


def window_lengths(
    prompts: Int64s, completions: Int64s, max_length: int | None = None, truncation_mode: str = "keep_start"
) -> WindowLengths:
    """Apply a trainer's truncation (see `windows`) to the lengths of n prompts and completions, int64 of shape (n,)."""
    check_truncation(max_length, truncation_mode)
    cut_prompts = cut_completions = np.zeros(len(prompts), np.int64)
    dropped = np.zeros(len(prompts), bool)
    if max_length is not None and truncation_mode == "keep_start":
        dropped = prompts >= max_length
    if max_length is not None and truncation_mode == "keep_end":
        cut_completions = np.maximum(completions - max_length, 0)
        cut_prompts = np.minimum(np.maximum(prompts + completions - max_length, 0), prompts)
        prompts, completions = prompts - cut_prompts, completions - cut_completions
    bare = (prompts == 0) & (completions > 0)
    needed = completions - bare
    if max_length is not None and truncation_mode == "keep_start":
        needed = np.clip(max_length - prompts - bare, 0, needed)
    return WindowLengths(cut_prompts, cut_completions, bare, needed, dropped)


def windows(
    prompt_ids: TokenLists,
    completion_ids: TokenLists,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
) -> Windows:
    """Return the sequences whose log-probs a trainer with these settings needs.

    With keep_start, whole sequences are looked up, because a causal model's log-probs do not depend on later tokens. `needed`
    counts only the completion tokens within `max_length`. With keep_end, a sequence that exceeds `max_length` loses its first
    tokens, which changes the log-probs of all remaining tokens. Its last `max_length` tokens are therefore looked up as a
    different sequence, with a different key. In both modes, if no prompt token remains, the first remaining completion token
    becomes the prompt and has no log-prob, exactly as in TRL's shifted loss.

    Raises UsageError if the mode is unknown, max_length is below 1, or the lists do not contain token ids.
    """
    check_truncation(max_length, truncation_mode)
    prompts, completions = token_lists(prompt_ids, "prompt_ids"), token_lists(completion_ids, "completion_ids")
    left = window_lengths(
        list_lengths(prompts).astype(np.int64), list_lengths(completions).astype(np.int64), max_length, truncation_mode
    )
    prompts, completions = without_first(prompts, left.cut_prompts), without_first(completions, left.cut_completions)
    if left.bare.any():
        prompts, completions = _first_token_as_prompt(prompts, completions, left.bare)
    return Windows(prompts, completions, left.needed, left.dropped)


def check_truncation(max_length: int | None, truncation_mode: str) -> None:
    if truncation_mode not in get_args(TruncationMode):
        raise UsageError(f"truncation_mode {truncation_mode!r}: use {' or '.join(map(repr, get_args(TruncationMode)))}")
    if max_length is not None and max_length < 1:
        raise UsageError(f"max_length {max_length}: must be at least 1")


def without_first(lists: pa.LargeListArray, cut: Int64s) -> pa.LargeListArray:
    """Remove the first `cut[i]` values from list i, for every i. `lists` is from `token_lists`; `cut` is int64 (n,)."""
    if not cut.any():
        return lists
    offsets = lists.offsets.to_numpy()
    return _gather(lists.values.to_numpy(), offsets[:-1] + cut, offsets[1:])


def _first_token_as_prompt(
    prompts: pa.LargeListArray, completions: pa.LargeListArray, bare: npt.NDArray[np.bool_]
) -> tuple[pa.LargeListArray, pa.LargeListArray]:
    p_at, c_at = prompts.offsets.to_numpy(), completions.offsets.to_numpy()
    values = np.concatenate([prompts.values.to_numpy(), completions.values.to_numpy()])
    shift = len(prompts.values)
    starts = np.where(bare, c_at[:-1] + shift, p_at[:-1])
    stops = np.where(bare, starts + 1, p_at[1:])
    return _gather(values, starts, stops), without_first(completions, bare.astype(np.int64))


def _gather(values: npt.NDArray[np.uint32], starts: Int64s, stops: Int64s) -> pa.LargeListArray:
    lengths = stops - starts
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return pa.LargeListArray.from_arrays(offsets, pa.array(values[index]))
