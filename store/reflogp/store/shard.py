"""Write, read and verify one shard: an immutable Parquet file whose rows are sorted by key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from reflogp.store import storage
from reflogp.store.errors import StoreUnavailableError
from reflogp.store.keys import keys_as_words
from reflogp.store.schema import SCHEMA, one_array, problem_of_rows

#: Maximum number of rows in a row group. Without an index in memory, a lookup of one key reads, in each shard, the index
#: columns of one row group (120 kB). If the lookup needs token values, it also reads the values of one row group (3.4 MB at 200
#: tokens per row).
ROW_GROUP_ROWS = 4_096
#: If rows have many tokens, a row group has fewer rows, so that its values take about _GROUP_BYTES bytes. This number of rows
#: is at least LEAST_GROUP_ROWS.
_GROUP_BYTES, LEAST_GROUP_ROWS = 4 << 20, 256
#: Maximum total uncompressed size, in bytes, of row groups whose values are read together. A larger row group is read alone.
READ_BYTES = 32 << 20
#: The columns that a lookup reads if it does not need the values of individual tokens.
INDEX_COLUMNS = ["key", "scored_len", "logp_sum"]

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class ShardDamageError(Exception):
    """A shard's file is missing, or its content is not what was written. The error's message gives the reason."""


def sorted_by_key(rows: pa.Table) -> pa.Table:
    """Sort rows as in a shard: by key, and among rows with the same key, those with more values first."""
    hi, lo = keys_as_words(rows["key"])
    order = np.lexsort((-rows["scored_len"].to_numpy(), lo, hi))
    return rows if (order[1:] > order[:-1]).all() else rows.take(pa.array(order))


def longest_of_each_key(rows: pa.Table) -> pa.Table:
    """Sort rows by key. For each key, keep only the row with the most values. If nothing changes, return `rows` itself."""
    rows = sorted_by_key(rows)
    if len(rows) < 2:
        return rows
    keys = one_array(rows["key"])
    first = pa.concat_arrays([pa.array([True]), pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))])
    return rows if pc.all(first).as_py() else rows.filter(first)


def _group_rows(rows: pa.Table) -> int:
    fitting = _GROUP_BYTES * len(rows) // max(1, int(rows["token_logps"].nbytes))
    return max(LEAST_GROUP_ROWS, min(ROW_GROUP_ROWS, fitting))


def write_shard(rows: pa.Table, sink: Any) -> None:
    """Write rows, which must be sorted by key, to `sink` as a shard.

    The file is compressed with zstd. Its log-probs are encoded with byte-stream-split, which usually saves space, and every
    page has a checksum.
    """
    pq.write_table(
        rows,
        sink,
        row_group_size=_group_rows(rows),
        compression="zstd",
        use_dictionary=["provenance"],
        column_encoding={
            "token_logps.list.element": "BYTE_STREAM_SPLIT",
            "logp_sum": "BYTE_STREAM_SPLIT",
        },
        write_page_checksum=True,
    )


def shard_digest(data: Any) -> str:
    """Return the blake2b digest of a shard's file, as 32 hex digits.

    Unlike the page checksums, the digest also covers the page headers and the file's footer.
    """
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Group:
    """A row group of a shard.

    Attributes:
        index: index of the row group in the shard.
        start: index of the row group's first row in the shard.
        rows: number of rows.
        bytes: uncompressed size in bytes.
        least, greatest: the first 8 bytes of the smallest and the largest key, as big-endian integers. They are 0 and
            2**64 - 1 if the file has no statistics of the keys.
    """

    index: int
    start: int
    rows: int
    bytes: int
    least: int
    greatest: int


class Shard:
    """One shard of a table, which can be read as a whole or in parts.

    Methods raise ShardDamageError if the file is missing or its content is not what was written, and StoreUnavailableError if
    the storage fails.
    """

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        self.path = path
        self._filesystem = filesystem

    @cached_property
    def groups(self) -> list[Group]:
        with self._open() as file:
            return _groups(file.metadata)

    def index_columns(self, groups: Sequence[int] | None = None) -> pa.Table:
        """Return the columns key, scored_len and logp_sum of the row groups with the given indices, or of all row groups."""
        with self._open() as file:
            if groups is None:
                return file.read(columns=INDEX_COLUMNS)
            return file.read_row_groups(list(groups), columns=INDEX_COLUMNS)

    def rows(self, groups: Sequence[int]) -> pa.Table:
        """Return all columns of the row groups with the given indices."""
        with self._open() as file:
            return file.read_row_groups(list(groups)).cast(SCHEMA)

    def batches(self) -> Iterator[pa.Table]:
        """Yield all rows, one row group at a time."""
        with self._open() as file:
            for index in range(file.num_row_groups):
                yield file.read_row_group(index)

    def values(self, column: str, rows: npt.NDArray[np.int32]) -> Iterator[tuple[slice, pa.Array]]:
        """Read one column of the given rows in parts. For each part, yield the slice of `rows` that it covers, and the column's
        values for these rows.

        Only the row groups that contain the rows are read. Each part covers row groups with a total size of at most READ_BYTES,
        or one larger row group. Memory use is therefore bounded for any number of rows.

        Args:
            column: name of the column.
            rows: indices of rows in the shard, in ascending order.
        """
        groups = self.groups
        group_of = np.searchsorted(np.array([group.start for group in groups]), rows, "right") - 1
        used, first = np.unique(group_of, return_index=True)
        ends = [*first[1:].tolist(), len(rows)]
        with self._open() as file:
            at = 0
            while at < len(used):
                stop, size = at + 1, groups[used[at]].bytes
                while stop < len(used) and size + groups[used[stop]].bytes <= READ_BYTES:
                    size += groups[used[stop]].bytes
                    stop += 1
                groups_read = [groups[index] for index in used[at:stop]]
                read = one_array(file.read_row_groups([group.index for group in groups_read], columns=[column])[column])
                sizes = np.array([group.rows for group in groups_read])
                starts = np.array([group.start for group in groups_read])
                part = slice(int(first[at]), ends[stop - 1])
                place = np.searchsorted(starts, rows[part], "right") - 1
                yield part, read.take(pa.array(rows[part] - starts[place] + (np.cumsum(sizes) - sizes)[place]))
                at = stop

    def digest(self) -> str:
        """Return the digest of the file's current content; see `shard_digest`.

        Raises ShardDamageError if the file is missing. Other errors of the storage are passed on, and not converted into
        StoreUnavailableError.
        """
        try:
            with self._filesystem.open_input_stream(self.path) as source:
                found = hashlib.blake2b(digest_size=16)
                while chunk := source.read(1 << 24):
                    found.update(chunk)
        except FileNotFoundError as error:
            raise ShardDamageError("the file is missing") from error
        return found.hexdigest()

    def problem(self, digest: str | None = None) -> str | None:
        """Read every page of this shard, and return what is wrong with the shard, or None if nothing is wrong.

        Args:
            digest: expected digest of the shard's file, or None if unknown.
        """
        try:
            last: tuple[int, int] = (0, 0)
            for rows in self.batches():
                found = problem_of_rows(rows)
                if found:
                    return found
                hi, lo = keys_as_words(rows["key"])
                if len(hi) and ((int(hi[0]), int(lo[0])) < last or (hi[1:] < hi[:-1]).any()):
                    return "the rows are not sorted by key"
                last = (int(hi[-1]), int(lo[-1])) if len(hi) else last
            if digest is not None and self.digest() != digest:
                return "the file's content is not what was committed"
        except ShardDamageError as error:
            return str(error)
        return None

    def _open(self) -> _OpenShard:
        return _OpenShard(self._filesystem, self.path)


class _OpenShard:
    """A context manager that opens a shard's file, and converts errors from Arrow and the storage into ShardDamageError or
    StoreUnavailableError."""

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        self._filesystem, self._path = filesystem, path
        self._source: Any = None

    def __enter__(self) -> pq.ParquetFile:
        try:
            self._source = self._filesystem.open_input_file(self._path)
            return pq.ParquetFile(self._source, page_checksum_verification=True)
        except (*storage.STORAGE_ERRORS, pa.ArrowException) as error:
            self._close()
            raise self._meaning(error) from error

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._close()
        if isinstance(error, (*storage.STORAGE_ERRORS, pa.ArrowException)):
            raise self._meaning(error) from error

    def _close(self) -> None:
        if self._source is not None:
            self._source.close()

    def _meaning(self, error: BaseException) -> Exception:
        """Return the error to raise after a failed read.

        This is a ShardDamageError if the file is missing or damaged, and a StoreUnavailableError if the storage fails. To
        distinguish a damaged file from a storage failure, the whole file is read again, without decoding it.
        """
        if isinstance(error, FileNotFoundError):
            return ShardDamageError("the file is missing")
        try:
            with self._filesystem.open_input_stream(self._path) as source:
                while source.read(1 << 24):
                    pass
        except storage.STORAGE_ERRORS as failure:
            return StoreUnavailableError(f"shard {self._path} cannot be read: {storage.sentence(failure)}")
        return ShardDamageError(storage.sentence(error))


def _groups(metadata: pq.FileMetaData) -> list[Group]:
    groups, start = [], 0
    column = SCHEMA.get_field_index("key")
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        statistics = group.column(column).statistics
        known = statistics is not None and statistics.has_min_max
        least, greatest = (statistics.min, statistics.max) if known else (b"\0" * 16, b"\xff" * 16)
        first_words = int.from_bytes(least[:8], "big"), int.from_bytes(greatest[:8], "big")
        groups.append(Group(index, start, group.num_rows, group.total_byte_size, *first_words))
        start += group.num_rows
    return groups
