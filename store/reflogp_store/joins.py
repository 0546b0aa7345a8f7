"""Joins: reference log-probs for tokenised rows, from a snapshot, by key.

Knows the column names of TRL's tokenised datasets and the columns that its losses read. Does not know datasets, trainers
or files. Called by `reflogp join` and by the trainer extension, so both apply truncation and ld_alpha alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp_store.errors import UsageError
from reflogp_store.snapshot import Snapshot
from reflogp_store.windows import windows

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
        tokens: token column -> log-probs in each sum, int64 (n,).
        missing: rows with a sequence that the snapshot has not for enough tokens, bool (n,).
        unusable: rows whose stored values are damaged or not finite, bool (n,).
        dropped: rows that TRL's length filter would drop, bool (n,).
    """

    logps: dict[str, Float32s]
    keys: dict[str, pa.FixedSizeBinaryArray]
    tokens: dict[str, npt.NDArray[np.int64]]
    missing: npt.NDArray[np.bool_]
    unusable: npt.NDArray[np.bool_]
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
    tables: pa.Table | Iterable[pa.Table],
    snapshot: Snapshot,
    *,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    ld_alpha: float | None = None,
) -> Join:
    """Look up every completion of tokenised rows: all keys first, then one lookup for all of them.

    Args:
        tables: columns prompt_ids and chosen_ids, rejected_ids (or completion_ids, KL_completion_ids); one table, or the
            rows in several, of which one at a time is held.
        snapshot: where the values are.
        max_length: as in the trainer's config.
        truncation_mode: as in the trainer's config.
        ld_alpha: LD-DPO's weight of a pair's longer tail (arxiv.org/abs/2409.06411): tokens beyond the shorter of the two
            completions count `ld_alpha` times. None weighs all alike. Pairs only.

    Raises:
        UsageError: columns that are not there, settings that trainers do not know, or no table at all.
    """
    asked = [_asked(table, max_length, truncation_mode) for table in ([tables] if isinstance(tables, pa.Table) else tables)]
    if not asked:
        raise UsageError("there is no table to join")
    columns = asked[0].columns
    if ld_alpha is not None and columns is not PAIR_COLUMNS:
        raise UsageError("ld_alpha weighs a pair's two completions against each other: it needs chosen_ids, rejected_ids")
    keys = {name: pa.concat_arrays([part.keys[name] for part in asked]) for name in columns}
    needed = {name: np.concatenate([part.needed[name] for part in asked]) for name in columns}
    dropped = np.concatenate([part.dropped for part in asked])
    found = snapshot.find(pa.concat_arrays(list(keys.values())))
    every = np.concatenate(list(needed.values()))
    sums = found.prefix_sums(every)
    if ld_alpha is not None:
        front = found.prefix_sums(np.tile(np.minimum.reduce(list(needed.values())), len(columns)))
        sums = front + ld_alpha * (sums - front)
    short = (found.lengths < every) & (every > 0)
    rows = len(dropped)
    missing = short.reshape(-1, rows).any(0) & ~dropped
    unusable = (~np.isfinite(sums) & ~short).reshape(-1, rows).any(0) & ~dropped
    logps = {ref: side.astype(np.float32) for ref, side in zip(columns.values(), sums.reshape(-1, rows), strict=True)}
    return Join(logps, keys, needed, missing, unusable, dropped)


@dataclass(frozen=True)
class _Asked:
    """What a table's rows ask of the store."""

    columns: dict[str, str]
    keys: dict[str, pa.FixedSizeBinaryArray]
    needed: dict[str, npt.NDArray[np.int64]]
    dropped: npt.NDArray[np.bool_]


def _asked(table: pa.Table, max_length: int | None, truncation_mode: str) -> _Asked:
    columns = completion_columns(table.column_names)
    views = {name: windows(table["prompt_ids"], table[name], max_length, truncation_mode) for name in columns}
    return _Asked(
        columns,
        {name: view.keys() for name, view in views.items()},
        {name: view.needed for name, view in views.items()},
        next(iter(views.values())).dropped,
    )
