"""Limit how much data is decoded from a dataset, because a file of a few kilobytes can expand to terabytes.

The scoring service applies these limits to the datasets that it reads; commands such as `reflogp score` do not. There are
three maximum sizes: `row_bytes` for a row, `group_bytes` for a group of rows that is read at once (such as a Parquet row
group), and `dataset_bytes` for the whole dataset. A size is the number of bytes of the decoded data, not of the Python objects
that are created from the data.

Parquet files are decoded in a child process (`parquet_process`), which may use up to 64 MiB of memory plus twice `group_bytes`.
The parent process holds one message from the child in memory at a time. A message contains at most 32 MiB of data, or one row
if the row is larger. A batch with dictionaries or views cannot be split, so its message can be as large as `group_bytes`.

The limits do not cover the following costs. The first three are costs in memory, so also set a memory limit for the process.
- Python objects. Lists and dicts take up to about thirty times the size of their JSON text; strings take up to four times the
  size of their text.
- JSON arrays. The text of the whole array is in memory while its rows are read. As a Python string, it takes up to four times
  `group_bytes`. While the string is created, the bytes of the file (up to `group_bytes`) are in memory too.
- Decompression. A decompressor keeps its latest output in memory (up to 128 MiB for zstd).
- Time. A file with many tiny pages or rows can take a long time to read, because only its size is limited (`dataset_bytes`),
  not the time.
"""

from __future__ import annotations

import codecs
import io
import struct
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

#: Dict from each suffix of compressed text files to Arrow's name for the compression method.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
#: Maximum number of rows that are decoded at once.
BATCH_ROWS = 1024
_CHUNK = 1 << 20
#: Number of bytes that are counted in addition to the content. VALUE_BYTES is counted for each value, and _NESTED_BYTES for
#: each list, map, map entry and struct.
VALUE_BYTES, _NESTED_BYTES = 8, 64


@dataclass(frozen=True)
class ReadBounds:
    """Limits on reading, in decoded bytes.

    Attributes:
        row_bytes: maximum size of a row. A larger row is reported as a bad row. There are two exceptions. In a CSV file, the
            size is counted in characters, and a larger row ends the reading with a DatasetError, because the rows after it
            cannot be read. In a JSON array, rows are limited only by `group_bytes`.
        dataset_bytes: maximum total size of a dataset's files.
        group_bytes: maximum size of a group of rows that is read at once (a JSON array, a Parquet row group or an Arrow batch).
    """

    row_bytes: int
    dataset_bytes: int
    group_bytes: int

    def too_long(self) -> str:
        """Return the error message for a row that is too long."""
        return f"the row is longer than {self.row_bytes:,} bytes"


_NO_BOUNDS = ReadBounds(sys.maxsize, sys.maxsize, sys.maxsize)


class Meter:
    """A counter of the bytes that one pass over a dataset has read.

    Args:
        bounds: limits on reading; None for no limits.
        name: the dataset's name, for messages.
        check: function that is called whenever bytes are counted. It can stop the reading by raising an error.
    """

    def __init__(self, bounds: ReadBounds | None, name: str, check: Callable[[], None] | None = None) -> None:
        self.bounded = bounds is not None
        self.bounds = bounds or _NO_BOUNDS
        self._name = name
        #: The caller's `check`, or a function that does nothing.
        self.check = check or (lambda: None)
        self._spent = 0

    def spend(self, size: int) -> None:
        """Add `size` to the number of bytes read. Raises DatasetError when the total exceeds `dataset_bytes`."""
        self.check()
        self._spent += size
        if self._spent > self.bounds.dataset_bytes:
            raise DatasetError(
                f"{self._name} is longer than {self.bounds.dataset_bytes:,} bytes when decoded; split it into several datasets"
            )


@contextmanager
def open_text(file: Path, meter: Meter) -> Iterator[io.BufferedReader]:
    """Open a text file, decompress it according to its suffix, and count the decompressed bytes that are read."""
    with pa.input_stream(str(file), compression=COMPRESSIONS.get(file.suffix.lower())) as stream:
        reader: Any = io.BufferedReader(_Counted(stream, meter), _CHUNK)
        if reader.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):  # as Excel and PowerShell write it
            reader.read(len(codecs.BOM_UTF8))
        yield reader


def lines(reader: io.BufferedReader, row_bytes: int) -> Iterator[bytes | None]:
    """Yield lines with their line endings. Yield None for a line longer than `row_bytes`; the rest of the line is read in small
    pieces and discarded."""
    most = min(row_bytes + 1, sys.maxsize)
    while line := reader.readline(most):
        if len(line) <= row_bytes:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = reader.readline(_CHUNK)
        yield None


def read_group(reader: io.BufferedReader, meter: Meter, file: Path) -> bytearray:
    """Read the whole text of a JSON array from a file. Raises DatasetError if the text is longer than `group_bytes`."""
    text = bytearray()
    while chunk := reader.read(_CHUNK):
        text += chunk
        if len(text) > meter.bounds.group_bytes:
            raise DatasetError(f"{file} is a JSON array of more than {meter.bounds.group_bytes:,} bytes; use JSON Lines")
    return text


class RecordLines(Iterator[str]):
    """The lines of a CSV file, as input for `csv.reader`. A record with quoted line breaks spans several lines.

    Call `next_record` after each record. A record may have at most `row_bytes` characters; `__next__` raises DatasetError for a
    longer record.
    """

    def __init__(self, reader: io.BufferedReader, row_bytes: int, file: Path) -> None:
        self._text = io.TextIOWrapper(reader, encoding="utf-8", newline="")
        self._most, self._taken, self._file = row_bytes, 0, file

    def next_record(self) -> int:
        """Start a new record and return the number of characters in the previous record."""
        taken, self._taken = self._taken, 0
        return taken

    def __next__(self) -> str:
        line = self._text.readline(min(self._most - self._taken + 1, sys.maxsize))
        self._taken += len(line)
        if self._taken > self._most:
            raise DatasetError(
                f"{self._file} has a record longer than {self._most:,} characters: check for a missing quotation mark"
            )
        if not line:
            raise StopIteration
        return line


def rows_of(batch: pa.RecordBatch, meter: Meter) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Yield (row as a dict, estimated size in decoded bytes) for each row of a batch.

    For a row that is longer than `row_bytes`, yield (None, 0).

    The size of a row is computed before the row is decoded, because a small batch can decode to huge rows if it contains
    dictionaries, views or runs of nulls.
    """
    for start in range(0, batch.num_rows, BATCH_ROWS):
        yield from _measured(batch.slice(start, BATCH_ROWS), meter)


class _Counted(io.RawIOBase):
    """A stream that counts the bytes that are read from it."""

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
        f"{file}: {size:,} bytes must be read at once, but at most {bounds.group_bytes:,} are allowed; rewrite the file with "
        "smaller row groups (Parquet), or with smaller record batches and dictionaries (Arrow)"
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
    """Estimate how many bytes an array's values take after decoding. Raises DatasetError for an unsupported type."""
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
    raise DatasetError(f"a column of type {kind} is not supported; convert it to another type or remove it")


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
    """Return the length of each string in bytes, as int64; the length of a null is null."""
    if not _is_view(array.type):
        return pc.binary_length(array).cast(pa.int64())
    views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)  # a view is 16 bytes, starting with the length
    lengths = views[array.offset : array.offset + len(array), 0].astype(np.int64)
    return pa.array(lengths, mask=np.asarray(array.is_null().to_numpy(zero_copy_only=False)))


# Arrow files
#
# An Arrow file is a sequence of messages. A message consists of metadata and a body. The metadata is a flatbuffer (see the page
# "Internals" in the documentation of github.com/google/flatbuffers) that lists the position of each buffer in the body. If the
# body is compressed, each buffer starts with the buffer's decompressed size. The sizes of all messages are checked before the
# first batch is decoded. `place`, `table_at` and `field_at` read single fields of a flatbuffer without decoding all of it. For
# a damaged flatbuffer, they raise struct.error or IndexError.


def place(data: bytes, at: int) -> int:
    """Follow a forward reference in a flatbuffer: return the offset that the reference at offset `at` points to."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def table_at(data: bytes, table: int, number: int) -> int:
    """Return the offset of the table or vector to which a field of a flatbuffer table refers.

    `table` is the offset of the flatbuffer table, and `number` is the number of the field. Raises IndexError if the field is
    absent.
    """
    at = field_at(data, table, number)
    if at is None:
        raise IndexError
    return place(data, at)


def field_at(data: bytes, table: int, number: int) -> int | None:
    """Return the offset of field `number` of the flatbuffer table at offset `table`, or None if the field is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if vtable < 0 or entry >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = int(struct.unpack_from("<H", data, vtable + entry)[0])
    return table + offset if offset else None


#: Numbers of the fields Message.header, RecordBatch.buffers, RecordBatch.compression and DictionaryBatch.data (see
#: format/Message.fbs in Arrow's repository).
_HEADER, _BUFFERS, _COMPRESSION, _DATA_OF_DICTIONARY = 2, 2, 3, 1


def arrow_batches(file: Path, meter: Meter) -> Iterator[pa.RecordBatch]:
    """Yield validated record batches of an Arrow IPC file or stream.

    An Arrow file is read as a stream, starting after its first eight bytes. The file's footer is not used, because a damaged or
    malicious footer could point anywhere.

    Raises DatasetError if a decompressed batch is larger than `group_bytes`, if all decompressed dictionaries together are
    larger than `group_bytes`, or if a message is damaged or has an unsupported type.
    """
    with pa.memory_map(str(file)) as source:
        start = 8 if source.read(6) == b"ARROW1" else 0
        source.seek(start)
        dictionaries = 0
        for message in pa.ipc.MessageReader.open_stream(source):
            size, of_dictionary = _message_bytes(message)
            dictionaries += size * of_dictionary
            if max(size, dictionaries) > meter.bounds.group_bytes:
                raise group_too_large(file, max(size, dictionaries), meter.bounds)
        source.seek(start)
        for batch in pa.ipc.open_stream(source):
            batch.validate(full=True)  # without this check, invalid offsets could expose other memory of this process
            yield batch


def _message_bytes(message: pa.ipc.Message) -> tuple[int, bool]:
    """Return (size of a message's decompressed body in bytes, True if the message is a dictionary)."""
    of_dictionary = message.type == "dictionary"
    if message.type == "schema":
        return 0, False
    if not of_dictionary and message.type != "record batch":
        raise DatasetError(f"an Arrow message of type {message.type} is not supported: write the rows as record batches")
    data, body = message.metadata.to_pybytes(), message.body
    try:
        batch = table_at(data, place(data, 0), _HEADER)
        if of_dictionary:
            batch = table_at(data, batch, _DATA_OF_DICTIONARY)
        if field_at(data, batch, _COMPRESSION) is None:
            return len(body), of_dictionary
        buffers = table_at(data, batch, _BUFFERS)
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
