"""Write a job's result: a Parquet file with the values in dataset order.

At the end of a job, the dataset is read again, one group of rows at a time. The values of all rows are looked up in the same
snapshot, which is opened when the job has committed its values.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from reflogp.scoring.data.tokenize import TokenizedRows, TokenizedWindows
from reflogp.scoring.joining import join_note
from reflogp.store import Snapshot
from reflogp.store.files import write_atomically
from reflogp.store.joins import Join, ask, check_ld_alpha, completion_columns, join_found, tokens_column
from reflogp.store.keys import KEY_TYPE
from reflogp.store.schema import one_array
from reflogp.store.windows import PROMPT_FILLS, TrainerSettings

#: Maximum number of reasons that `bad_row_reasons` lists, and of row numbers for each of them.
_REASONS, _EXAMPLES = 20, 5
_NO_VALUE = "at least one of the row's values is missing from the store or cannot be used"
_DROPPED = f"dropped because {PROMPT_FILLS}; the trainer drops the row too"


def bad_row_reasons(problems: dict[int, str]) -> list[dict[str, Any]]:
    """Return the most frequent reasons why rows have no values, each with its number of rows and the first row numbers."""
    frequent = Counter(problems.values()).most_common(_REASONS)
    examples: dict[str, list[int]] = {reason: [] for reason, _ in frequent}
    for row, reason in sorted(problems.items()):
        if len(examples.get(reason, range(_EXAMPLES))) < _EXAMPLES:
            examples[reason].append(row)
    return [{"reason": reason, "rows": rows, "examples": examples[reason]} for reason, rows in frequent]


def write_result(
    dataset: TokenizedWindows,
    snapshot: Snapshot,
    settings: TrainerSettings,
    problems: dict[int, str],
    result: Path,
    check: Callable[[], None],
) -> None:
    """Write a job's result. The file appears under its final name only when it is complete.

    It has one row for each row of the dataset, in dataset order (two with the same number for a pair in the format kto):

    - `row`: row number in the dataset, starting at 0 (int64).
    - For each completion: the key (16-byte binary), the sum of its log-probs (float32, nats) and the number of log-probs in
      this sum (int64).
    - `error`: reason why the row has no values (string), or null if it has values.

    The file's metadata has two entries, as in files written by `reflogp join`: `reflogp` (the reference, the snapshot and the
    job's settings) and `reflogp.coverage` (the share of rows with values among all rows that are not dropped).

    `problems` maps row numbers to reasons why the rows have no values. `check` raises an error to stop the job.
    """
    dropped, rows_in_all, written = 0, 0, 0
    writer: pq.ParquetWriter | None = None
    with write_atomically(result) as partial:
        try:
            for window, unread in _windows(dataset):
                check()
                table = window.table
                asked = ask(table, max_length=settings.max_length, truncation_mode=settings.truncation_mode)
                check_ld_alpha(asked.columns, settings.ld_alpha)
                join = join_found(asked, snapshot.find(asked.all_keys()), settings.ld_alpha)
                rows = table["row"].to_numpy()
                bad = join.missing | join.unusable | np.fromiter((int(row) in problems for row in rows), bool, len(rows))
                dropped += int(join.dropped.sum())
                errors: list[str | None] = [None] * len(table)
                for at in np.flatnonzero(bad | join.dropped):
                    errors[at] = _DROPPED if join.dropped[at] else problems.get(int(rows[at]), _NO_VALUE)
                part = _result_rows(table, join, bad | join.dropped, errors, unread)
                if writer is None:
                    schema = part.schema.with_metadata({"reflogp": json.dumps(join_note(snapshot, settings))})
                    writer = pq.ParquetWriter(partial, schema, compression="zstd")
                writer.write_table(part)
                rows_in_all += len(part)
                written += part["error"].null_count
            if writer is not None:
                counts = {"rows": rows_in_all, "written": written, "coverage": written / max(1, rows_in_all - dropped)}
                writer.add_key_value_metadata({"reflogp.coverage": json.dumps(counts)})
                writer.close()
        finally:
            if writer is not None:
                writer.close()


def _windows(dataset: TokenizedWindows) -> Iterator[tuple[TokenizedRows, dict[int, str]]]:
    """Yield each group of tokenized rows, with the problems of rows that are not in the group, by their numbers.

    Groups before the dataset's first readable row have no completion columns. Their problems are yielded with the next group.
    """
    unread: dict[int, str] = {}
    for window in dataset:
        unread |= window.problems
        if window.table.num_columns > 2:
            yield window, unread
            unread = {}


def _result_rows(
    table: pa.Table,
    join: Join,
    without: npt.NDArray[np.bool_],
    errors: list[str | None],
    unread: dict[int, str],
) -> pa.Table:
    references = completion_columns(table.column_names)
    more = len(unread)
    columns: dict[str, pa.Array] = {"row": pa.concat_arrays([one_array(table["row"]), pa.array(list(unread), pa.int64())])}
    for name, keys in join.keys.items():
        columns[name.replace("_ids", "_key")] = pa.concat_arrays([keys, pa.nulls(more, KEY_TYPE)])
    for name, reference in references.items():
        values = pa.array(join.logps[reference], pa.float32(), mask=without)
        tokens = pa.array(join.tokens[name], pa.int64(), mask=without)
        columns[reference] = pa.concat_arrays([values, pa.nulls(more, pa.float32())])
        columns[tokens_column(reference)] = pa.concat_arrays([tokens, pa.nulls(more, pa.int64())])
    columns["error"] = pa.array([*errors, *unread.values()], pa.string())
    rows = pa.table(columns)
    return rows if not more else rows.take(pc.sort_indices(rows, [("row", "ascending")]))
