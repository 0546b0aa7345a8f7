"""Add reference log-prob columns to a dataset, and write the result to a Parquet file or return it as a dataset object.

Rows are read, tokenized and truncated as in scoring. The values are then looked up by key, so no model is loaded.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from reflogp.scoring.data.objects import kind_of
from reflogp.scoring.data.read import RowSource, table_of_rows
from reflogp.scoring.data.tokenize import RowCount, TokenizedDataset
from reflogp.scoring.errors import DatasetError
from reflogp.scoring.runs.callbacks import ProgressCallbacks
from reflogp.scoring.runs.score import NAMED_ROWS
from reflogp.scoring.versus import Versus, log_ratios
from reflogp.store import Reference, Snapshot, Store, UsageError
from reflogp.store.files import write_atomically
from reflogp.store.joins import INPUT_IDS_COLUMN, ROW_COLUMN, UNUSABLE, Asked, answer, ask, tokens_column
from reflogp.store.keys import KEY_TYPE
from reflogp.store.texts import counted, short_repr
from reflogp.store.top import TopFound, TopSnapshot
from reflogp.store.windows import TrainerSettings


@dataclass
class JoinSummary:
    """The result of a join. `rows` is the sum of `written`, `missing`, `versus_missing`, `bad_rows` and `dropped_rows`.

    Attributes:
        rows: number of rows that were read. A pair that is read as two KTO rows counts as two, or as one if it is a bad row.
        written: number of rows in the output; each has reference log-probs.
        missing: number of rows that were left out because the snapshot lacks their values.
        missing_row_numbers: row numbers of the first hundred missing rows, counted from 0.
        versus_missing: number of rows that were left out because only the values of the second model (`versus`) are missing.
        bad_rows: number of rows that were left out because they cannot be read or tokenized, or because their stored values
            are damaged or not finite.
        bad_row_numbers: row numbers of the first hundred bad rows, counted from 0.
        dropped_rows: number of rows that were left out because TRL drops them. With truncation_mode "keep_start", TRL drops a
            row if its prompt alone fills max_length.
        coverage: written / (rows - dropped_rows); 0.0 if the divisor is 0.
        reference_id: id of the reference that computed the values, 32 hex digits.
        versus_reference_id: id of the second model's reference; empty if there is none.
        snapshot: number of the snapshot that was read.
        store: URI of the store.
        output: path of the written file; empty for a join in memory.
        notes: sentences about the dataset that a user should read.
    """

    rows: int = 0
    written: int = 0
    missing: int = 0
    missing_row_numbers: list[int] = field(default_factory=list)
    versus_missing: int = 0
    bad_rows: int = 0
    bad_row_numbers: list[int] = field(default_factory=list)
    dropped_rows: int = 0
    coverage: float = 0.0
    reference_id: str = ""
    versus_reference_id: str = ""
    snapshot: int = 0
    store: str = ""
    output: str = ""
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        left_out = {"missing": self.missing, "missing in the second model": self.versus_missing}
        left_out |= {"bad": self.bad_rows, "dropped": self.dropped_rows}
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
    versus: Versus | None = None,
    top: TopTokens | None = None,
) -> JoinSummary:
    """Write the rows that have values to a Parquet file, with columns of reference log-probs added.

    If no row has values, no output is written, and an existing file with the output's name is kept.

    Two entries are added to the Parquet metadata, both JSON. `reflogp` contains the store, reference, snapshot and settings.
    `reflogp.coverage` contains the coverage and the numbers of rows that were read and written.

    Raises:
        UsageError: a setting or the dataset cannot be used, or the output cannot be written.
        TokenizerError: see tokenize_dataset.
    """
    source, store = dataset.source, snapshot.store_uri
    summary = JoinSummary(reference_id=snapshot.reference_id, snapshot=snapshot.number, store=store, output=output)
    target = Path(output)
    if target.suffix != ".parquet":
        raise UsageError(f"the output {output} is written as a Parquet file, so its name must end in .parquet")
    if any(target.exists() and target.samefile(file) for file in source.files):
        raise UsageError(f"the output {output} is the dataset itself; give the output another name")
    row_schema = source.schema()
    writer: pq.ParquetWriter | None = None
    with write_atomically(target) as partial:
        try:
            for window in joined_windows(dataset, snapshot, summary, settings, watcher, versus, top):
                if not window.rows:  # if nothing is written, an older file is kept
                    continue
                table = _side_by_side(table_of_rows(window.rows, row_schema), window.columns)
                if writer is None:
                    note = {"store": store, **join_note(snapshot, settings)}
                    if versus is not None:
                        note["versus"] = join_note(versus.snapshot, settings)
                    if top is not None:
                        note["top_k"] = top.k
                    schema = table.schema.with_metadata({"reflogp": json.dumps(note)})
                    writer = pq.ParquetWriter(partial, schema, compression="zstd")
                writer.write_table(table)
            source.check_unchanged()
            if writer is not None:
                counts = {name: getattr(summary, name) for name in ("rows", "written", "coverage")}
                writer.add_key_value_metadata({"reflogp.coverage": json.dumps(counts)})
        finally:
            if writer is not None:
                writer.close()
    return summary


def join_note(snapshot: Snapshot, settings: TrainerSettings) -> dict[str, Any]:
    numerics = {"reference_id": snapshot.reference_id, "reference_dtype": snapshot.reference.dtype}
    return {**numerics, "snapshot": snapshot.number, **asdict(settings)}


@dataclass(frozen=True)
class TopTokens:
    """The tables with most probable tokens, and how many of them to join for each position."""

    snapshot: TopSnapshot
    k: int

    @classmethod
    def find(cls, store: Store, reference: Reference | str, k: int, snapshot: int | None) -> TopTokens | None:
        if k and snapshot is not None:
            raise UsageError("tables with most probable tokens have snapshots of their own: leave out the snapshot, or top_k")
        return cls(TopSnapshot([table.snapshot() for table in store.top_tables(reference, k)]), k) if k else None


@dataclass(frozen=True)
class JoinedWindow:
    """The rows that have values in one window (a group of consecutive rows) of a dataset, in the dataset's order."""

    rows: list[dict[str, Any]]
    columns: pa.Table


def joined_windows(
    dataset: TokenizedDataset,
    snapshot: Snapshot,
    summary: JoinSummary,
    settings: TrainerSettings,
    watcher: ProgressCallbacks | None = None,
    versus: Versus | None = None,
    top: TopTokens | None = None,
) -> Iterator[JoinedWindow]:
    """Yield the rows that have values, one window of the dataset at a time, and count all rows in `summary`.

    A window in which no row can be tokenized is not yielded. A window in which no row has values is yielded without rows.
    `summary.coverage` is set only after the last window.
    """
    counting, begun, watcher = RowCount(dataset), False, watcher or ProgressCallbacks()
    summary.versus_reference_id = versus.snapshot.reference_id if versus else ""
    for window in dataset:
        if not begun and counting.rows is not None:
            watcher.begin(counting.rows)
            begun = True
        summary.rows += len(window.table) + len(window.problems)
        summary.notes += window.notes
        for row, problem in window.problems.items():
            _bad(summary, watcher, row, problem)
        watcher.advance(window.row_count(), 0)
        if not len(window.table):
            continue
        asked = ask(window.table, max_length=settings.max_length, truncation_mode=settings.truncation_mode)
        join = answer(asked, snapshot, settings.ld_alpha)
        other = answer(asked, versus.snapshot, settings.ld_alpha) if versus else join
        tops = None if top is None else top.snapshot.find(asked.all_keys())
        missing = join.missing if tops is None else join.missing | _lacking(asked, tops)
        unusable = (join.unusable | other.unusable) & ~missing
        versus_missing = other.missing & ~missing & ~unusable
        numbers = window.table["row"].to_numpy()
        for row in numbers[unusable]:
            _bad(summary, watcher, int(row), UNUSABLE)
        summary.versus_missing += int(versus_missing.sum())
        summary.missing += int(missing.sum())
        room = NAMED_ROWS - len(summary.missing_row_numbers)
        summary.missing_row_numbers += [int(row) for row in numbers[missing][:room]]
        summary.dropped_rows += int(join.dropped.sum())
        kept = np.flatnonzero(~missing & ~versus_missing & ~unusable & ~join.dropped)
        columns = {name.replace("_ids", "_key"): keys.take(pa.array(kept)) for name, keys in join.keys.items()}
        for (name, values), tokens in zip(join.logps.items(), join.tokens.values(), strict=True):
            columns[name] = pa.array(values[kept], pa.float32())
            columns[tokens_column(name)] = pa.array(tokens[kept], pa.int64())
        if versus:
            added = {name.replace("ref_", "versus_"): logps for name, logps in other.logps.items()} | log_ratios(join, other)
            columns |= {name: pa.array(values[kept], pa.float32()) for name, values in added.items()}
        if top is not None and tops is not None:
            columns |= _top_columns(window.table, asked, tops, top.k, kept)
        columns[ROW_COLUMN] = pa.array(numbers[kept], pa.int64())
        summary.written += len(kept)
        yield JoinedWindow([window.rows[i] for i in kept], pa.table(columns))
    summary.coverage = summary.written / max(1, summary.rows - summary.dropped_rows)


def _lacking(asked: Asked, tops: TopFound) -> npt.NDArray[np.bool_]:
    lengths = tops.lengths.reshape(len(asked.columns), -1)
    needed = np.stack([asked.needed[name] for name in asked.columns])
    lacking: npt.NDArray[np.bool_] = ((lengths < needed) & (needed > 0)).any(0) & ~asked.dropped
    return lacking


def _top_columns(table: pa.Table, asked: Asked, tops: TopFound, k: int, kept: npt.NDArray[np.int64]) -> dict[str, pa.Array]:
    columns: dict[str, pa.Array] = {}
    for side, (name, reference) in enumerate(asked.columns.items()):
        found = tops.top(k, side * len(asked.dropped) + kept)
        needed = asked.needed[name][kept].tolist()
        for at, (kind, dtype) in enumerate((("ids", np.int32), ("logps", np.float32))):
            lists = [
                np.zeros((0, k), dtype) if of_row is None else of_row[at][:length]
                for of_row, length in zip(found, needed, strict=True)
            ]
            columns[reference.replace("_logps", f"_top_{kind}")] = _nested(lists, k)
    if "completion_ids" in asked.columns:
        prompts, completions = (table[name].take(pa.array(kept)).to_pylist() for name in ("prompt_ids", "completion_ids"))
        ids = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        columns[INPUT_IDS_COLUMN] = pa.array(ids, pa.list_(pa.int32()))
    return columns


def _nested(arrays: list[npt.NDArray[Any]], k: int) -> pa.ListArray:
    """Return arrays of shape (positions, k) as lists of lists."""
    lengths = list(map(len, arrays))
    values = pa.array(np.concatenate([array.ravel() for array in arrays]) if arrays else np.zeros(0, np.int32))
    inner = pa.ListArray.from_arrays(pa.array(np.arange(sum(lengths) + 1, dtype=np.int32) * k), values)
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths], dtype=np.int32)), inner)


def _bad(summary: JoinSummary, watcher: ProgressCallbacks, row: int, problem: str) -> None:
    summary.bad_rows += 1
    if len(summary.bad_row_numbers) < NAMED_ROWS:
        summary.bad_row_numbers.append(row)
    watcher.bad_row(row, problem)


def with_columns(dataset: Any, source: RowSource, windows: Callable[[RowSource, bool], Iterator[JoinedWindow]]) -> Any:
    import datasets

    kind = kind_of(dataset)
    if kind == "datasets.IterableDataset":
        return datasets.IterableDataset.from_generator(_Stream(source, windows), split=dataset.split or datasets.Split.TRAIN)
    if kind is None and not isinstance(dataset, pa.Table | list):
        return _of_path(source, windows)
    columns = pa.concat_tables([window.columns for window in _some(windows(source, False))])
    numbers = columns[ROW_COLUMN].to_numpy()
    if isinstance(dataset, list):
        return [{**dataset[row], **values} for row, values in zip(numbers, columns.to_pylist(), strict=True)]
    if kind == "pandas.DataFrame":
        named = zip(columns.column_names, columns.columns, strict=True)
        return dataset.iloc[numbers].assign(**{name: values.to_pandas().array for name, values in named})
    if kind == "polars.DataFrame":
        import polars

        return dataset[numbers].with_columns(polars.DataFrame(polars.from_arrow(columns)).get_columns())
    if isinstance(dataset, pa.Table):
        return _side_by_side(dataset if len(numbers) == len(dataset) else dataset.take(pa.array(numbers)), columns)
    return _of_dataset(dataset, _without_fixed_size(columns))


def _some(windows: Iterator[JoinedWindow]) -> Iterator[JoinedWindow]:
    """Yield the windows. Raise DatasetError if there is no window, because the columns to add are then unknown."""
    first = next(windows, None)
    if first is None:
        raise DatasetError("no row of the dataset can be used, so there is nothing to join")
    yield first
    yield from windows


def _of_path(source: RowSource, windows: Callable[[RowSource, bool], Iterator[JoinedWindow]]) -> Any:
    import datasets

    schema = source.schema()
    some = _some(windows(source, False))
    tables = [_side_by_side(table_of_rows(window.rows, schema), _without_fixed_size(window.columns)) for window in some]
    return datasets.Dataset(pa.concat_tables(tables))


def _of_dataset(dataset: Any, columns: pa.Table) -> Any:
    import datasets

    numbers = columns[ROW_COLUMN].to_numpy()
    kept = dataset.with_format(None)
    kept = kept if len(numbers) == len(kept) else kept.select(numbers)
    kept = kept.remove_columns([name for name in columns.column_names if name in kept.column_names])
    added = datasets.Dataset(columns)
    if not len(numbers):  # if both sides are empty, concatenate_datasets would drop the added columns
        features = datasets.Features({**kept.features, **added.features})
        joined = datasets.Dataset.from_dict({name: [] for name in features}, features=features, split=dataset.split)
    else:
        joined = datasets.concatenate_datasets([kept, added], axis=1, split=dataset.split)
    before = dataset.format
    if before["type"] is not None:
        named = None if set(before["columns"]) == set(dataset.column_names) else list(before["columns"])
        joined.set_format(before["type"], named, before["output_all_columns"], **before["format_kwargs"])
    return joined


def _without_fixed_size(columns: pa.Table) -> pa.Table:
    """Return the columns with keys as binary of any size: datasets before 5.1 has no type for binary of a fixed size."""
    fields = [field.with_type(pa.binary()) if field.type == KEY_TYPE else field for field in columns.schema]
    return columns.cast(pa.schema(fields))


def _side_by_side(table: pa.Table, columns: pa.Table) -> pa.Table:
    """Return a table with columns added. Existing columns with their names are dropped."""
    table = table.drop_columns([name for name in columns.column_names if name in table.column_names])
    for name in columns.column_names:
        table = table.append_column(name, columns[name])
    return table


class _Stream:
    def __init__(self, source: RowSource, windows: Callable[[RowSource, bool], Iterator[JoinedWindow]]) -> None:
        self._source = source
        self._windows = windows

    def __call__(self) -> Iterator[dict[str, Any]]:
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        # With several workers, each worker would read only a part of the source's rows and number that part from 0.
        if worker is not None and worker.num_workers > 1:
            raise UsageError(f"a joined stream needs a single reader, but num_workers is {worker.num_workers}: use 0 or 1")
        for window in self._windows(self._source, True):
            for row, values in zip(window.rows, window.columns.to_pylist(), strict=True):
                yield {**row, **values}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Stream:
        return self

    def __reduce__(self) -> Any:
        # `datasets` identifies a generator by a digest of its pickle. An open store cannot be pickled, so the pickle contains
        # only a random id.
        return _unpickled, (uuid.uuid4().hex,)


def _unpickled(_: str) -> Any:
    raise UsageError(
        "a joined stream cannot be sent to another process: call join in that process, or start the process with fork"
    )
