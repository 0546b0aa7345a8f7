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
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from reflogp_service.errors import DatasetError

#: Rows that are decoded at once.
BATCH_ROWS = 1024
_CHUNK = 1 << 20
#: What a Python reference, a list or a struct counts for, beside what it holds.
_VALUE_BYTES, _NESTED_BYTES = 8, 64


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
    """

    def __init__(self, bounds: ReadBounds | None, name: str) -> None:
        self.bounded = bounds is not None
        self.bounds = bounds or _NO_BOUNDS
        self._name = name
        self._spent = 0

    def spend(self, size: int) -> None:
        """Count bytes. Raises DatasetError when the dataset is longer than it may be."""
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


def open_parquet(file: Path, bounds: ReadBounds | None, **options: Any) -> pq.ParquetFile:
    """A Parquet file, after what its footer claims was compared with the bounds.

    Raises DatasetError when it claims too much.
    """
    if bounds is None:
        return pq.ParquetFile(file, **options)
    most = max(bounds.group_bytes // 256, 1 << 20)
    with file.open("rb") as raw:
        size = raw.seek(0, io.SEEK_END)
        raw.seek(max(0, size - 8))
        (footer,) = struct.unpack("<I", raw.read(8)[:4].ljust(4, b"\0"))
    if footer > most:
        raise DatasetError(f"{file} has a footer of {footer:,} bytes, more than {most:,}; write larger row groups")
    opened = pq.ParquetFile(
        file,
        thrift_string_size_limit=most,
        thrift_container_size_limit=max(bounds.group_bytes // 1024, 100_000),
        pre_buffer=False,
        buffer_size=_PARQUET_BUFFER,
        arrow_extensions_enabled=False,
        **options,
    )
    metadata = opened.metadata
    if not 0 < metadata.num_columns <= _MOST_COLUMNS:
        raise DatasetError(f"{file} has {metadata.num_columns:,} columns; from 1 to {_MOST_COLUMNS:,} are read")
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    if metadata.num_rows != sum(group.num_rows for group in groups) or any(group.num_rows < 0 for group in groups):
        raise DatasetError(f"{file} is damaged: its row groups have not the number of rows that it claims")
    if largest := [group for group in groups if group.total_byte_size > bounds.group_bytes]:
        raise _group_too_large(file, largest[0].total_byte_size, bounds)
    claimed = sum(max(group.total_byte_size, 0) for group in groups)
    if max(claimed, _VALUE_BYTES * metadata.num_rows) > bounds.dataset_bytes:
        raise DatasetError(f"{file} claims {metadata.num_rows:,} rows of {claimed:,} bytes, more than is read; split it")
    return opened


def parquet_batches(file: Path, meter: Meter) -> Iterator[pa.RecordBatch]:
    """Record batches of a Parquet file, each column of bytes dictionary-encoded, so that a repeated value is held once.

    Every page's header is read before its row group is: what pages claim is what Arrow allocates, whatever the footer says.
    """
    bounds = meter.bounds
    metadata = open_parquet(file, bounds).metadata
    leaves = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    strings = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    if any(leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type == "DECIMAL" for leaf in leaves):
        raise DatasetError(f"{file} has decimals of any length; write decimals of a fixed length")
    width = sum(_width(leaf) for leaf in leaves)
    if width > bounds.row_bytes:
        raise DatasetError(f"{file} has rows of {width:,} bytes, more than {bounds.row_bytes:,}")
    opened = open_parquet(file, bounds, metadata=metadata, read_dictionary=strings)
    for group in range(metadata.num_row_groups):
        _check_pages(file, metadata, group, bounds)
        yield from opened.iter_batches(max(1, min(BATCH_ROWS, bounds.row_bytes // width)), row_groups=[group])


def arrow_batches(file: Path, meter: Meter) -> Iterator[pa.RecordBatch]:
    """Record batches of an Arrow IPC file or stream, checked to be whole.

    Both are read as streams: a file is one behind its first eight bytes, and its footer could point anywhere.

    Raises DatasetError for a batch that is longer than a group may be, as it lies there or decompressed.
    """
    with pa.memory_map(str(file)) as source:
        start = 8 if source.read(6) == b"ARROW1" else 0
        source.seek(start)
        dictionaries = 0
        for message in pa.ipc.MessageReader.open_stream(source):
            size, of_dictionary = _message_bytes(message)
            dictionaries += size * of_dictionary
            if max(size, dictionaries) > meter.bounds.group_bytes:
                raise _group_too_large(file, max(size, dictionaries), meter.bounds)
        source.seek(start)
        for batch in pa.ipc.open_stream(source):
            batch.validate(full=True)  # else offsets that lie would show other memory of this process
            yield batch


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


def _group_too_large(file: Path, size: int, bounds: ReadBounds) -> DatasetError:
    return DatasetError(
        f"{file} must be read in groups of {size:,} bytes, more than {bounds.group_bytes:,}; write smaller ones"
    )


# Rows of a batch


def _measured(batch: pa.RecordBatch, meter: Meter) -> Iterator[tuple[dict[str, Any] | None, int]]:
    size = _VALUE_BYTES * batch.num_rows + sum(_decoded_bytes(column) for column in batch.columns)
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
            return _VALUE_BYTES * count + int(pc.sum(lengths).as_py() or 0)
        if pa.types.is_primitive(kind.value_type):
            return _VALUE_BYTES * count
    if _is_bytes(kind):
        return _VALUE_BYTES * count + int(pc.sum(_lengths(array)).as_py() or 0)
    if pa.types.is_fixed_size_binary(kind) or pa.types.is_decimal(kind):
        return (_VALUE_BYTES + int(kind.byte_width)) * count
    if pa.types.is_null(kind) or pa.types.is_primitive(kind):
        return _VALUE_BYTES * count
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


# Parquet pages (parquet-format, parquet.thrift)

_PARQUET_BUFFER = 64 << 10
_MOST_COLUMNS = 1024
#: Arrow takes no longer page header either.
_MOST_HEADER = 16 << 20
#: Old writers' chunks may be longer by this than they say (PARQUET-816).
_PADDING = 100
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
#: Field numbers of PageHeader and of the headers in it.
_UNCOMPRESSED, _COMPRESSED, _DATA, _DICTIONARY, _DATA_V2, _VALUES = 2, 3, 5, 7, 8, 1
_ENCODING = {_DATA: 2, _DATA_V2: 4}
#: A value is then the beginning of the one before and some bytes: a page can stand for its size times its values.
_DELTA_BYTE_ARRAY = 7


def _width(leaf: Any) -> int:
    """Bytes of a value of a Parquet column; of a string: of its place in the dictionary."""
    return int(_WIDTHS.get(leaf.physical_type, leaf.length))


def _check_pages(file: Path, metadata: Any, group: int, bounds: ReadBounds) -> None:
    """Raise DatasetError when the pages of a row group claim more than it may hold."""
    size = values = 0
    with file.open("rb") as raw:
        for number in range(metadata.num_columns):
            leaf, chunk = metadata.schema.column(number), metadata.row_group(group).column(number)
            for header in _page_headers(raw, file, chunk):
                unpacked = header.get(_UNCOMPRESSED, 0)
                page = header.get(_DATA) or header.get(_DATA_V2) or {}
                entries = header.get(_DICTIONARY, {}).get(_VALUES, 0)
                if unpacked < 0 or entries * _width(leaf) > unpacked:
                    raise DatasetError(f"{file} is damaged: a page of column {leaf.path} cannot hold what it claims")
                if page.get(_ENCODING[_DATA if _DATA in header else _DATA_V2]) == _DELTA_BYTE_ARRAY:
                    raise DatasetError(
                        f"{file}: column {leaf.path} is encoded as DELTA_BYTE_ARRAY, which is not read here; write it plain"
                    )
                size += unpacked
                if leaf.max_repetition_level:  # a single row may hold all of them
                    values += page.get(_VALUES, 0) * _width(leaf)
                if max(size, values) > bounds.group_bytes:
                    raise _group_too_large(file, max(size, values), bounds)


def _page_headers(raw: BinaryIO, file: Path, chunk: Any) -> Iterator[dict[int, Any]]:
    """The headers of a column chunk's pages, as far as Arrow would read them."""
    at, seen = chunk.data_page_offset, 0
    if chunk.dictionary_page_offset and chunk.dictionary_page_offset < at:
        at = chunk.dictionary_page_offset
    end = at + chunk.total_compressed_size
    while seen < chunk.num_values and at < end + _PADDING:
        try:
            header, length = _page_header(raw, at)
        except (IndexError, ValueError) as error:
            if at >= end:
                return
            raise DatasetError(f"{file} is damaged: no page where one should be, at byte {at:,}") from error
        packed = header.get(_COMPRESSED, -1)
        found = (header.get(_DATA) or header.get(_DATA_V2) or {}).get(_VALUES, 0)
        if packed < 0 or found < 0:
            raise DatasetError(f"{file} is damaged: a page of less than nothing, at byte {at:,}")
        yield header
        at, seen = at + length + packed, seen + found


def _page_header(raw: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
    """(a page's header, its bytes). Raises IndexError or ValueError when there is none."""
    take = 512
    while True:
        raw.seek(at)
        data = raw.read(take)
        try:
            return _thrift_struct(data, 0, 0)
        except IndexError:
            if len(data) < take or take >= _MOST_HEADER:
                raise
        take *= 16


def _thrift_struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """(field number -> value, where it ends) of a struct in Thrift's compact protocol; byte strings are passed over."""
    if depth > 4:
        raise ValueError("nested too deep for a page header")
    fields: dict[int, Any] = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return fields, at
        if head >> 4:
            number += head >> 4
        else:
            number, at = _thrift_integer(data, at)
        fields[number], at = _thrift_value(data, at, head & 15, depth)


def _thrift_value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true, false: the type is the value
        return kind == 1, at
    if kind in (4, 5, 6):
        return _thrift_integer(data, at)
    if kind == 12:
        return _thrift_struct(data, at, depth + 1)
    if kind in (3, 7):
        at += 1 if kind == 3 else 8
    elif kind == 8:
        length, at = _thrift_varint(data, at)
        at += length
    else:
        raise ValueError("a page header has neither lists nor maps")
    if at > len(data):
        raise IndexError
    return None, at


def _thrift_integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _thrift_varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _thrift_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


# Arrow messages (arrow, format/Message.fbs): field numbers of Message, RecordBatch and DictionaryBatch

_HEADER, _BUFFERS, _COMPRESSION, _DATA_OF_DICTIONARY = 2, 2, 3, 1


def _message_bytes(message: pa.ipc.Message) -> tuple[int, bool]:
    """(bytes of a message's body when it is decompressed, whether it is a dictionary)."""
    of_dictionary = message.type == "dictionary"
    if message.type == "schema":
        return 0, False
    if not of_dictionary and message.type != "record batch":
        raise DatasetError(f"an Arrow message of type {message.type} is not read")
    data, body = message.metadata.to_pybytes(), message.body
    try:
        batch = _table(data, _place(data, 0), _HEADER)
        if of_dictionary:
            batch = _table(data, batch, _DATA_OF_DICTIONARY)
        if _field(data, batch, _COMPRESSION) is None:
            return len(body), of_dictionary
        buffers = _table(data, batch, _BUFFERS)
        size = 0
        for number in range(struct.unpack_from("<I", data, buffers)[0]):
            offset, length = struct.unpack_from("<qq", data, buffers + 4 + 16 * number)
            if length:
                if not 0 <= offset <= len(body) - 8:
                    raise IndexError
                (unpacked,) = struct.unpack("<q", body.slice(offset, 8).to_pybytes())
                size += length if unpacked == -1 else unpacked  # -1: this buffer is not compressed
                if unpacked < -1:
                    raise IndexError
    except (struct.error, IndexError, ValueError) as error:
        raise DatasetError("an Arrow message is damaged") from error
    return size, of_dictionary


def _place(data: bytes, at: int) -> int:
    """Where a flatbuffer's forward reference leads."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _table(data: bytes, table: int, number: int) -> int:
    """Where the table or vector that a flatbuffer table's field refers to begins."""
    at = _field(data, table, number)
    if at is None:
        raise IndexError
    return _place(data, at)


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where a flatbuffer table's field lies; None when it is left out."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if vtable < 0 or entry >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = int(struct.unpack_from("<H", data, vtable + entry)[0])
    return table + offset if offset else None
