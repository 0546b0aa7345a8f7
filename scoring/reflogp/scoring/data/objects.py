"""Read rows from Python objects: Hugging Face datasets, pandas and Polars data frames, Arrow tables, and lists of dicts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from reflogp.scoring.data.files import BATCH_ROWS
from reflogp.scoring.data.images import below, bytes_of_images
from reflogp.scoring.data.read import RowSource, rows_of_dataset, rows_of_table, without_decoding
from reflogp.scoring.data.shape import TEXT_COLUMNS
from reflogp.store import UsageError
from reflogp.store.images import IMAGE_COLUMNS

#: Name that messages use for a dataset that was passed as a Python object.
_NAME = "the dataset"


def open_dataset(dataset: Any) -> RowSource:
    """Open a dataset of any supported type. Of a path or a name, the train split is read. An output format that was set with
    `set_format` or `with_format` is ignored.

    Raises:
        UsageError: `dataset` has an unsupported type, is a `datasets.Dataset` with a transform, is a pandas data frame whose
            column names are not unique, or is a table with types that `datasets` lacks.
    """
    if isinstance(dataset, str | os.PathLike):
        return RowSource(os.fspath(dataset))
    if isinstance(dataset, pa.Table):
        _require_types_of_datasets(dataset)
        return _ObjectRows(lambda: rows_of_table(dataset), len(dataset))
    kind = kind_of(dataset)
    if kind == "datasets.Dataset":
        if dataset.format["type"] == "custom":
            raise UsageError(
                "the dataset has a transform, which would not be applied: apply the transform with map(), or remove it with "
                "reset_format()"
            )
        return _ObjectRows(lambda: rows_of_dataset(dataset.with_format(None)), len(dataset))
    if kind == "datasets.IterableDataset":
        return _ObjectRows(lambda: iter(without_decoding(dataset.with_format(None))), 0)
    if kind == "pandas.DataFrame":
        if not dataset.columns.is_unique:
            raise UsageError(f"the data frame's column names are not unique: {', '.join(map(str, dataset.columns))}")
        return _ObjectRows(lambda: _with_types(_rows_of_pandas(dataset), _text_of_pandas, dataset), len(dataset))
    if kind == "polars.DataFrame":
        return _ObjectRows(lambda: iter(dataset.iter_rows(named=True)), len(dataset))
    if isinstance(dataset, list) and all(isinstance(row, dict) for row in dataset):
        # in a dataset with images, rows without an image are tokenized in the same way as those with one
        images = {name: None for name in IMAGE_COLUMNS if any(name in row for row in dataset)}
        return _ObjectRows(lambda: _with_types(({**images, **row} for row in dataset), _text_of_list, dataset), len(dataset))
    raise UsageError(
        f"a dataset of type {type(dataset).__module__}.{type(dataset).__name__} cannot be read: pass a path, a dataset's name "
        "on the Hugging Face Hub, a datasets.Dataset or IterableDataset, a pandas or Polars data frame, a pyarrow.Table, or a "
        "list of dicts"
    )


def kind_of(dataset: Any) -> str | None:
    """Return "library.Class" for a dataset of a known class, otherwise None. The libraries are not imported."""
    known = {
        "datasets": ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict"),
        "pandas": ("DataFrame",),
        "polars": ("DataFrame",),
    }
    for kind in type(dataset).__mro__:
        library = kind.__module__.partition(".")[0]
        if kind.__name__ in known.get(library, ()):
            return f"{library}.{kind.__name__}"
    return None


def _require_types_of_datasets(table: pa.Table) -> None:
    import datasets

    try:
        datasets.Features.from_arrow_schema(table.schema)
    except ValueError as error:
        raise UsageError(f"the table cannot be read by `datasets`, and so by no trainer: {error}") from error


def _with_types(rows: Iterator[dict[str, Any]], text_of: Callable[[Any], Any], dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield rows whose columns of text have the types that `datasets` gives them, such as nulls for missing keys.

    If the columns do not fit the types of `datasets`, so that no trainer can read them, the rows are yielded unchanged.
    `text_of` returns the columns of text of `dataset` as a `datasets.Dataset`.
    """
    try:
        text = text_of(dataset)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        text = None
    if text is None or not text.column_names:
        yield from rows
        return
    for row, typed in zip(rows, rows_of_dataset(text), strict=True):
        yield {name: value for name, value in row.items() if name not in TEXT_COLUMNS} | typed


def _text_of_list(rows: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list([{name: row[name] for name in TEXT_COLUMNS if name in row} for row in rows])


def _text_of_pandas(frame: Any) -> Any:
    import datasets

    return datasets.Dataset.from_pandas(frame[[name for name in TEXT_COLUMNS if name in frame.columns]], preserve_index=False)


def _rows_of_pandas(frame: Any) -> Iterator[dict[str, Any]]:
    names = [str(name) for name in frame.columns]
    for start in range(0, len(frame), BATCH_ROWS):
        part = frame.iloc[start : start + BATCH_ROWS]
        for values in zip(*(part[name].tolist() for name in frame.columns), strict=True):
            yield {name: _plain(value) for name, value in zip(names, values, strict=True)}


def _plain(value: Any) -> Any:
    """Return a value of a pandas data frame as a plain Python value. NaN, NA and NaT become None, and arrays become lists."""
    if isinstance(value, np.ndarray):
        return [_plain(entry) for entry in value.tolist()]
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if value is None or (isinstance(value, float) and math.isnan(value)) or type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value


class _ObjectRows(RowSource):
    def __init__(self, rows: Callable[[], Iterator[dict[str, Any]]], count: int) -> None:
        self.name = _NAME
        self.open_image = below(None)
        self._identities = {}
        self._make = rows
        self._count = count  # 0 if it is unknown

    def count(self) -> int:
        return self._count

    def _read(self) -> Iterator[tuple[dict[str, Any] | None, str | None, int]]:
        for row in self._make():
            yield dict(row), None, bytes_of_images(row)
