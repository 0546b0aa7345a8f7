"""Parquet files in bounded memory: what footer and pages claim is read before Arrow decodes anything.

Knows Parquet's metadata (parquet-format, parquet.thrift). Called by `read`.
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
#: Arrow takes no longer page header either.
_MOST_HEADER = 16 << 20
#: Old writers' chunks may be longer by this than they say (PARQUET-816).
_PADDING = 100
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
#: A value is then the beginning of the one before and some bytes: a page can stand for its size times its values.
_DELTA_BYTE_ARRAY = 7


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
    for group in get(read_struct(footer, 0, 0)[0], 4, LIST):
        chunks = []
        for column in get(as_struct(group), 1, LIST):
            about = get(as_struct(column), 3, STRUCT)
            dictionary = get(about, 11, I64) if 11 in about else None
            chunks.append(_Chunk(get(about, 9, I64), dictionary, get(about, 7, I64), get(about, 5, I64)))
        groups.append(_Group(get(group, 3, I64), get(group, 2, I64), chunks))
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
                    if leaf.max_repetition_level and page is not None:  # a single row may hold all of them
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
    """The headers of a column chunk's pages, as far as Arrow would read them. Raises IndexError or ValueError for damage."""
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
    """(values, encoding) of a page of data; None for another page."""
    for version, encoding in ((5, 2), (8, 4)):
        if version in header:
            about = get(header, version, STRUCT)
            return get(about, 1, I32), get(about, encoding, I32)
    return None


def _page_header(raw: BinaryIO, at: int) -> tuple[Struct, int]:
    """(a page's header, its bytes). Raises IndexError or ValueError when there is none."""
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
