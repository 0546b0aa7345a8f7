"""Add the columns of a join to a dataset that is a Python object, and keep its kind."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from reflogp.scoring.data.objects import kind_of
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.errors import DatasetError
from reflogp.scoring.joining import JoinedWindow, is_usable, with_column
from reflogp.store import UsageError
from reflogp.store.joins import ROW_COLUMN


def with_columns(dataset: Any, source: RowSource, windows: Callable[[RowSource, bool], Iterator[JoinedWindow]]) -> Any:
    """Return the rows of a dataset that have values, with the columns of a join, as the same kind of dataset.

    Args:
        dataset: of a kind that open_dataset takes.
        source: the same dataset, opened.
        windows: joins the source from its first row each time; its second argument is True for a stream, which may never end.

    Raises:
        DatasetError: no row can be used.
        What `windows` raises; for a stream while it is read.
    """
    import datasets

    kind = kind_of(dataset)
    if kind == "datasets.IterableDataset":
        return datasets.IterableDataset.from_generator(_Stream(source, windows), split=dataset.split or datasets.Split.TRAIN)
    if isinstance(dataset, list):
        return [row for window in _some(windows(source, False)) for row in rows_of(window)]
    if kind is None and not isinstance(dataset, pa.Table):
        return _of_path(source, windows)
    columns = pa.concat_tables([window.columns for window in _some(windows(source, False))])
    numbers = columns[ROW_COLUMN].to_numpy()
    if kind == "pandas.DataFrame":
        named = zip(columns.column_names, columns.columns, strict=True)
        return dataset.iloc[numbers].assign(**{name: values.to_pandas().array for name, values in named})
    if kind == "polars.DataFrame":
        import polars

        return dataset[numbers].with_columns(polars.DataFrame(polars.from_arrow(columns)).get_columns())
    if isinstance(dataset, pa.Table):
        return _side_by_side(dataset if len(numbers) == len(dataset) else dataset.take(pa.array(numbers)), columns)
    return _of_dataset(dataset, columns)


def rows_of(window: JoinedWindow) -> Iterator[dict[str, Any]]:
    """Yield the rows of a window with the columns of the join."""
    for row, values in zip(window.rows, window.columns.to_pylist(), strict=True):
        yield {**row, **values}


def _some(windows: Iterator[JoinedWindow]) -> Iterator[JoinedWindow]:
    """Yield the windows. Raises DatasetError if there are none, because the columns of the join are then unknown."""
    first = next(windows, None)
    if first is None:
        raise DatasetError("no row of the dataset can be used, so there is nothing to join")
    yield first
    yield from windows


def _of_path(source: RowSource, windows: Callable[[RowSource, bool], Iterator[JoinedWindow]]) -> Any:
    """Return the joined rows of a file, folder or hub dataset as a Dataset with the types of its columns."""
    import datasets

    schema = source.schema(is_usable)
    tables = [
        _side_by_side(pa.Table.from_pylist(window.rows, schema=schema), window.columns)
        for window in _some(windows(source, False))
    ]
    return datasets.Dataset(pa.concat_tables(tables))


def _of_dataset(dataset: Any, columns: pa.Table) -> Any:
    """Return a Dataset with further columns, and its own features, split and format."""
    import datasets

    numbers = columns[ROW_COLUMN].to_numpy()
    kept = dataset.with_format(None)
    kept = kept if len(numbers) == len(kept) else kept.select(numbers)
    kept = kept.remove_columns([name for name in columns.column_names if name in kept.column_names])
    added = datasets.Dataset(columns)
    if not len(numbers):  # datasets leaves the second side out where both are empty
        features = datasets.Features({**kept.features, **added.features})
        joined = datasets.Dataset.from_dict({name: [] for name in features}, features=features, split=dataset.split)
    else:
        joined = datasets.concatenate_datasets([kept, added], axis=1, split=dataset.split)
    before = dataset.format
    if before["type"] is not None:
        named = None if set(before["columns"]) == set(dataset.column_names) else list(before["columns"])
        joined.set_format(before["type"], named, before["output_all_columns"], **before["format_kwargs"])
    return joined


def _side_by_side(table: pa.Table, columns: pa.Table) -> pa.Table:
    for name in columns.column_names:
        table = with_column(table, name, columns[name])
    return table


class _Stream:
    """A generator of joined rows, for IterableDataset.

    Args:
        source, windows: see with_columns.
    """

    def __init__(self, source: RowSource, windows: Callable[[RowSource, bool], Iterator[JoinedWindow]]) -> None:
        self._source = source
        self._windows = windows

    def __call__(self) -> Iterator[dict[str, Any]]:
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:  # each would read its share of the inner stream, and number it from 0
            raise UsageError(f"a joined stream is read by one worker, and num_workers is {worker.num_workers}: use 0 or 1")
        for window in self._windows(self._source, True):
            yield from rows_of(window)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Stream:
        return self

    def __reduce__(self) -> Any:
        # `datasets` names a generator by a digest of its pickle, and an open store has none. Each join is a stream of its own.
        return _unpickled, (uuid.uuid4().hex,)


def _unpickled(_: str) -> Any:
    raise UsageError("a joined stream cannot be sent to another process: join in that process, or start workers by fork")
