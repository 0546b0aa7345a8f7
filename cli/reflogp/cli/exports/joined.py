"""Read preference pairs with reference log-probs from a file written by `reflogp join`, or from a job's result.

Every export needs all rows of the dataset in dataset order, and finite values in each row. This module checks these
conditions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from reflogp.client.errors import RowsWithoutValuesError, named_rows
from reflogp.store import UsageError
from reflogp.store.joins import KTO_COLUMNS, PAIR_COLUMNS, ROW_COLUMN, tokens_column

_LOGPS = tuple(PAIR_COLUMNS.values())
_TOKENS = tuple(map(tokens_column, _LOGPS))
_KEYS = tuple(name.replace("_ids", "_key") for name in PAIR_COLUMNS)
_SETTINGS = ("reference_id", "reference_dtype", "snapshot", "max_length", "truncation_mode")


@dataclass(frozen=True)
class JoinedPairs:
    """All n pairs of a dataset with their values, in dataset order.

    Attributes:
        file: file that the pairs were read from.
        reference_id, reference_dtype, snapshot: the reference and snapshot that the values come from.
        max_length, truncation_mode: settings that the pairs were joined with.
        chosen_logps, rejected_logps: sum of each completion's log-probs, finite and in nats, float32 of shape (n,).
        chosen_tokens, rejected_tokens: number of log-probs in each sum, int64 of shape (n,).
        own_columns: names of the columns that come from the dataset, not from the join; empty for a job's result.
    """

    file: Path
    reference_id: str
    reference_dtype: str
    snapshot: int
    max_length: int | None
    truncation_mode: str
    chosen_logps: npt.NDArray[np.float32]
    rejected_logps: npt.NDArray[np.float32]
    chosen_tokens: npt.NDArray[np.int64]
    rejected_tokens: npt.NDArray[np.int64]
    own_columns: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.chosen_logps)

    def own_rows(self) -> Iterator[dict[str, Any]]:
        """Yield each row without the columns that the join added. The file is read in batches."""
        with _as_usage_error(self.file):
            for batch in pq.ParquetFile(self.file).iter_batches(columns=list(self.own_columns)):
                yield from batch.to_pylist()

    def refuse_truncated(self, stack: str, why: str) -> None:
        """Raise UsageError if the join used a max_length, because the sums may then exclude a completion's last tokens.

        Args:
            stack: name of the training stack, for the message.
            why: what the stack does with long sequences, such as "does not truncate sequences". In the message, this text
                follows the stack's name.
        """
        if self.max_length is not None:
            raise UsageError(
                f"{self.file} was joined with max_length {self.max_length}, but {stack} {why}; run `reflogp join` or "
                "`reflogp submit` again without --max-length"
            )


def read_pairs(file: Path) -> JoinedPairs:
    """Read a joined file, or a job's result.

    Raises:
        RowsWithoutValuesError: some rows of the dataset have no values. The error lists these rows.
        UsageError: the file does not exist, cannot be read, is not output of `reflogp join` or `reflogp jobs result`, was
            written by an older version of reflogp, has KTO rows, was joined with `ld_alpha`, has values that are not finite, or
            has rows out of order.
    """
    try:
        opened = pq.ParquetFile(file)
        metadata = opened.metadata.metadata or {}
        note = json.loads(metadata[b"reflogp"])
        settings, ld_alpha = {name: note[name] for name in _SETTINGS}, note["ld_alpha"]
        names = opened.schema_arrow.names
        expected = json.loads(metadata.get(b"reflogp.coverage", b"{}")).get("rows")
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {file}") from error
    except (AttributeError, KeyError, ValueError, TypeError, OSError) as error:
        raise UsageError(f"{file} cannot be read as output of `reflogp join` or `reflogp jobs result`: {error!r}") from error
    if KTO_COLUMNS["completion_ids"] in names and _LOGPS[0] not in names:
        raise UsageError(f"{file} has KTO rows, but exports need preference pairs; join a dataset of preference pairs")
    is_result = ROW_COLUMN not in names and "error" in names
    row_column = "row" if is_result else ROW_COLUMN
    needed = (*_LOGPS, *_TOKENS, row_column)
    lacking = [name for name in needed if name not in names] or (["the number of rows"] if expected is None else [])
    if lacking:
        raise UsageError(f"{file} lacks {', '.join(lacking)}; write the file again with this version of reflogp")
    if ld_alpha is not None:
        raise UsageError(
            f"{file} was joined with ld_alpha {ld_alpha}, but exports need sums in which every token has the weight 1; run "
            "`reflogp join` or `reflogp submit` again without --ld-alpha"
        )
    with _as_usage_error(file):
        table = opened.read([*needed, *(["error"] if is_result else [])])
    rows = table[row_column].to_numpy()
    if not (np.diff(rows) > 0).all():
        raise UsageError(f"the rows of {file} are not in dataset order, or some are repeated; run `reflogp join` again")
    _refuse_rows_without_values(file, table, rows, expected)
    chosen, rejected = (np.asarray(table[name].to_numpy(), np.float32) for name in _LOGPS)
    bad = ~(np.isfinite(chosen) & np.isfinite(rejected))
    if bad.any():
        raise UsageError(f"{file} has values that are NaN or infinite ({named_rows(rows[bad])}); join the dataset again")
    added = {*needed, *_KEYS, *(["error"] if is_result else [])}
    return JoinedPairs(
        file,
        **settings,
        chosen_logps=chosen,
        rejected_logps=rejected,
        chosen_tokens=np.asarray(table[_TOKENS[0]].to_numpy(), np.int64),
        rejected_tokens=np.asarray(table[_TOKENS[1]].to_numpy(), np.int64),
        own_columns=tuple(name for name in names if name not in added),
    )


@contextmanager
def _as_usage_error(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error


def _refuse_rows_without_values(file: Path, table: pa.Table, rows: npt.NDArray[np.int64], expected: int) -> None:
    """Raise RowsWithoutValuesError if any rows have no values.

    In a job's result, the values of such rows are null; in a joined file, such rows are missing.
    """
    null = np.logical_or.reduce([table[name].is_null().to_numpy() for name in (*_LOGPS, *_TOKENS)])
    reasons = {int(row): "" for row in np.setdiff1d(np.arange(expected), rows[~null])}
    if "error" in table.column_names:
        reasons |= {int(rows[at]): table["error"][at].as_py() or "" for at in np.flatnonzero(null)}
    if reasons:
        raise RowsWithoutValuesError(str(file), reasons, expected)
