"""Join reference log-probs from a store, a service or another source into tokenized rows, by key.

The token columns have the same names as in TRL's tokenized datasets, and the joined columns are the ones that TRL's losses
read. Every join uses this module, so truncation and ld_alpha have the same effect in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.store.errors import UsageError
from reflogp.store.keys import token_lists
from reflogp.store.texts import counted, short_repr
from reflogp.store.windows import Windows, windows

#: Dict from each completion column to its reference column, which contains the summed reference log-probs. The names are the
#: same as in TRL (trl/trainer/dpo_trainer.py and kto_trainer.py, `_set_signature_columns_if_needed`).
PAIR_COLUMNS = {"chosen_ids": "ref_chosen_logps", "rejected_ids": "ref_rejected_logps"}
KTO_COLUMNS = {"completion_ids": "ref_logps", "KL_completion_ids": "ref_KL_logps"}
#: Name of the column that contains, in a joined file, each row's index in the dataset (starting at 0). Some indices do not
#: occur, because rows without values are omitted.
ROW_COLUMN = "ref_row"
#: Name of the column that contains, in a joined file with most probable tokens, all token ids of a row with one sequence.
INPUT_IDS_COLUMN = "ref_input_ids"
#: The problem that is reported for a row whose stored values are unusable (see `Join`).
UNUSABLE = "the row's stored values cannot be read; run `reflogp store verify`"

Float32s = npt.NDArray[np.float32]


class FoundLogps(Protocol):
    """The result of a lookup of n keys. `lengths` is the number of values of each key, int32 (n,); -1 for a miss."""

    lengths: npt.NDArray[np.int32]

    def prefix_sums(self, lengths: npt.NDArray[np.int64], /) -> npt.NDArray[np.float64]:
        """Return the sum of the first `lengths[i]` values of each key i, float64 (n,); NaN if a value is missing or damaged."""


class LogpLookup(Protocol):
    """A source of log-probs by key, such as a store's snapshot or a scoring service."""

    def find(self, keys: pa.Array, /) -> FoundLogps: ...


@dataclass(frozen=True)
class Asked:
    """The keys to look up for n rows, and how many values of each sequence are needed.

    Attributes:
        columns: dict from each completion column to its reference column.
        keys: dict from each completion column to its n keys.
        needed: dict from each completion column to the number of values needed from the start of each completion, int64 (n,).
        dropped: mask of the rows that TRL drops because the prompt alone fills max_length (only keep_start), bool (n,).
    """

    columns: dict[str, str]
    keys: dict[str, pa.FixedSizeBinaryArray]
    needed: dict[str, npt.NDArray[np.int64]]
    dropped: npt.NDArray[np.bool_]

    def all_keys(self) -> pa.FixedSizeBinaryArray:
        return pa.concat_arrays(list(self.keys.values()))


@dataclass(frozen=True)
class Join:
    """Reference log-probs of n rows.

    Attributes:
        logps: dict from each reference column to its summed log-probs, float32 of shape (n,). A sum is NaN if one of its values
            is missing or damaged.
        keys: dict from each completion column to its n keys. The columns are in the same order as their reference columns in
            `logps`.
        tokens: dict from each completion column to the number of log-probs in each sum, int64 of shape (n,).
        missing: mask of the rows for which at least one needed value is not stored, bool of shape (n,).
        unusable: mask of the rows whose stored values are damaged or not finite, bool of shape (n,).
        dropped: mask of the rows that TRL drops because the prompt alone fills max_length, bool of shape (n,). Only keep_start
            drops rows.
    """

    logps: dict[str, Float32s]
    keys: dict[str, pa.FixedSizeBinaryArray]
    tokens: dict[str, npt.NDArray[np.int64]]
    missing: npt.NDArray[np.bool_]
    unusable: npt.NDArray[np.bool_]
    dropped: npt.NDArray[np.bool_]

    def __repr__(self) -> str:
        counts = {"missing": self.missing, "unusable": self.unusable, "dropped": self.dropped}
        told = ", ".join(f"{int(rows.sum()):,} {name}" for name, rows in counts.items())
        return short_repr("Join", f"{counted(len(self.missing), 'row')} with {', '.join(self.logps)}: {told}")


def tokens_column(logps_column: str) -> str:
    return logps_column.replace("_logps", "_tokens")


def completion_columns(names: list[str]) -> dict[str, str]:
    """Return a dict from each completion column of a tokenized table to its reference column.

    Raises UsageError if the table lacks the prompt column or the completion columns.
    """
    if "prompt_ids" in names:
        if all(column in names for column in PAIR_COLUMNS):
            return PAIR_COLUMNS
        if "completion_ids" in names:
            return {column: ref for column, ref in KTO_COLUMNS.items() if column in names}
    raise UsageError(
        f"expected the columns prompt_ids, chosen_ids and rejected_ids, or prompt_ids and completion_ids; got {names}"
    )


def windows_of(table: pa.Table, max_length: int | None, truncation_mode: str) -> dict[str, Windows]:
    """Return the sequences to look up for each completion column of a tokenized table; see `windows`."""
    columns = completion_columns(table.column_names)
    prompts = token_lists(table["prompt_ids"], "prompt_ids")  # the prompts are parsed once for all completion columns
    return {name: windows(prompts, table[name], max_length, truncation_mode) for name in columns}


def join_logps(
    tables: pa.Table | Iterable[pa.Table],
    lookup: LogpLookup,
    *,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    ld_alpha: float | None = None,
) -> Join:
    """Return the reference log-probs of tokenized rows. All keys are computed first and then looked up together.

    Args:
        tables: tokenized rows, in one table or in an iterable of tables that are read one at a time. Pairs have the columns
            prompt_ids, chosen_ids and rejected_ids. Other rows have prompt_ids, completion_ids and optionally
            KL_completion_ids.
        lookup: source of the values, which is a Snapshot or another object with the same `find` method.
        max_length: the trainer's maximum number of tokens in prompt and completion together, or None for no limit.
        truncation_mode: the trainer's `truncation_mode`: "keep_start" or "keep_end".
        ld_alpha: LD-DPO's weight for tokens beyond the length of a pair's shorter completion (arxiv.org/abs/2409.06411), or
            None to give all tokens the same weight. It must be None for rows that are not pairs.

    Returns:
        A Join with the sum of each completion's log-probs, in nats, and with masks of the rows whose values are missing or
        unusable, or which TRL drops. The sums of dropped rows are NaN.

    Raises:
        UsageError: columns are missing or do not contain token ids, the settings are invalid, there are no tables, or ld_alpha
            is given without pairs.

    Examples:
        >>> import pyarrow as pa
        >>> from reflogp.store import Store, describe_reference, join_logps
        >>> snapshot = Store("./logps")[describe_reference("./sft-model", "bfloat16")].snapshot()
        >>> rows = pa.table({"prompt_ids": [[1, 5, 9]], "chosen_ids": [[7, 2]], "rejected_ids": [[8]]})
        >>> join = join_logps(rows, snapshot, max_length=1024)
        >>> join
        Join(1 row with ref_chosen_logps, ref_rejected_logps: 1 missing, 0 unusable, 0 dropped)
        >>> join.missing, join.tokens["chosen_ids"]
        (array([ True]), array([2]))
    """
    join = answer(ask(tables, max_length=max_length, truncation_mode=truncation_mode), lookup, ld_alpha)
    for sums in join.logps.values():
        sums[join.dropped] = np.nan  # not in `answer`: a batch with such a row has a sum of 0 on the policy's side, too
    return join


def ask(tables: pa.Table | Iterable[pa.Table], *, max_length: int | None = None, truncation_mode: str = "keep_start") -> Asked:
    """Compute the keys of tokenized rows, and how many values of each key are needed; see `join_logps`."""
    parts = [_ask_one(table, max_length, truncation_mode) for table in ([tables] if isinstance(tables, pa.Table) else tables)]
    if not parts:
        raise UsageError("there are no tables to join")
    columns = parts[0].columns
    return Asked(
        columns,
        {name: pa.concat_arrays([part.keys[name] for part in parts]) for name in columns},
        {name: np.concatenate([part.needed[name] for part in parts]) for name in columns},
        np.concatenate([part.dropped for part in parts]),
    )


def answer(asked: Asked, lookup: LogpLookup, ld_alpha: float | None = None) -> Join:
    """Look up all keys at once, and sum the values that the trainer's loss uses for each row; see `join_logps`."""
    check_ld_alpha(asked.columns, ld_alpha)
    return join_found(asked, lookup.find(asked.all_keys()), ld_alpha)


def join_found(asked: Asked, found: FoundLogps, ld_alpha: float | None = None) -> Join:
    """Sum the values of `found`, the result of a lookup of `asked.all_keys()`, as `answer` does."""
    columns, needed = asked.columns, asked.needed
    every = np.concatenate(list(needed.values()))
    sums = found.prefix_sums(every)
    if ld_alpha is not None:
        front = found.prefix_sums(np.tile(np.minimum.reduce(list(needed.values())), len(columns)))
        sums = front + ld_alpha * (sums - front)
    short = (found.lengths < every) & (every > 0)
    rows = len(asked.dropped)
    shape = (len(columns), rows)  # both dimensions are given, because reshape cannot infer one if there are 0 rows
    missing = short.reshape(shape).any(0) & ~asked.dropped
    unusable = (~np.isfinite(sums) & ~short).reshape(shape).any(0) & ~asked.dropped
    logps = {ref: side.astype(np.float32) for ref, side in zip(columns.values(), sums.reshape(shape), strict=True)}
    return Join(logps, asked.keys, needed, missing, unusable, asked.dropped)


def check_ld_alpha(columns: dict[str, str], ld_alpha: float | None) -> None:
    if ld_alpha is not None and columns != PAIR_COLUMNS:
        raise UsageError(
            "ld_alpha is only for pairs, but these rows are not pairs: omit ld_alpha, or use rows with a chosen and a "
            "rejected completion"
        )


def _ask_one(table: pa.Table, max_length: int | None, truncation_mode: str) -> Asked:
    views = windows_of(table, max_length, truncation_mode)
    return Asked(
        completion_columns(table.column_names),
        {name: view.keys() for name, view in views.items()},
        {name: view.needed for name, view in views.items()},
        next(iter(views.values())).dropped,
    )
