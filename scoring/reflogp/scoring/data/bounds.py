"""Bounds on what reading a dataset costs: files of a few kilobytes can stand for terabytes.

Knows compressed text, Parquet pages and Arrow messages, and what they claim before they are decoded. Does not know what rows
mean. Called by `read`, with bounds where a service reads what others sent, and without on the command line.

What is bounded: a row, a group that is read at once (a JSON array, a Parquet row group, an Arrow batch), the dataset. All three
count decoded bytes, as data and not as Python objects.

What is not bounded here, so that a memory limit on the process is the backstop:
- Python objects: JSON and lists take up to about thirty times the bytes of their text, a string up to four times.
- A JSON array or a Parquet page is held twice while it is decoded: the peak is about twice `group_bytes`, without its objects.
- A decompressor's window: up to 128 MiB for zstd. A Parquet footer: decoded it takes up to some hundred times its bytes, so one
  longer than a 256th of `group_bytes` is refused.
- Time: a file of many tiny pages, or of many tiny rows, is read for as long as `dataset_bytes` lasts.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reflogp.scoring.errors import DatasetError

#: Rows that are decoded at once.
BATCH_ROWS = 1024
_CHUNK = 1 << 20
#: What a Python reference, a list or a struct counts for, beside what it holds.
VALUE_BYTES, _NESTED_BYTES = 8, 64


@dataclass(frozen=True)
class ReadBounds:
    """How much may be read, in decoded bytes.

    Attributes:
        row_bytes: of a row; a longer one is a bad row, or an error where the format cannot go on behind it.
        dataset_bytes: of all files of a dataset together.
        group_bytes: of what is read at once: a JSON array, a Parquet row group, an Arrow batch.
    """

    row_bytes: int
    dataset_bytes: int
    group_bytes: int

    def too_long(self) -> str:
        """What is said of a row."""
        return f"the row is longer than {self.row_bytes:,} bytes"


_NO_BOUNDS = ReadBounds(sys.maxsize, sys.maxsize, sys.maxsize)


class Meter:
    """What one pass over a dataset has read so far.

    Args:
        bounds: None: everything may be read.
        name: of the dataset, for messages.
        check: called whenever bytes are counted; raises to stop.
    """

    def __init__(self, bounds: ReadBounds | None, name: str, check: Callable[[], None] | None = None) -> None:
        self.bounded = bounds is not None
        self.bounds = bounds or _NO_BOUNDS
        self._name = name
        self._check = check
        self._spent = 0

    def spend(self, size: int) -> None:
        """Count bytes. Raises DatasetError when the dataset is longer than it may be."""
        if self._check is not None:
            self._check()
        self._spent += size
        if self._spent > self.bounds.dataset_bytes:
            raise DatasetError(f"{self._name} is longer than {self.bounds.dataset_bytes:,} bytes when decoded; split it")


@contextmanager
def open_text(file: Path, meter: Meter) -> Iterator[io.BufferedReader]:
    """A text file, decompressed as its name says; what is read of it is counted."""
    with pa.input_stream(str(file), compression="detect") as stream:
        yield io.BufferedReader(_Counted(stream, meter), _CHUNK)


def lines(reader: io.BufferedReader, row_bytes: int) -> Iterator[bytes | None]:
    """Lines with their ends; None for one that is longer than `row_bytes`, of which no more than that was held."""
    most = min(row_bytes + 1, sys.maxsize)
    while line := reader.readline(most):
        if len(line) <= row_bytes:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = reader.readline(_CHUNK)
        yield None


def read_group(reader: io.BufferedReader, meter: Meter, file: Path) -> bytearray:
    """All of a text file. Raises DatasetError when it is longer than a group may be."""
    text = bytearray()
    while chunk := reader.read(_CHUNK):
        text += chunk
        if len(text) > meter.bounds.group_bytes:
            raise DatasetError(f"{file} is one JSON array of more than {meter.bounds.group_bytes:,} bytes; write JSON lines")
    return text


class RecordLines(Iterator[str]):
    """Lines of a CSV file for `csv.reader`, which takes several for a record with quoted line ends.

    Call `next_record` after each record: what the reader took since then is bounded by `row_bytes` (characters).
    """

    def __init__(self, reader: io.BufferedReader, row_bytes: int, file: Path) -> None:
        self._text = io.TextIOWrapper(reader, encoding="utf-8", newline="")
        self._most, self._taken, self._file = row_bytes, 0, file

    def next_record(self) -> int:
        """Characters that the last record took."""
        taken, self._taken = self._taken, 0
        return taken

    def __next__(self) -> str:
        line = self._text.readline(min(self._most - self._taken + 1, sys.maxsize))
        self._taken += len(line)
        if self._taken > self._most:
            raise DatasetError(f"{self._file} has a record longer than {self._most:,} characters (an open quotation mark?)")
        if not line:
            raise StopIteration
        return line


def rows_of(batch: pa.RecordBatch, meter: Meter) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """(columns, decoded bytes) of each row of a batch; (None, 0) for a row that is longer than it may be.

    Dictionaries, runs of nulls and views make a batch small that is huge as rows. So rows are measured before they are decoded.
    """
    for start in range(0, batch.num_rows, BATCH_ROWS):
        yield from _measured(batch.slice(start, BATCH_ROWS), meter)


class _Counted(io.RawIOBase):
    """A stream whose bytes are counted while they are read."""

    def __init__(self, stream: pa.NativeFile, meter: Meter) -> None:
        self._stream, self._meter = stream, meter

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = int(self._stream.readinto(buffer))
        self._meter.spend(size)
        return size


def group_too_large(file: Path, size: int, bounds: ReadBounds) -> DatasetError:
    return DatasetError(
        f"{file} must be read in groups of {size:,} bytes, more than {bounds.group_bytes:,}; write smaller ones"
    )


# Rows of a batch


def _measured(batch: pa.RecordBatch, meter: Meter) -> Iterator[tuple[dict[str, Any] | None, int]]:
    size = VALUE_BYTES * batch.num_rows + sum(_decoded_bytes(column) for column in batch.columns)
    if size <= meter.bounds.row_bytes:
        meter.spend(size)
        for row in batch.to_pylist():
            yield row, size // batch.num_rows
    elif batch.num_rows == 1:
        yield None, 0
    else:
        half = batch.num_rows // 2
        yield from _measured(batch.slice(0, half), meter)
        yield from _measured(batch.slice(half), meter)


def _decoded_bytes(array: pa.Array) -> int:
    """About what an array takes as separate values. Raises DatasetError for a type that no dataset has."""
    kind, count = array.type, len(array)
    if isinstance(kind, pa.BaseExtensionType):
        return _decoded_bytes(array.storage)
    if isinstance(kind, pa.DictionaryType):
        if _is_bytes(kind.value_type):
            lengths = _lengths(array.dictionary).take(array.indices)
            return VALUE_BYTES * count + int(pc.sum(lengths).as_py() or 0)
        if pa.types.is_primitive(kind.value_type):
            return VALUE_BYTES * count
    if _is_bytes(kind):
        return VALUE_BYTES * count + int(pc.sum(_lengths(array)).as_py() or 0)
    if pa.types.is_fixed_size_binary(kind) or pa.types.is_decimal(kind):
        return (VALUE_BYTES + int(kind.byte_width)) * count
    if pa.types.is_null(kind) or pa.types.is_primitive(kind):
        return VALUE_BYTES * count
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _NESTED_BYTES * count + _decoded_bytes(array.flatten())
    if pa.types.is_map(kind):
        first, last = (array.offsets[0].as_py(), array.offsets[-1].as_py()) if count else (0, 0)
        inside = [part.slice(first, last - first) for part in (array.keys, array.items)]
        return _NESTED_BYTES * (count + last - first) + sum(map(_decoded_bytes, inside))
    if pa.types.is_struct(kind):
        return _NESTED_BYTES * count + sum(_decoded_bytes(field) for field in array.flatten())
    raise DatasetError(f"a column of type {kind} is not read")


def _is_bytes(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
        or _is_view(kind)
    )


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _lengths(array: pa.Array) -> pa.Array:
    """int64 bytes of each string; null where it is null."""
    if not _is_view(array.type):
        return pc.binary_length(array).cast(pa.int64())
    views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)  # 16 bytes a view, its length first
    lengths = views[array.offset : array.offset + len(array), 0].astype(np.int64)
    return pa.array(lengths, mask=np.asarray(array.is_null().to_numpy(zero_copy_only=False)))
