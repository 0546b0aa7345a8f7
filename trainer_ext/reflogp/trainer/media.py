"""Refuse datasets with images, video or audio, because stored log-probs depend on token ids alone.

A dataset is checked before a trainer prepares it, so that no row is trained on with values of another input.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from datasets import Dataset, IterableDataset

from reflogp.store import UsageError
from reflogp.store.images import IMAGE_COLUMNS, MEDIA_COLUMNS, MESSAGE_COLUMNS, PROCESSED_COLUMNS, media_of

_BATCH_ROWS = 1000


def refuse_media(dataset: Any, name: str, raw: bool, images: bool = False) -> None:
    """Raise UsageError, with the number of the first such row, if a dataset holds more than text and token ids.

    Args:
        dataset: of a Dataset, all rows are checked if columns may hold media; of a stream, the first row is checked if `raw`;
            anything else passes.
        name: the dataset's name in messages: train, eval, …
        raw: True if TRL has yet to prepare the dataset; then columns named for images are refused even if they hold none.
        images: True if the trainer takes pairs with images; then only other media are refused, by the names of columns.
    """
    if images:
        _refuse_other_media(dataset, name)
        return
    if isinstance(dataset, IterableDataset):
        first = next(iter(dataset), None) if raw else None
        refuse_row(first or {}, name, 0)
        columns = list(first or {})
    elif isinstance(dataset, Dataset):
        columns = dataset.column_names
        suspicious = [column for column in columns if _may_hold_media(column, dataset)]
        if suspicious:
            view = dataset.select_columns(suspicious).with_format("arrow")
            for start in range(0, len(view), _BATCH_ROWS):
                for number, row in enumerate(view[start : start + _BATCH_ROWS].to_pylist(), start):
                    refuse_row(row, name, number)
    else:
        return
    unused = [column for column in columns if column in IMAGE_COLUMNS]
    if raw and unused:
        raise UsageError(
            f"the {name} dataset has a column {unused[0]}, for which TRL prepares all its rows as images; they hold none, so "
            f"remove it: dataset.remove_columns({unused})"
        )


def _refuse_other_media(dataset: Any, name: str) -> None:
    """Raise UsageError if a dataset with images has columns of other media, which TRL would silently leave out."""
    for column in getattr(dataset, "column_names", None) or ():
        if column not in IMAGE_COLUMNS and (column in MEDIA_COLUMNS or column in PROCESSED_COLUMNS):
            raise UsageError(
                f"the {name} dataset has a column {column}, which TRL does not read: only text and images are scored and "
                f"trained on. Remove it: dataset.remove_columns({[column]})"
            )


def refuse_row(row: dict[str, Any], name: str, number: int) -> None:
    """Raise UsageError if a row holds more than text and token ids."""
    media = media_of(row)
    if media is not None:
        raise UsageError(
            f"row {number} of the {name} dataset holds more than text ({media}): stored reference log-probs are of text alone. "
            "Use TRL's own trainer for rows with media"
        )


def _may_hold_media(column: str, dataset: Dataset) -> bool:
    if column in MEDIA_COLUMNS or column in PROCESSED_COLUMNS:
        return True
    return column in MESSAGE_COLUMNS and not _is_plain(dataset.data.schema.field(column).type)


def _is_plain(kind: pa.DataType) -> bool:
    """Return True if a column can hold only text, or messages whose content is text."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        message = kind.value_type
        if not pa.types.is_struct(message) or message.get_field_index("content") < 0:
            return False
        kind = message.field("content").type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))
