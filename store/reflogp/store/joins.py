"""Join reference log-probs from a snapshot into tokenized rows, by key.

Column names are those of TRL's tokenized datasets, and the joined columns are those that its losses read. Every join applies
truncation and ld_alpha here, so that all joins agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.store.errors import UsageError
from reflogp.store.keys import token_lists
from reflogp.store.texts import counted, short_repr
from reflogp.store.windows import windows

#: Token column -> column of reference log-probs, with TRL's names (trl/trainer/{dpo,kto}_trainer.py, signature columns).
PAIR_COLUMNS = {"chosen_ids": "ref_chosen_logps", "rejected_ids": "ref_rejected_logps"}
KTO_COLUMNS = {"completion_ids": "ref_logps", "KL_completion_ids": "ref_KL_logps"}
#: Column of a joined file: the row's number in the dataset, from 0. It has gaps, because rows without values are left out.
ROW_COLUMN = "ref_row"

Float32s = npt.NDArray[np.float32]


class FoundLogps(Protocol):
    """The result of looking n keys up.

    Attributes:
        lengths: number of stored values for each key, int32 (n,); -1 for a miss.
    """

    lengths: npt.NDArray[np.int32]

    def prefix_sums(self, lengths: npt.NDArray[np.int64], /) -> npt.NDArray[np.float64]:
        """Return the sum of each key's first `lengths[i]` values, float64 (n,); NaN if there are fewer or they are damaged."""


class LogpLookup(Protocol):
    """A source of log-probs by key: a store's snapshot, or a service that has one."""

    def find(self, keys: pa.Array, /) -> FoundLogps:
        """Look n keys up."""


@dataclass(frozen=True)
class Asked:
    """The keys and lengths that n rows need from a store.

    Attributes:
        columns: token column -> column of reference log-probs.
        keys: token column -> n keys.
        needed: token column -> values needed from the front of each completion, int64 (n,).
        dropped: rows that TRL's length filter would drop, bool (n,).
    """

    columns: dict[str, str]
    keys: dict[str, pa.FixedSizeBinaryArray]
    needed: dict[str, npt.NDArray[np.int64]]
    dropped: npt.NDArray[np.bool_]

    def digest(self) -> str:
        """Return a digest of the rows' keys and lengths, in order. Rows with equal digests need the same values."""
        digest = hashlib.blake2b(digest_size=16)
        for name in self.columns:
            digest.update(name.encode())
            digest.update(self.keys[name].buffers()[1])
            digest.update(self.needed[name].tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Join:
    """Reference log-probs of n rows.

    Attributes:
        logps: column name -> float32 (n,). NaN where `missing`.
        keys: token column -> n keys, in the same order as `logps`.
        tokens: token column -> number of log-probs in each sum, int64 (n,).
        missing: rows with a sequence for which the snapshot has too few values or none, bool (n,).
        unusable: rows whose stored values are damaged or not finite, bool (n,).
        dropped: rows that TRL's length filter would drop, bool (n,).

    Examples:
        >>> import pyarrow as pa
        >>> from reflogp.store import Store, describe_reference, join_logps
        >>> snapshot = Store("./logps").table_of(describe_reference("./sft-model", "bfloat16")).snapshot()
        >>> rows = pa.table({"prompt_ids": [[1, 5, 9]], "chosen_ids": [[7, 2]], "rejected_ids": [[8]]})
        >>> join = join_logps(rows, snapshot)
        >>> join.missing, join.tokens["chosen_ids"]
        (array([ True]), array([2]))
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
    """Return the name of the column that counts the log-probs in each sum: ref_chosen_logps -> ref_chosen_tokens."""
    return logps_column.replace("_logps", "_tokens")


def completion_columns(names: list[str]) -> dict[str, str]:
    """Return the completion columns of a tokenized table, with the names of their reference columns.

    Raises UsageError if there are none.
    """
    if "prompt_ids" in names:
        if all(column in names for column in PAIR_COLUMNS):
            return PAIR_COLUMNS
        if "completion_ids" in names:
            return {column: ref for column, ref in KTO_COLUMNS.items() if column in names}
    raise UsageError(f"expected prompt_ids with chosen_ids and rejected_ids, or with completion_ids; got {names}")


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
        tables: columns prompt_ids and chosen_ids, rejected_ids (or completion_ids, KL_completion_ids);
            one table, or an iterable of tables, of which only one at a time is held in memory.
        lookup: source of the values: a Snapshot, or another object with such a `find` method.
        max_length: as in the trainer's config.
        truncation_mode: as in the trainer's config.
        ld_alpha: LD-DPO's weight of a pair's longer tail (arxiv.org/abs/2409.06411): tokens beyond the shorter of the two
            completions count `ld_alpha` times. None gives all tokens the same weight. Pairs only.

    Returns:
        A Join: float32 sums in nats, and which rows have none.

    Raises:
        UsageError: missing columns, settings that trainers do not accept, no table at all, or an ld_alpha without pairs.

    Examples:
        >>> import pyarrow as pa
        >>> from reflogp.store import Store, describe_reference, join_logps
        >>> snapshot = Store("./logps").table_of(describe_reference("./sft-model", "bfloat16")).snapshot()
        >>> rows = pa.table({"prompt_ids": [[1, 5, 9]], "chosen_ids": [[7, 2]], "rejected_ids": [[8]]})
        >>> join_logps(rows, snapshot, max_length=1024)
        Join(1 row with ref_chosen_logps, ref_rejected_logps: 1 missing, 0 unusable, 0 dropped)
    """
    return answer(ask(tables, max_length=max_length, truncation_mode=truncation_mode), lookup, ld_alpha)


def ask(tables: pa.Table | Iterable[pa.Table], *, max_length: int | None = None, truncation_mode: str = "keep_start") -> Asked:
    """Compute the keys and lengths that tokenized rows need under a trainer's settings.

    Args:
        tables: columns prompt_ids and chosen_ids, rejected_ids (or completion_ids, KL_completion_ids);
            one table, or an iterable of tables, of which only one at a time is held in memory.
        max_length, truncation_mode: as in the trainer's config.

    Raises:
        UsageError: missing columns, settings that trainers do not accept, or no table at all.
    """
    parts = [_ask_one(table, max_length, truncation_mode) for table in ([tables] if isinstance(tables, pa.Table) else tables)]
    if not parts:
        raise UsageError("there is no table to join")
    columns = parts[0].columns
    return Asked(
        columns,
        {name: pa.concat_arrays([part.keys[name] for part in parts]) for name in columns},
        {name: np.concatenate([part.needed[name] for part in parts]) for name in columns},
        np.concatenate([part.dropped for part in parts]),
    )


def answer(asked: Asked, lookup: LogpLookup, ld_alpha: float | None = None) -> Join:
    """Look all sequences up together, and sum the values that a trainer's loss counts for each row.

    Args:
        lookup: source of the values.
        ld_alpha: LD-DPO's weight of a pair's longer tail (arxiv.org/abs/2409.06411): tokens beyond the shorter of the two
            completions count `ld_alpha` times. None gives all tokens the same weight. Pairs only.

    Raises UsageError for an ld_alpha without pairs.
    """
    columns, needed = asked.columns, asked.needed
    check_ld_alpha(columns, ld_alpha)
    found = lookup.find(pa.concat_arrays(list(asked.keys.values())))
    every = np.concatenate(list(needed.values()))
    sums = found.prefix_sums(every)
    if ld_alpha is not None:
        front = found.prefix_sums(np.tile(np.minimum.reduce(list(needed.values())), len(columns)))
        sums = front + ld_alpha * (sums - front)
    short = (found.lengths < every) & (every > 0)
    rows = len(asked.dropped)
    shape = (len(columns), rows)  # both numbers given: reshape cannot infer one of them if there are 0 rows
    missing = short.reshape(shape).any(0) & ~asked.dropped
    unusable = (~np.isfinite(sums) & ~short).reshape(shape).any(0) & ~asked.dropped
    logps = {ref: side.astype(np.float32) for ref, side in zip(columns.values(), sums.reshape(shape), strict=True)}
    return Join(logps, asked.keys, needed, missing, unusable, asked.dropped)


def check_ld_alpha(columns: dict[str, str], ld_alpha: float | None) -> None:
    """Raise UsageError for an ld_alpha without pairs."""
    if ld_alpha is not None and columns is not PAIR_COLUMNS:
        raise UsageError(
            "ld_alpha needs the lengths of both completions of a pair: give the columns chosen_ids and rejected_ids"
        )


def _ask_one(table: pa.Table, max_length: int | None, truncation_mode: str) -> Asked:
    columns = completion_columns(table.column_names)
    prompts = token_lists(table["prompt_ids"], "prompt_ids")  # parsed once for all completion columns
    views = {name: windows(prompts, table[name], max_length, truncation_mode) for name in columns}
    return Asked(
        columns,
        {name: view.keys() for name, view in views.items()},
        {name: view.needed for name, view in views.items()},
        next(iter(views.values())).dropped,
    )
