"""Read untrusted Parquet files in a child process with limits on memory and time.

A file of a few kilobytes can expand to any size when it is decoded, and a damaged file can crash pyarrow. Therefore, a forked
child process reads the file with pyarrow and sends record batches as an Arrow stream. If the file cannot be read within the
limits, or crashes every child that reads it, the parent process raises an error but does not crash.

The parent does not trust the stream. It refuses Arrow messages that are longer than `ReadBounds.group_bytes` plus `_MESSAGE`
bytes, and it validates every batch. However, the parent relies on the child to send uncompressed buffers and to exit. A
malicious file that takes control of the child could break these assumptions, read the child's copy of the parent's memory, and
act with the permissions of the user who runs the parent.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from reflogp.scoring.data.bounds import BATCH_ROWS, VALUE_BYTES, Meter, ReadBounds, group_too_large
from reflogp.scoring.data.confined_process import OUT_OF_MEMORY, POLL_SECONDS, SOCKET, STILL, ConfinedProcess
from reflogp.scoring.errors import DatasetError
from reflogp.store.texts import shortened

#: Processor time limit for one batch, in seconds.
BATCH_SECONDS = 60.0
#: Bytes of memory that a child may use in addition to the memory for a page and its decoded values, which is twice
#: `group_bytes`.
_MEMORY = 64 << 20
#: Maximum number of bytes of metadata and padding in an Arrow message. The message's batch is not included.
_MESSAGE = 16 << 20
#: Maximum number of bytes in a piece of a batch. A piece of one row can be larger, and so can a batch that `_pieces` does not
#: split.
_PIECE = 32 << 20
_PARQUET_BUFFER = 64 << 10
_MOST_COLUMNS = 1024
#: The file's path in the child.
_FILE = f"/dev/fd/{SOCKET + 1}"
#: Exit statuses of a child that stored an error message for the parent. _REFUSED means that the file exceeds a limit or
#: that its metadata is inconsistent. _UNREADABLE means that pyarrow cannot read the file.
_REFUSED, _UNREADABLE = 4, 5
#: Format of the first bytes of the shared memory in which the child stores its result: length of the error message in bytes,
#: and number of rows in the file. The error message follows these two numbers.
_RESULT = struct.Struct("<Qq")


@dataclass(frozen=True)
class _Plan:
    """Options for one attempt to read a Parquet file.

    Attributes:
        rows: maximum number of rows that are decoded at once.
        encoded: True to keep strings dictionary-encoded, and to read only one row group.
        skip: number of rows to skip at the start.
    """

    rows: int = BATCH_ROWS
    encoded: bool = False
    skip: int = 0


#: Plans for reading a file. If one plan takes too much memory, the next plan is tried. Decoding dictionary-encoded strings can
#: copy a long string into every row and every element of a list, so the later plans keep strings encoded.
_PLANS = (_Plan(), _Plan(encoded=True), _Plan(rows=1, encoded=True))


class _MemoryExceededError(DatasetError):
    """The child process used too much memory, or crashed, perhaps for lack of memory."""


class _ReaderKilledError(_MemoryExceededError):
    """A signal terminated the child process, because it crashed or because the kernel or another process killed it."""


def parquet_batches(file: Path, meter: Meter) -> Iterator[pa.RecordBatch]:
    """Yield validated record batches of a Parquet file, using a limited amount of memory.

    If a signal terminates the child process, a new child process continues after the last batch that was received. If the
    current row group takes too much memory, or if two consecutive child processes are terminated before they send a batch, this
    row group is read with the next plan of `_PLANS`, which needs less memory. Later row groups are read with the first plan
    again.

    Raises:
        DatasetError: the file exceeds the bounds, has inconsistent metadata, takes too much memory or time to read, or crashes
            the child processes that read it.
        pa.ArrowException, OSError: the file cannot be read for another reason.
    """
    sent = at = 0
    again = True
    while True:
        start = sent
        with _reader(file, meter, replace(_PLANS[at], skip=sent)) as reader:
            try:
                for batch in reader.batches():
                    sent += batch.num_rows
                    yield batch
                if at == 0 or sent >= reader.rows():
                    return
                at, again = 0, True
            except _MemoryExceededError as error:
                if isinstance(error, _ReaderKilledError) and (again or sent > start):
                    again = sent > start
                elif at == len(_PLANS) - 1:
                    raise
                else:
                    at, again = at + 1, True


def parquet_description(file: Path, meter: Meter) -> tuple[int, pa.Schema]:
    """Return (number of rows, schema) of a Parquet file. Raises the same errors as `parquet_batches`."""
    with _reader(file, meter, None) as reader:
        return reader.description()


@contextmanager
def _reader(file: Path, meter: Meter, plan: _Plan | None) -> Iterator[_Reader]:
    with file.open("rb") as opened, mmap.mmap(-1, mmap.PAGESIZE) as result:
        reader = _Reader(file, meter, plan, opened.fileno(), result)
        try:
            yield reader
        finally:
            reader.end()


class _Reader(ConfinedProcess):
    """A child process that reads a file.

    In the parent process, pyarrow reads the child's output from this object, which has the methods of a file.
    """

    closed = False

    def __init__(self, file: Path, meter: Meter, plan: _Plan | None, opened: int, result: mmap.mmap) -> None:
        self._file, self._meter, self._result = file, meter, result
        self._received, self._ended = 0, False
        self._memory = 2 * meter.bounds.group_bytes + _MEMORY
        super().__init__(partial(_work, file, meter.bounds, plan, result), self._memory, [opened])
        self.socket.settimeout(POLL_SECONDS)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches that the child sends."""
        with self._failures(), pa.ipc.open_stream(pa.PythonFile(self, "r")) as stream:
            for batch in stream:
                batch.validate(full=True)  # without this check, invalid offsets could expose other memory of this process
                yield batch

    def description(self) -> tuple[int, pa.Schema]:
        with self._failures():
            schema = pa.ipc.open_stream(pa.PythonFile(self, "r")).schema
        return self.rows(), schema

    def rows(self) -> int:
        """Return the file's number of rows. The child reads this number from the file's metadata."""
        return int(_RESULT.unpack_from(self._result)[1])

    def read(self, size: int) -> memoryview:
        """Return the next `size` bytes of the stream, or fewer at the end of the stream."""
        if size > self._meter.bounds.group_bytes + _MESSAGE:
            raise group_too_large(self._file, size, self._meter.bounds)
        content = memoryview(pa.allocate_buffer(size))
        at = 0
        while at < size:
            self._meter.check()
            try:
                received = self.socket.recv_into(content[at:])
            except TimeoutError:
                self.watch(STILL * BATCH_SECONDS, self._received)
                continue
            except ConnectionError:
                received = 0
            if not received:
                self._ended = True
                break
            at += received
            self._received += received
        return content[:at]

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing when pyarrow closes this object, because `end` closes the socket."""

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Run the `with` block, read the rest of the stream, and wait for the child to exit.

        If the child failed, raise an error that states the reason. This error replaces the Arrow error that the block raises
        when the stream ends too early.
        """
        problem = None
        try:
            yield
            while self.read(1):
                pass
        except (pa.ArrowException, OSError) as error:  # Arrow raises OSError for a stream that ends inside a message
            problem = error
        if self._ended:
            self._raise_for(self.end())
        if problem is not None:
            raise problem

    def _raise_for(self, status: int) -> None:
        if status in (_REFUSED, _UNREADABLE):
            length = _RESULT.unpack_from(self._result)[0]
            text = shortened(self._result[_RESULT.size :][:length].decode("utf-8", "replace"))
            raise DatasetError(text) if status == _REFUSED else pa.ArrowInvalid(text)
        if self.still:
            raise DatasetError(f"{self._file}: reading the file made no progress for {STILL * BATCH_SECONDS:g} s")
        if status == -signal.SIGPROF:
            raise DatasetError(f"{self._file}: reading a batch took more than {BATCH_SECONDS:g} s of processor time")
        if status == OUT_OF_MEMORY:
            raise _MemoryExceededError(
                f"{self._file} cannot be read in {self._memory:,} bytes of memory; rewrite it with smaller row groups"
            )
        if status:
            name = signal.strsignal(-status) if status < 0 else f"status {status}"
            kind = _ReaderKilledError if status < 0 else _MemoryExceededError
            raise kind(
                f"{self._file} crashed the process that read it ({name}): the file is damaged, or cannot be read in "
                f"{self._memory:,} bytes of memory"
            )


# In the child


def _work(file: Path, bounds: ReadBounds, plan: _Plan | None, result: mmap.mmap) -> None:
    """Send a file's schema and batches to the parent, or only the schema if `plan` is None.

    Store the file's number of rows in `result`. If the file cannot be read, store an error message in `result` instead, and
    exit with status _REFUSED or _UNREADABLE.
    """
    pa.set_memory_pool(pa.system_memory_pool())  # other pools use inherited memory, which does not count toward the limit
    signal.setitimer(signal.ITIMER_PROF, BATCH_SECONDS)
    try:
        opened = _open(file, bounds, plan is not None and plan.encoded)
        _RESULT.pack_into(result, 0, 0, opened.metadata.num_rows)
        _send(opened.schema_arrow, _batches(opened, file, plan) if plan else (), file, bounds)
    except MemoryError:
        raise
    except DatasetError as error:
        _leave(result, str(error), _REFUSED)
    except (pa.ArrowException, OSError) as error:
        _leave(result, (str(error) or type(error).__name__).splitlines()[0], _UNREADABLE)


def _leave(result: mmap.mmap, text: str, status: int) -> None:
    content = text.encode("utf-8", "replace")[: len(result) - _RESULT.size]
    _RESULT.pack_into(result, 0, len(content), 0)
    result[_RESULT.size : _RESULT.size + len(content)] = content
    os._exit(status)


def _send(schema: pa.Schema, batches: Iterable[pa.RecordBatch], file: Path, bounds: ReadBounds) -> None:
    """Send batches to the parent as an Arrow stream, with a separate time limit for each batch.

    Large batches are split. Raises DatasetError for a piece that is larger than `bounds.group_bytes`.
    """
    with os.fdopen(SOCKET, "wb", 1 << 18, closefd=False) as sink, pa.ipc.new_stream(sink, schema) as writer:
        sink.flush()
        for batch in batches:
            for piece in _pieces(batch, min(_PIECE, bounds.group_bytes)):
                piece.validate()  # without this check, invalid offsets could expose other memory of this process
                if piece.nbytes > bounds.group_bytes:
                    raise group_too_large(file, piece.nbytes, bounds)
                writer.write_batch(piece)
                sink.flush()
                signal.setitimer(signal.ITIMER_PROF, BATCH_SECONDS)


def _pieces(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """Split a batch into pieces of at most BATCH_ROWS rows and at most `size` bytes. A piece of one row can be larger.

    A batch with dictionaries or views is not split, because each piece would still carry the values of all rows.
    """
    whole = batch.num_rows <= BATCH_ROWS and batch.nbytes <= size
    if whole or batch.num_rows <= 1 or any(_shares_values(field.type) for field in batch.schema):
        yield batch
        return
    half = batch.num_rows // 2
    yield from _pieces(batch.slice(0, half), size)
    yield from _pieces(batch.slice(half), size)


def _shares_values(kind: pa.DataType) -> bool:
    """Return True if each slice of a column of this type, such as a dictionary column, carries the values of all rows."""
    if pa.types.is_dictionary(kind) or pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return True
    return any(_shares_values(kind.field(number).type) for number in range(kind.num_fields))


def _open(file: Path, bounds: ReadBounds, encoded: bool) -> pq.ParquetFile:
    """Open a Parquet file. If `encoded` is True, dictionary-encoded strings are not decoded.

    Raises DatasetError if the file's metadata is inconsistent, or if the sizes or the number of columns that the metadata
    states are outside the limits.
    """
    options: dict[str, Any] = {
        "thrift_string_size_limit": max(bounds.group_bytes // 256, 1 << 20),
        "thrift_container_size_limit": max(bounds.group_bytes // 1024, 100_000),
        "pre_buffer": False,
        "buffer_size": _PARQUET_BUFFER,
        "arrow_extensions_enabled": False,
    }
    opened = pq.ParquetFile(_FILE, **options)
    metadata = opened.metadata
    if not 0 < metadata.num_columns <= _MOST_COLUMNS:
        raise DatasetError(f"{file} has {metadata.num_columns:,} columns; only 1 to {_MOST_COLUMNS:,} are supported")
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    rows = sum(group.num_rows for group in groups)
    if rows != metadata.num_rows or any(group.num_rows < 0 for group in groups):
        raise DatasetError(f"{file} is damaged: the row counts of its row groups do not add up to its total row count")
    largest = max((group.total_byte_size for group in groups), default=0)
    claimed = sum(max(group.total_byte_size, 0) for group in groups)
    if largest > bounds.group_bytes:
        raise group_too_large(file, largest, bounds)
    if max(claimed, VALUE_BYTES * rows) > bounds.dataset_bytes:
        raise DatasetError(
            f"{file} claims {rows:,} rows with {claimed:,} bytes in total, but a dataset may have at most "
            f"{bounds.dataset_bytes:,} bytes (each row counts as at least {VALUE_BYTES} bytes): split the dataset"
        )
    if not encoded:
        return opened
    leaves = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    strings = [
        leaf.path
        for number, leaf in enumerate(leaves)
        if leaf.physical_type == "BYTE_ARRAY"
        and leaf.logical_type.type != "DECIMAL"
        and any(group.column(number).has_dictionary_page for group in groups)
    ]
    return pq.ParquetFile(_FILE, metadata=metadata, read_dictionary=strings, **options)


def _batches(opened: pq.ParquetFile, file: Path, plan: _Plan) -> Iterator[pa.RecordBatch]:
    """Yield a file's batches.

    If the plan keeps strings encoded, read only one row group, because `parquet_batches` uses the first plan of `_PLANS` again
    for the next row group.
    """
    skip = plan.skip
    for number in range(opened.metadata.num_row_groups):
        rows = opened.metadata.row_group(number).num_rows
        if skip >= rows:
            skip -= rows
            continue
        for batch in opened.iter_batches(plan.rows, row_groups=[number], use_threads=False):
            rows -= batch.num_rows
            if skip < batch.num_rows:
                yield batch.slice(skip)
            else:
                signal.setitimer(signal.ITIMER_PROF, BATCH_SECONDS)
            skip = max(0, skip - batch.num_rows)
        if rows:
            raise DatasetError(f"{file} is damaged: a row group does not contain as many rows as its metadata says")
        if plan.encoded:
            return
