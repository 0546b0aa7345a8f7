"""A dataset's rows with reference log-prob columns, as one Parquet file.

The read side of `scoring`: the same rows, tokens, windows and keys, looked up and written. Loads no model. Called by the
command line.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.shape import RowError, detect_format, examples_of, output_columns, token_row
from reflogp.scoring.data.tokenize import load_tokenizer, tokenize_dataset
from reflogp.scoring.errors import DatasetError
from reflogp.scoring.runs.score import NAMED_ROWS, ProgressCallbacks
from reflogp.store import Reference, Snapshot, StoreUnavailableError, UsageError, join_logps
from reflogp.store.joins import ROW_COLUMN, tokens_column
from reflogp.store.texts import shortened


@dataclass
class JoinSummary:
    """What a join did. `rows` is written + missing + bad + dropped.

    Attributes:
        rows: rows read.
        written: rows with reference log-probs in the output.
        missing: rows left out because the snapshot has not their values; the first hundred are named.
        bad_rows: rows left out because they cannot be read or tokenised, or their stored values cannot be read.
        dropped_rows: rows that TRL drops (the prompt alone fills max_length).
        coverage: written over the rows that a trainer keeps, 1.0 where nothing is missing.
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def join_dataset(
    source: RowSource,
    model_folder: str,
    store_uri: str,
    reference: Reference,
    snapshot: Snapshot,
    output: str,
    *,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    ld_alpha: float | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    watcher: ProgressCallbacks | None = None,
) -> JoinSummary:
    """Write a dataset's rows with ref_chosen_logps and ref_rejected_logps (or ref_logps), float32 sums in nats.

    The output appears when it is complete. Its Parquet metadata (`reflogp`) says which store, snapshot and settings it is
    of, `reflogp.coverage` how many of the rows it has; the columns chosen_key and rejected_key (or completion_key) hold each
    sequence's key, ref_chosen_tokens and ref_rejected_tokens (or ref_tokens), int64, how many log-probs each sum has, and
    ref_row, int64, the row's number in the dataset, from 0.

    Args:
        tokenizer: None for the model folder's.

    Raises:
        UsageError: bad settings, an output that cannot be written, or a dataset that cannot be used.
    """
    summary = JoinSummary(reference_id=snapshot.reference_id, snapshot=snapshot.number, store=store_uri, output=output)
    settings = {"max_length": max_length, "truncation_mode": truncation_mode, "ld_alpha": ld_alpha}
    target = Path(output)
    if target.suffix != ".parquet":
        raise UsageError(f"the output {output} would be a Parquet file; give it a name that ends in .parquet")
    if any(target.exists() and target.samefile(file) for file in source.files):
        raise UsageError(f"the output {output} is the dataset itself; give it another name")
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    writer: pq.ParquetWriter | None = None
    if tokenizer is None:
        tokenizer = load_tokenizer(model_folder)
    try:
        row_schema = source.schema(_is_usable)
        for window in tokenize_dataset(source, tokenizer):
            if watcher and not summary.rows:
                watcher.begin(source.count())
            summary.rows = window.last_row + 1
            for row, problem in window.problems.items():
                _bad(summary, watcher, row, problem)
            if watcher:
                watcher.advance(len(window.table) + len(window.problems), 0)
            if not len(window.table):
                continue
            join = join_logps(window.table, snapshot, max_length=max_length, truncation_mode=truncation_mode, ld_alpha=ld_alpha)
            numbers = window.table["row"].to_numpy()
            for row in numbers[join.unusable]:
                _bad(summary, watcher, int(row), "its stored values cannot be read; run `reflogp store verify`")
            summary.missing += int(join.missing.sum())
            room = NAMED_ROWS - len(summary.missing_row_numbers)
            summary.missing_row_numbers += [int(row) for row in numbers[join.missing][:room]]
            summary.dropped_rows += int(join.dropped.sum())
            kept = np.flatnonzero(~join.missing & ~join.unusable & ~join.dropped)
            table = pa.Table.from_pylist([window.rows[i] for i in kept], schema=row_schema)
            for name, keys in join.keys.items():
                table = _with_column(table, name.replace("_ids", "_key"), keys.take(pa.array(kept)))
            for (name, values), tokens in zip(join.logps.items(), join.tokens.values(), strict=True):
                table = _with_column(table, name, pa.array(values[kept], pa.float32()))
                table = _with_column(table, tokens_column(name), pa.array(tokens[kept], pa.int64()))
            table = _with_column(table, ROW_COLUMN, pa.array(numbers[kept], pa.int64()))
            if writer is None:
                note = {
                    "store": store_uri,
                    "reference_id": reference.reference_id,
                    "reference_dtype": reference.dtype,
                    "snapshot": snapshot.number,
                    **settings,
                }
                schema = table.schema.with_metadata({"reflogp": json.dumps(note)})
                target.parent.mkdir(parents=True, exist_ok=True)
                writer = pq.ParquetWriter(partial, schema, compression="zstd")
            writer.write_table(table.cast(writer.schema))
            summary.written += len(kept)
        source.check_unchanged()
        summary.coverage = summary.written / max(1, summary.rows - summary.dropped_rows)
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


def _is_usable(columns: dict[str, Any]) -> bool:
    """Return True for a row whose columns are of the types that tokenising needs."""
    try:
        form = detect_format(columns)
        if form == "tokens":
            token_row(columns, output_columns(form, columns))
        else:
            examples_of(columns, form)
    except (DatasetError, RowError, RecursionError):
        return False
    return True


def _with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """The table with a column of that name, in place of one that the dataset brought along."""
    if name in table.column_names:
        table = table.drop_columns([name])
    return table.append_column(name, values)


def _bad(summary: JoinSummary, watcher: ProgressCallbacks | None, row: int, problem: str) -> None:
    summary.bad_rows += 1
    if len(summary.bad_row_numbers) < NAMED_ROWS:
        summary.bad_row_numbers.append(row)
    if watcher:
        watcher.bad_row(row, problem)
