"""Joins: reference log-probs for tokenised rows, from a snapshot, by key.

Knows the column names of TRL's tokenised datasets and the columns that its losses read. Does not know datasets, trainers
or files. Called by `reflogp join` and by the trainer extension, so both apply truncation and ld_alpha alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp_store.errors import UsageError
from reflogp_store.snapshot import Snapshot
from reflogp_store.windows import Windows, windows

#: Token column -> column of reference log-probs, as TRL names them (trl/trainer/{dpo,kto}_trainer.py, signature columns).
PAIR_COLUMNS = {"chosen_ids": "ref_chosen_logps", "rejected_ids": "ref_rejected_logps"}
KTO_COLUMNS = {"completion_ids": "ref_logps", "KL_completion_ids": "ref_KL_logps"}

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Join:
    """Reference log-probs of n rows.

    Attributes:
        logps: column name -> float32 (n,). NaN where `missing`.
        keys: token column -> n keys, in the same order as `logps`.
        missing: rows with a sequence that the snapshot has not for enough tokens, bool (n,).
        not_finite: rows with a stored value that is not finite, bool (n,).
        dropped: rows that TRL's length filter would drop, bool (n,).
    """

    logps: dict[str, Float32s]
    keys: dict[str, pa.FixedSizeBinaryArray]
    missing: npt.NDArray[np.bool_]
    not_finite: npt.NDArray[np.bool_]
    dropped: npt.NDArray[np.bool_]


def completion_columns(names: list[str]) -> dict[str, str]:
    """Which columns of a tokenised table hold completions, and what their reference columns are called.

    Raises UsageError when there are none.
    """
    if "prompt_ids" in names:
        if all(column in names for column in PAIR_COLUMNS):
            return PAIR_COLUMNS
        if "completion_ids" in names:
            return {column: ref for column, ref in KTO_COLUMNS.items() if column in names}
    raise UsageError(f"expected prompt_ids with chosen_ids and rejected_ids, or with completion_ids; got {names}")


def join_logps(
    table: pa.Table,
    snapshot: Snapshot,
    *,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    ld_alpha: float | None = None,
) -> Join:
    """Look up every completion of a tokenised table.

    Args:
        table: columns prompt_ids and chosen_ids, rejected_ids (or completion_ids, KL_completion_ids).
        snapshot: where the values are.
        max_length: as in the trainer's config.
        truncation_mode: as in the trainer's config.
        ld_alpha: LD-DPO's weight of a pair's longer tail (arxiv.org/abs/2409.06411): tokens beyond the shorter of the two
            completions count `ld_alpha` times. None weighs all alike. Pairs only.

    Raises:
        UsageError: columns that are not there, or settings that trainers do not know.
    """
    columns = completion_columns(table.column_names)
    if ld_alpha is not None and columns is not PAIR_COLUMNS:
        raise UsageError("ld_alpha weighs a pair's two completions against each other: it needs chosen_ids, rejected_ids")
    views = {name: windows(table["prompt_ids"], table[name], max_length, truncation_mode) for name in columns}
    keys = {name: view.keys() for name, view in views.items()}
    shared = np.minimum.reduce([view.needed for view in views.values()])
    logps, missing, not_finite = {}, np.zeros(len(table), bool), np.zeros(len(table), bool)
    for name, ref_column in columns.items():
        sums = _sums(snapshot, keys[name], views[name], shared, ld_alpha)
        short = (snapshot.stored_lengths(keys[name]) < views[name].needed) & (views[name].needed > 0)
        missing |= short
        not_finite |= ~np.isfinite(sums) & ~short
        logps[ref_column] = sums.astype(np.float32)
    dropped = next(iter(views.values())).dropped
    return Join(logps, keys, missing & ~dropped, not_finite & ~dropped, dropped)


def _sums(
    snapshot: Snapshot,
    keys: pa.FixedSizeBinaryArray,
    view: Windows,
    shared: npt.NDArray[np.int64],
    ld_alpha: float | None,
) -> npt.NDArray[np.float64]:
    whole = snapshot.prefix_sums(keys, view.needed)
    if ld_alpha is None:
        return whole
    front = snapshot.prefix_sums(keys, shared)
    return front + ld_alpha * (whole - front)
