"""Read Parquet files in bounded memory.

The sizes that the footer and the page headers claim (parquet-format, parquet.thrift) are checked before Arrow decodes anything.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from reflogp.scoring.data.bounds import BATCH_ROWS, VALUE_BYTES, Meter, ReadBounds, group_too_large
from reflogp.scoring.data.thrift import I32, I64, LIST, STRUCT, Struct, as_struct, get, read_struct
from reflogp.scoring.errors import DatasetError

_PARQUET_BUFFER = 64 << 10
_MOST_COLUMNS = 1024
#: Maximum bytes of a page header, the same as Arrow's limit.
_MOST_HEADER = 16 << 20
#: Column chunks of old writers may be longer than their metadata says by this many bytes (PARQUET-816).
_PADDING = 100
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
#: In this encoding a value is a prefix of the previous value and some bytes, so a page can expand to its size times its values.
_DELTA_BYTE_ARRAY = 7


def open_parquet(file: Path, bounds: ReadBounds | None) -> pq.ParquetFile:
    """Open a Parquet file and compare the sizes that its footer claims with the bounds.

    Raises DatasetError when the footer is damaged or claims too much.
    """
    return pq.ParquetFile(file) if bounds is None else _open_bounded(file, bounds)[0]


def parquet_batches(file: Path, meter: Meter) -> Iterator[pa.RecordBatch]:
    """Yield record batches of a Parquet file.

    A batch has so few rows that even repeated dictionary values keep it within `group_bytes`. All page headers of a row group
    are read before its data: Arrow allocates the sizes in page headers, whatever the footer says.

    Raises DatasetError when the file is damaged, has decimals of any length, or exceeds the bounds.
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


@dataclass(frozen=True)
class _Chunk:
    """A footer's metadata of one column chunk: offsets of its data and dictionary pages, compressed bytes, values."""

    data: int
    dictionary: int | None
    size: int
    values: int


@dataclass(frozen=True)
class _Group:
    """A footer's metadata of a row group: rows, uncompressed bytes, column chunks."""

    rows: int
    size: int
    chunks: list[_Chunk]


def _open_bounded(file: Path, bounds: ReadBounds) -> tuple[pq.ParquetFile, list[_Group]]:
    """Open a Parquet file and return it with its row groups, checked against the bounds.

    Row groups are parsed here and not by pyarrow, which ends the process when their metadata contradicts itself.
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
        raise group_too_large(file, largest, bounds)
    if max(claimed, VALUE_BYTES * rows) > bounds.dataset_bytes:
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
    """Return a footer's bytes. Raises DatasetError for a footer of more than `most` bytes, and for a file without a footer."""
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
    """Parse the row groups of a footer (FileMetaData). Raises IndexError or ValueError for a damaged footer."""
    groups = []
    for group in get(read_struct(footer, 0, 0)[0], 4, LIST):
        chunks = []
        for column in get(as_struct(group), 1, LIST):
            about = get(as_struct(column), 3, STRUCT)
            dictionary = get(about, 11, I64) if 11 in about else None
            chunks.append(_Chunk(get(about, 9, I64), dictionary, get(about, 7, I64), get(about, 5, I64)))
        groups.append(_Group(get(group, 3, I64), get(group, 2, I64), chunks))
    return groups


def _width(leaf: Any) -> int:
    """Return the bytes of a value of a Parquet column; for a string, the bytes of its index in the dictionary."""
    return int(_WIDTHS.get(leaf.physical_type, leaf.length))


def _check_pages(file: Path, group: _Group, leaves: list[Any], bounds: ReadBounds) -> tuple[int, list[str]]:
    """Bound the size that dictionaries can give a row group, from its page headers.

    Returns:
        (the maximum bytes of a row's strings outside of lists, columns of lists whose strings must stay dictionary-encoded,
        because a row could otherwise be longer than a group)

    Raises:
        DatasetError: pages are damaged, claim more than `group_bytes`, or are encoded as DELTA_BYTE_ARRAY.
    """
    size = values = most_bytes = listed = 0
    kept_encoded = []
    with file.open("rb") as raw:
        for leaf, chunk in zip(leaves, group.chunks, strict=True):
            before, dictionary = values, 0
            try:
                for header in _page_headers(raw, chunk):
                    unpacked, page, entries = get(header, 2, I32), _data_page(header), 0
                    if 7 in header:
                        entries = get(get(header, 7, STRUCT), 1, I32)
                        dictionary += unpacked if leaf.physical_type == "BYTE_ARRAY" else 0
                    if not 0 <= entries * _width(leaf) <= unpacked:
                        raise ValueError
                    if page is not None and page[1] == _DELTA_BYTE_ARRAY:
                        raise DatasetError(
                            f"{file}: column {leaf.path} is encoded as DELTA_BYTE_ARRAY, which is not read here; write it plain"
                        )
                    size += unpacked
                    if leaf.max_repetition_level and page is not None:  # a single row may hold all values
                        values += page[0] * _width(leaf)
                    if max(size, values) > bounds.group_bytes:
                        raise group_too_large(file, max(size, values), bounds)
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


def _page_headers(raw: BinaryIO, chunk: _Chunk) -> Iterator[Struct]:
    """Yield the headers of the pages that Arrow would read of a column chunk. Raises IndexError or ValueError for damage."""
    at, seen = chunk.data, 0
    if chunk.dictionary is not None and 0 < chunk.dictionary < at:
        at = chunk.dictionary
    end = at + chunk.size
    while seen < chunk.values and at < end + _PADDING:
        try:
            header, length = _page_header(raw, at)
            packed, page = get(header, 3, I32), _data_page(header)
            if packed < 0 or (page is not None and page[0] < 0):
                raise ValueError
        except (IndexError, ValueError):
            if at >= end:
                return
            raise
        yield header
        at, seen = at + length + packed, seen + (page[0] if page is not None else 0)


def _data_page(header: Struct) -> tuple[int, int] | None:
    """Return (values, encoding) of a data page; None for another kind of page."""
    for version, encoding in ((5, 2), (8, 4)):
        if version in header:
            about = get(header, version, STRUCT)
            return get(about, 1, I32), get(about, encoding, I32)
    return None


def _page_header(raw: BinaryIO, at: int) -> tuple[Struct, int]:
    """Return (page header, its size in bytes). Raises IndexError or ValueError when there is no valid header."""
    take = 512
    while True:
        raw.seek(at)
        data = raw.read(take)
        try:
            return read_struct(data, 0, 0)
        except IndexError:
            if len(data) < take or take >= _MOST_HEADER:
                raise
        take *= 16
