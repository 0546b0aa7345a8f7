"""One shard: an immutable Parquet file whose rows are sorted by key. How it is written, read in part, and found whole or not.

Knows encodings, row groups and page checksums. Does not know snapshots or the Delta log. Called by the table and by maintenance
(writing), the snapshot (reading) and verification.
"""

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

#: What a lookup of one key reads of a sorted shard: at 200 tokens a row 3.4 MB of token values, 120 kB of the index columns.
ROW_GROUP_ROWS = 4_096
#: Rows with many tokens come in smaller groups: about so many bytes of values, but not fewer than so many rows.
_GROUP_BYTES, LEAST_GROUP_ROWS = 4 << 20, 256
#: Bytes of row groups whose values are read at a time, or one row group where it is larger.
READ_BYTES = 32 << 20
#: What lookups read unless they need single tokens.
INDEX_COLUMNS = ["key", "scored_len", "logp_sum"]

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class ShardDamageError(Exception):
    """A shard that is gone, or whose bytes are not what was written. `str()` is the reason."""


def sorted_by_key(rows: pa.Table) -> pa.Table:
    """Rows in the order that shards have: by key, the longest of a key first."""
    hi, lo = keys_as_words(rows["key"])
    order = np.lexsort((-rows["scored_len"].to_numpy(), lo, hi))
    return rows if (order[1:] > order[:-1]).all() else rows.take(pa.array(order))


def longest_of_each_key(rows: pa.Table) -> pa.Table:
    """Rows in the order that shards have, of each key only the longest; `rows` itself where that is what it is."""
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
    """Write rows that are sorted by key: zstd, log-probs with byte-stream-split (15% smaller than plain), a checksum a page."""
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
    """blake2b of a shard's file, 32 hex digits: page checksums spare headers and the footer."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Group:
    """A row group: its first row's place in the shard, its rows, its uncompressed bytes, and the first words of its least and
    greatest key."""

    index: int
    start: int
    rows: int
    bytes: int
    least: int
    greatest: int


class Shard:
    """One shard of a table, read in part.

    Methods raise ShardDamageError when the file is gone or its bytes are not what was written, and StoreUnavailableError when
    the storage does not answer.
    """

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        self.path = path
        self._filesystem = filesystem

    @cached_property
    def groups(self) -> list[Group]:
        with self._open() as file:
            return _groups(file.metadata)

    def index_columns(self, groups: Sequence[int] | None = None) -> pa.Table:
        """key, scored_len and logp_sum of some row groups, or of all."""
        with self._open() as file:
            if groups is None:
                return file.read(columns=INDEX_COLUMNS)
            return file.read_row_groups(list(groups), columns=INDEX_COLUMNS)

    def rows(self, groups: Sequence[int]) -> pa.Table:
        """Whole rows of some row groups."""
        with self._open() as file:
            return file.read_row_groups(list(groups)).cast(SCHEMA)

    def batches(self) -> Iterator[pa.Table]:
        """All rows, a row group at a time."""
        with self._open() as file:
            for index in range(file.num_row_groups):
                yield file.read_row_group(index)

    def values(self, column: str, rows: npt.NDArray[np.int32]) -> Iterator[tuple[slice, pa.Array]]:
        """(some of `rows`, a column's values in them), one part after the other; reads only the row groups that hold them.

        A part is of row groups of READ_BYTES together, so that memory is bounded however many rows are asked for.

        Args:
            column: name.
            rows: numbers of rows, ascending.
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
                on_all_ranks = [groups[index] for index in used[at:stop]]
                read = one_array(file.read_row_groups([group.index for group in on_all_ranks], columns=[column])[column])
                sizes = np.array([group.rows for group in on_all_ranks])
                starts = np.array([group.start for group in on_all_ranks])
                part = slice(int(first[at]), ends[stop - 1])
                place = np.searchsorted(starts, rows[part], "right") - 1
                yield part, read.take(pa.array(rows[part] - starts[place] + (np.cumsum(sizes) - sizes)[place]))
                at = stop

    def digest(self) -> str:
        """As `shard_digest`, of the file as it is now."""
        try:
            with self._filesystem.open_input_stream(self.path) as source:
                found = hashlib.blake2b(digest_size=16)
                while chunk := source.read(1 << 24):
                    found.update(chunk)
        except FileNotFoundError as error:
            raise ShardDamageError("the file is gone") from error
        return found.hexdigest()

    def problem(self, digest: str | None = None) -> str | None:
        """What is wrong with this shard after reading every page of it, or None.

        Args:
            digest: what its file's digest should be, where that is known.
        """
        try:
            last: tuple[int, int] = (0, 0)
            for rows in self.batches():
                found = problem_of_rows(rows)
                if found:
                    return found
                hi, lo = keys_as_words(rows["key"])
                if len(hi) and ((int(hi[0]), int(lo[0])) < last or (hi[1:] < hi[:-1]).any()):
                    return "its rows are not sorted by key"
                last = (int(hi[-1]), int(lo[-1])) if len(hi) else last
            if digest is not None and self.digest() != digest:
                return "its bytes are not those that were committed"
        except ShardDamageError as error:
            return str(error)
        return None

    def _open(self) -> _OpenShard:
        return _OpenShard(self._filesystem, self.path)


class _OpenShard:
    """The Parquet file for the time of a `with` block, in which Arrow's errors become ours."""

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
        """Damage when the bytes can be had and are wrong, or are gone; otherwise the storage is at fault."""
        if isinstance(error, FileNotFoundError):
            return ShardDamageError("the file is gone")
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
