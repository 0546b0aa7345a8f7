"""Write, read and verify one shard: an immutable Parquet file. The rows of a shard may be in any order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from reflogp.store import storage
from reflogp.store.schema import one_array, problem_of_rows, schema_of

#: Maximum number of rows in a row group, and the size in bytes that the values of a row group should take (3.4 MB at 200 tokens
#: per row). A row group is read as a whole, so it is smaller if rows have more than 4,096 values: few are read at a time.
_GROUP_ROWS, _GROUP_BYTES, _LONG_GROUP_BYTES, _LONG_ROW_BYTES = 4_096, 4 << 20, 1 << 20, 4 * 4_096
#: Maximum total uncompressed size, in bytes, of row groups whose values are read together. A larger row group is read alone.
READ_BYTES = 32 << 20
#: The columns that a lookup reads if it does not need the values of individual tokens.
INDEX_COLUMNS = ["key", "scored_len", "logp_sum"]


class ShardDamageError(Exception):
    """A shard's file is missing, or its content is not what was written. The error's message gives the reason."""


class ShardMissingError(ShardDamageError):
    """A shard's file does not exist."""


def write_shard(rows: pa.Table, sink: Any) -> None:
    """Write rows as a zstd-compressed Parquet file with a checksum for every page.

    Log-probs are encoded with byte-stream-split, which usually saves space.
    """
    lists = [name for name in ("token_logps", "top_ids", "top_logps") if name in rows.column_names]
    has_long_rows = rows["token_logps"].nbytes > _LONG_ROW_BYTES * len(rows)
    group_bytes = _LONG_GROUP_BYTES if has_long_rows else _GROUP_BYTES
    fitting = group_bytes * len(rows) // max(1, sum(int(rows[name].nbytes) for name in lists))
    pq.write_table(
        rows,
        sink,
        row_group_size=max(1, min(_GROUP_ROWS, fitting)),
        compression="zstd",
        use_dictionary=["provenance"],
        column_encoding={**{f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in lists}, "logp_sum": "BYTE_STREAM_SPLIT"},
        write_page_checksum=True,
    )


class Shard:
    """One shard of a table with `top_k` most probable tokens, which can be read as a whole or in parts.

    Methods raise ShardDamageError if the file is missing or its content is not what was written, and StoreUnavailableError if
    the storage fails.
    """

    def __init__(self, filesystem: pafs.FileSystem, path: str, top_k: int = 0) -> None:
        self.path = path
        self._filesystem = filesystem
        self._top_k, self._schema = top_k, schema_of(top_k)

    def read(self, columns: list[str] | None = None) -> pa.Table:
        """Return the given columns, or all, of all rows, with the types of the schema: other tools may write other types."""
        columns = self._schema.names if columns is None else columns
        with self._open() as file:
            return file.read(columns=columns).select(columns).cast(pa.schema([self._schema.field(name) for name in columns]))

    @cached_property
    def _groups(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The index of each row group's first row, and the row groups' uncompressed sizes in bytes."""
        with self._open() as file:
            groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        ends = np.cumsum([group.num_rows for group in groups])
        return ends - [group.num_rows for group in groups], np.array([group.total_byte_size for group in groups])

    def values(self, column: str, rows: npt.NDArray[np.int32]) -> Iterator[tuple[slice, pa.Array]]:
        """Read one column of the given rows (ascending indices) in parts. For each part, yield the slice of `rows` that it
        covers, and the column's values for these rows.

        Only the row groups that contain the rows are read. Each part covers row groups with a total size of at most READ_BYTES,
        or one larger row group, so memory use is bounded.
        """
        starts, sizes = self._groups
        used, first = np.unique(np.searchsorted(starts, rows, "right") - 1, return_index=True)
        ends = [*first[1:].tolist(), len(rows)]
        with self._open() as file:
            at = 0
            while at < len(used):
                stop = at + max(1, int(np.searchsorted(np.cumsum(sizes[used[at:]]), READ_BYTES, "right")))
                read = file.read_row_groups(used[at:stop].tolist(), columns=[column])[column]
                read = one_array(read.cast(self._schema.field(column).type))
                part = slice(int(first[at]), ends[stop - 1])
                counts = np.array([file.metadata.row_group(int(group)).num_rows for group in used[at:stop]])
                group = np.searchsorted(starts[used[at:stop]], rows[part], "right") - 1
                before = np.cumsum(counts) - counts
                yield part, read.take(pa.array(rows[part] - starts[used[at:stop]][group] + before[group]))
                at = stop

    def problem(self, size: int, rows: int) -> str | None:
        """Read every page, and return what is wrong with the shard, or None. `size` in bytes and the number of `rows` (0:
        unknown) are those in the log.
        """
        try:
            found = self._filesystem.get_file_info(self.path)
            if found.type != pafs.FileType.NotFound and found.size != size:
                return f"the file has {found.size:,} bytes, not {size:,} as when it was committed"
            with self._open() as file:
                if rows and file.metadata.num_rows != rows:
                    return f"the file has {file.metadata.num_rows:,} rows, not {rows:,} as when it was committed"
                for index in range(file.num_row_groups):
                    group = file.read_row_group(index)
                    if set(group.schema.names) != set(self._schema.names):
                        return f"the columns are {group.schema.names}, not {self._schema.names}"
                    if problem := problem_of_rows(group.select(self._schema.names).cast(self._schema), self._top_k):
                        return problem
        except (ShardDamageError, pa.ArrowInvalid) as error:
            return str(error)
        return None

    @contextmanager
    def _open(self) -> Iterator[pq.ParquetFile]:
        """Open the file. Errors of Arrow and the storage in the `with` block become ShardDamageError or
        StoreUnavailableError.
        """
        try:
            with self._filesystem.open_input_file(self.path) as source:
                # With pre_buffer, the columns of many row groups are requested from an object store together.
                is_remote = not isinstance(self._filesystem, pafs.SubTreeFileSystem)
                yield pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=is_remote)
        except FileNotFoundError as error:
            raise ShardMissingError("the file is missing") from error
        except (*storage.STORAGE_ERRORS, pa.ArrowException) as error:
            self._require_readable()
            raise ShardDamageError(storage.sentence(error)) from error

    def _require_readable(self) -> None:
        """Raise StoreUnavailableError if the file's bytes cannot be read."""
        with (
            storage.translate_errors(f"shard {self.path} cannot be read"),
            self._filesystem.open_input_stream(self.path) as source,
        ):
            while source.read(1 << 24):
                pass
