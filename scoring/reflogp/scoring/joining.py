"""Write a dataset's rows with reference log-prob columns to one Parquet file.

Rows, tokens, windows and keys are the same as in scoring, but values are only looked up: no model is loaded.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from reflogp.scoring.data.shape import RowError, detect_format, examples_of, output_columns, token_row
from reflogp.scoring.data.tokenized import TokenizedDataset
from reflogp.scoring.errors import DatasetError
from reflogp.scoring.runs.callbacks import ProgressCallbacks
from reflogp.scoring.runs.score import NAMED_ROWS
from reflogp.store import Snapshot, StoreUnavailableError, UsageError, join_logps
from reflogp.store.joins import ROW_COLUMN, tokens_column
from reflogp.store.texts import counted, short_repr, shortened
from reflogp.store.windows import TrainerSettings


@dataclass
class JoinSummary:
    """The result of a join. `rows` is written + missing + bad_rows + dropped_rows.

    Attributes:
        rows: rows read.
        written: rows with reference log-probs in the output.
        missing: rows left out because the snapshot lacks their values.
        missing_row_numbers: numbers of the first hundred of them, from 0.
        bad_rows: rows left out because they cannot be read or tokenised, or because their stored values cannot be read.
        bad_row_numbers: numbers of the first hundred of them, from 0.
        dropped_rows: rows that TRL drops (the prompt alone fills max_length).
        coverage: written / (rows - dropped_rows); 1.0 if no row is missing or bad.
        reference_id: reference of the values, 32 hex digits.
        snapshot: number of the snapshot.
        store: URI of the store.
        output: the written file; empty for a join in memory.
    """

    rows: int = 0
    written: int = 0
    missing: int = 0
    missing_row_numbers: list[int] = field(default_factory=list)
    bad_rows: int = 0
    bad_row_numbers: list[int] = field(default_factory=list)
    dropped_rows: int = 0
    coverage: float = 0.0
    reference_id: str = ""
    snapshot: int = 0
    store: str = ""
    output: str = ""

    def __repr__(self) -> str:
        left_out = {"missing": self.missing, "bad": self.bad_rows, "dropped": self.dropped_rows}
        return short_repr(
            "JoinSummary",
            f"{self.written:,} of {counted(self.rows, 'row')} with values"
            + "".join(f", {count:,} {name}" for name, count in left_out.items() if count),
            f"reference {self.reference_id}, snapshot {self.snapshot} of {self.store}",
            self.output,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def join_dataset(
    dataset: TokenizedDataset,
    snapshot: Snapshot,
    output: str,
    settings: TrainerSettings,
    watcher: ProgressCallbacks | None = None,
) -> JoinSummary:
    """Write a dataset's rows with ref_chosen_logps and ref_rejected_logps (or ref_logps), float32 sums in nats.

    The output appears under its name when it is complete. It does not appear, and does not replace an older file, when no row
    has values.

    Further columns:
        chosen_key and rejected_key (or completion_key): each sequence's key.
        ref_chosen_tokens and ref_rejected_tokens (or ref_tokens): int64, the number of log-probs in each sum.
        ref_row: int64, the row's number in the dataset, from 0.

    Parquet metadata: `reflogp` has the store, reference, snapshot and settings; `reflogp.coverage` has the counts of rows read
    and written.

    Args:
        dataset: one that keeps no token ids, because the output has the rows' own columns.

    Raises:
        UsageError: bad settings, an output that cannot be written, or a dataset that cannot be used.
        StoreUnavailableError: the rows do not fit one Parquet schema.
    """
    source, store = dataset.source, snapshot.store_uri
    summary = JoinSummary(reference_id=snapshot.reference_id, snapshot=snapshot.number, store=store, output=output)
    target = Path(output)
    if target.suffix != ".parquet":
        raise UsageError(f"the output {output} would be a Parquet file; give it a name that ends in .parquet")
    if any(target.exists() and target.samefile(file) for file in source.files):
        raise UsageError(f"the output {output} is the dataset itself; give it another name")
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    writer: pq.ParquetWriter | None = None
    try:
        row_schema = source.schema(is_usable)
        for window in joined_windows(dataset, snapshot, summary, settings, watcher):
            table = pa.Table.from_pylist(window.rows, schema=row_schema)
            for name in window.columns.column_names:
                table = with_column(table, name, window.columns[name])
            if writer is None:
                note = {"store": store, **join_note(snapshot, settings)}
                schema = table.schema.with_metadata({"reflogp": json.dumps(note)})
                target.parent.mkdir(parents=True, exist_ok=True)
                writer = pq.ParquetWriter(partial, schema, compression="zstd")
            writer.write_table(table.cast(writer.schema))
        source.check_unchanged()
        if writer is not None:
            counts = {name: getattr(summary, name) for name in ("rows", "written", "coverage")}
            writer.add_key_value_metadata({"reflogp.coverage": json.dumps(counts)})
            writer.close()
            if summary.written:  # a file without rows would replace a good one
                partial.replace(target)
    except (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        raise UsageError(f"the output {output} cannot be written: {error.strerror or error}") from error
    except pa.ArrowInvalid as error:
        text = shortened(str(error).splitlines()[0])
        raise StoreUnavailableError(f"the rows do not fit one Parquet schema: {text}") from error
    finally:
        if writer is not None:
            writer.close()
            partial.unlink(missing_ok=True)
    return summary


def join_note(snapshot: Snapshot, settings: TrainerSettings) -> dict[str, Any]:
    """Return what a Parquet file says about its values: their reference, snapshot and settings, as JSON values."""
    numerics = {"reference_id": snapshot.reference_id, "reference_dtype": snapshot.reference.dtype}
    return {**numerics, "snapshot": snapshot.number, **asdict(settings)}


@dataclass(frozen=True)
class JoinedWindow:
    """Some rows that have values, in order.

    Attributes:
        rows: their columns as they were read.
        numbers: their numbers in the dataset, from 0, int64 (n,).
        columns: what the join adds: keys, float32 sums in nats, numbers of log-probs, ref_row.
    """

    rows: list[dict[str, Any]]
    numbers: npt.NDArray[np.int64]
    columns: pa.Table


def joined_windows(
    dataset: TokenizedDataset,
    snapshot: Snapshot,
    summary: JoinSummary,
    settings: TrainerSettings,
    watcher: ProgressCallbacks | None = None,
) -> Iterator[JoinedWindow]:
    """Yield the rows that have values, a window of the dataset at a time; count all rows in `summary`.

    Raises:
        DatasetError, TokenizerError: see tokenize_dataset.
    """
    for window in dataset:
        if watcher and not summary.rows:
            watcher.begin(dataset.count())
        summary.rows = window.last_row + 1
        for row, problem in window.problems.items():
            _bad(summary, watcher, row, problem)
        if watcher:
            watcher.advance(len(window.table) + len(window.problems), 0)
        if not len(window.table):
            continue
        join = join_logps(window.table, snapshot, **asdict(settings))
        numbers = window.table["row"].to_numpy()
        for row in numbers[join.unusable]:
            _bad(summary, watcher, int(row), "its stored values cannot be read; run `reflogp store verify`")
        summary.missing += int(join.missing.sum())
        room = NAMED_ROWS - len(summary.missing_row_numbers)
        summary.missing_row_numbers += [int(row) for row in numbers[join.missing][:room]]
        summary.dropped_rows += int(join.dropped.sum())
        kept = np.flatnonzero(~join.missing & ~join.unusable & ~join.dropped)
        columns = {name.replace("_ids", "_key"): keys.take(pa.array(kept)) for name, keys in join.keys.items()}
        for (name, values), tokens in zip(join.logps.items(), join.tokens.values(), strict=True):
            columns[name] = pa.array(values[kept], pa.float32())
            columns[tokens_column(name)] = pa.array(tokens[kept], pa.int64())
        columns[ROW_COLUMN] = pa.array(numbers[kept], pa.int64())
        summary.written += len(kept)
        yield JoinedWindow([window.rows[i] for i in kept], numbers[kept], pa.table(columns))
    summary.coverage = summary.written / max(1, summary.rows - summary.dropped_rows)


def is_usable(columns: dict[str, Any]) -> bool:
    """Return True if a row's columns have the types that tokenising needs."""
    try:
        form = detect_format(columns)
        if form == "tokens":
            token_row(columns, output_columns(form, columns))
        else:
            examples_of(columns, form)
    except (DatasetError, RowError, RecursionError):
        return False
    return True


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """Return the table with this column appended; the dataset's own column of the same name is removed."""
    if name in table.column_names:
        table = table.drop_columns([name])
    return table.append_column(name, values)


def _bad(summary: JoinSummary, watcher: ProgressCallbacks | None, row: int, problem: str) -> None:
    summary.bad_rows += 1
    if len(summary.bad_row_numbers) < NAMED_ROWS:
        summary.bad_row_numbers.append(row)
    if watcher:
        watcher.bad_row(row, problem)
