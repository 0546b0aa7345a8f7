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


def open_parquet(file: Path, bounds: ReadBounds | None) -> pq.ParquetFile:
    """A Parquet file, after what its footer claims was compared with the bounds.

    Raises DatasetError when it claims too much.
    """
    return pq.ParquetFile(file) if bounds is None else _open_bounded(file, bounds)[0]


def parquet_batches(file: Path, meter: Meter) -> Iterator[pa.RecordBatch]:
    """Record batches of a Parquet file, so few rows each that no dictionary makes them longer than a group may be.

    Every page's header is read before its row group is: what pages claim is what Arrow allocates, whatever the footer says.
    """
    bounds = meter.bounds
    opened, groups = _open_bounded(file, bounds)
    metadata = opened.metadata
    leaves = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    if any(leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type == "DECIMAL" for leaf in leaves):
        raise DatasetError(f"{file} has decimals of any length; write decimals of a fixed length")
    width = sum(map(_width, leaves))
    if width > bounds.row_bytes:
        raise DatasetError(f"{file} has rows of {width:,} bytes, more than {bounds.row_bytes:,}")
    for number, group in enumerate(groups):
        most_bytes, kept_encoded = _check_pages(file, group, leaves, bounds)
        reader = _arrow_reader(file, bounds, metadata=metadata, read_dictionary=kept_encoded)
        count = min(BATCH_ROWS, bounds.row_bytes // width, bounds.group_bytes // max(1, most_bytes))
        yield from reader.iter_batches(max(1, count), row_groups=[number])


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


# Parquet (parquet-format, parquet.thrift)

_PARQUET_BUFFER = 64 << 10
_MOST_COLUMNS = 1024
#: Arrow takes no longer page header either.
_MOST_HEADER = 16 << 20
#: Old writers' chunks may be longer by this than they say (PARQUET-816).
_PADDING = 100
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
#: A value is then the beginning of the one before and some bytes: a page can stand for its size times its values.
_DELTA_BYTE_ARRAY = 7
#: Types of Thrift's compact protocol.
_TRUE, _FALSE, _I8, _I16, _I32, _I64, _DOUBLE, _BYTES, _LIST, _SET, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12

#: Field number -> (type, value); no value for byte strings.
_Struct = dict[int, tuple[int, Any]]


@dataclass(frozen=True)
class _Chunk:
    """What a footer says of a column of a row group."""

    data: int
    dictionary: int | None
    size: int
    values: int


@dataclass(frozen=True)
class _Group:
    """What a footer says of a row group."""

    rows: int
    size: int
    chunks: list[_Chunk]


def _open_bounded(file: Path, bounds: ReadBounds) -> tuple[pq.ParquetFile, list[_Group]]:
    """A Parquet file and what its footer claims, none of it more than the bounds allow.

    Row groups are read here and not by pyarrow, which ends the process where their metadata contradicts itself.
    """
    footer = _footer(file, max(bounds.group_bytes // 256, 1 << 20))
    opened = _arrow_reader(file, bounds)
    metadata = opened.metadata
    if not 0 < metadata.num_columns <= _MOST_COLUMNS:
        raise DatasetError(f"{file} has {metadata.num_columns:,} columns; from 1 to {_MOST_COLUMNS:,} are read")
    try:
        groups = _groups(footer)
    except (IndexError, ValueError) as error:
        raise DatasetError(f"{file} is damaged: its footer cannot be read") from error
    rows = sum(group.rows for group in groups)
    if rows != metadata.num_rows or any(group.rows < 0 or len(group.chunks) != metadata.num_columns for group in groups):
        raise DatasetError(f"{file} is damaged: its row groups have not the rows and columns that it claims")
    largest, claimed = max((group.size for group in groups), default=0), sum(max(group.size, 0) for group in groups)
    if largest > bounds.group_bytes:
        raise _group_too_large(file, largest, bounds)
    if max(claimed, _VALUE_BYTES * rows) > bounds.dataset_bytes:
        raise DatasetError(f"{file} claims {rows:,} rows of {claimed:,} bytes, more than is read; split it")
    return opened, groups


def _arrow_reader(file: Path, bounds: ReadBounds, **options: Any) -> pq.ParquetFile:
    return pq.ParquetFile(
        file,
        thrift_string_size_limit=max(bounds.group_bytes // 256, 1 << 20),
        thrift_container_size_limit=max(bounds.group_bytes // 1024, 100_000),
        pre_buffer=False,
        buffer_size=_PARQUET_BUFFER,
        arrow_extensions_enabled=False,
        **options,
    )


def _footer(file: Path, most: int) -> bytes:
    """The bytes of a footer. Raises DatasetError for one of more than `most`."""
    with file.open("rb") as raw:
        end = raw.seek(0, io.SEEK_END) - 8
        raw.seek(max(0, end))
        tail = raw.read(8)
        if len(tail) < 8 or tail[4:] != b"PAR1":
            raise DatasetError(f"{file} cannot be read as parquet: it does not end as such a file")
        (size,) = struct.unpack_from("<I", tail)
        if size > most:
            raise DatasetError(f"{file} has a footer of {size:,} bytes, more than {most:,}; write larger row groups")
        raw.seek(max(0, end - size))
        return raw.read(size)


def _groups(footer: bytes) -> list[_Group]:
    """The row groups of a footer (FileMetaData). Raises IndexError or ValueError for one that is damaged."""
    groups = []
    for group in _get(_thrift_struct(footer, 0, 0)[0], 4, _LIST):
        chunks = []
        for column in _get(_as_struct(group), 1, _LIST):
            about = _get(_as_struct(column), 3, _STRUCT)
            dictionary = _get(about, 11, _I64) if 11 in about else None
            chunks.append(_Chunk(_get(about, 9, _I64), dictionary, _get(about, 7, _I64), _get(about, 5, _I64)))
        groups.append(_Group(_get(group, 3, _I64), _get(group, 2, _I64), chunks))
    return groups


def _width(leaf: Any) -> int:
    """Bytes of a value of a Parquet column; of a string: of its place in the dictionary."""
    return int(_WIDTHS.get(leaf.physical_type, leaf.length))


def _check_pages(file: Path, group: _Group, leaves: list[Any], bounds: ReadBounds) -> tuple[int, list[str]]:
    """What dictionaries can make of a row group, from its pages' headers.

    Returns:
        (the most bytes that a row's single strings can have, columns of lists whose strings must stay dictionary-encoded,
        because a row could otherwise be longer than a group)

    Raises:
        DatasetError: pages claim more than a row group may hold.
    """
    size = values = most_bytes = listed = 0
    kept_encoded = []
    with file.open("rb") as raw:
        for leaf, chunk in zip(leaves, group.chunks, strict=True):
            before, dictionary = values, 0
            try:
                for header in _page_headers(raw, chunk):
                    unpacked, page, entries = _get(header, 2, _I32), _data_page(header), 0
                    if 7 in header:
                        entries = _get(_get(header, 7, _STRUCT), 1, _I32)
                        dictionary += unpacked if leaf.physical_type == "BYTE_ARRAY" else 0
                    if not 0 <= entries * _width(leaf) <= unpacked:
                        raise ValueError
                    if page is not None and page[1] == _DELTA_BYTE_ARRAY:
                        raise DatasetError(
                            f"{file}: column {leaf.path} is encoded as DELTA_BYTE_ARRAY, which is not read here; write it plain"
                        )
                    size += unpacked
                    if leaf.max_repetition_level and page is not None:  # a single row may hold all of them
                        values += page[0] * _width(leaf)
                    if max(size, values) > bounds.group_bytes:
                        raise _group_too_large(file, max(size, values), bounds)
            except (IndexError, ValueError) as error:
                raise DatasetError(f"{file} is damaged: a page of column {leaf.path} cannot hold what it claims") from error
            of_lists = dictionary * (values - before) // _width(leaf)
            if not leaf.max_repetition_level:
                most_bytes += dictionary
            elif listed + of_lists <= bounds.group_bytes:
                listed += of_lists
            else:
                kept_encoded.append(leaf.path)
    return most_bytes, kept_encoded


def _page_headers(raw: BinaryIO, chunk: _Chunk) -> Iterator[_Struct]:
    """The headers of a column chunk's pages, as far as Arrow would read them. Raises IndexError or ValueError for damage."""
    at, seen = chunk.data, 0
    if chunk.dictionary is not None and 0 < chunk.dictionary < at:
        at = chunk.dictionary
    end = at + chunk.size
    while seen < chunk.values and at < end + _PADDING:
        try:
            header, length = _page_header(raw, at)
            packed, page = _get(header, 3, _I32), _data_page(header)
            if packed < 0 or (page is not None and page[0] < 0):
                raise ValueError
        except (IndexError, ValueError):
            if at >= end:
                return
            raise
        yield header
        at, seen = at + length + packed, seen + (page[0] if page is not None else 0)


def _data_page(header: _Struct) -> tuple[int, int] | None:
    """(values, encoding) of a page of data; None for another page."""
    for version, encoding in ((5, 2), (8, 4)):
        if version in header:
            about = _get(header, version, _STRUCT)
            return _get(about, 1, _I32), _get(about, encoding, _I32)
    return None


def _page_header(raw: BinaryIO, at: int) -> tuple[_Struct, int]:
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


def _get(fields: _Struct, number: int, kind: int) -> Any:
    """A field. Raises ValueError when it is not there, or of another type: other readers pass over such a field."""
    found = fields.get(number)
    if found is None or found[0] != kind:
        raise ValueError
    return found[1]


def _as_struct(value: Any) -> _Struct:
    if not isinstance(value, dict):
        raise ValueError
    return value


def _thrift_struct(data: bytes, at: int, depth: int) -> tuple[_Struct, int]:
    """(fields, where it ends) of a struct. Raises IndexError where the data ends, ValueError for what no struct has."""
    if depth > 16:
        raise ValueError
    fields: _Struct = {}
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
        if number in fields:
            raise ValueError
        kind = head & 15
        value, at = (kind == _TRUE, at) if kind in (_TRUE, _FALSE) else _thrift_value(data, at, kind, depth)
        fields[number] = kind, value


def _thrift_value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    value: Any = None
    if kind in (_I16, _I32, _I64):
        value, at = _thrift_integer(data, at)
    elif kind == _STRUCT:
        value, at = _thrift_struct(data, at, depth + 1)
    elif kind in (_LIST, _SET):
        of, count = data[at] & 15, data[at] >> 4
        at += 1
        if count == 15:
            count, at = _thrift_varint(data, at)
        value = []
        for _ in range(count):
            item, at = _thrift_value(data, at, of, depth + 1)
            value.append(item)
    elif kind == _BYTES:
        length, at = _thrift_varint(data, at)
        at += length
    elif kind in (_TRUE, _FALSE, _I8, _DOUBLE):  # true and false have a byte of their own in lists only
        at += 8 if kind == _DOUBLE else 1
    else:
        raise ValueError
    if at > len(data):
        raise IndexError
    return value, at


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
            raise ValueError


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
