"""Read local files through `datasets`, so that rows have the columns and types that a trainer sees.

`datasets` gives all rows the types of the first ones: it fills missing keys of messages with nulls, orders keys alike, and
turns whole numbers into floats if others have a fraction. A chat template shows such differences. The files are streamed, so
that the first rows come at once and nothing is written to the cache of `datasets`. `load_dataset` casts tables when it writes
them to this cache; here, `LocalFiles` does.

If a single line of a JSON file is bad, `datasets` reads no row of the file. The file is then read from a copy without its bad
rows.
"""

from __future__ import annotations

import codecs
import glob
import io
import json
import logging
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from reflogp.scoring.data.shape import TEXT_COLUMNS, other_delimiter
from reflogp.scoring.errors import DatasetError
from reflogp.store.texts import shortened, shortened_names

#: Dict from each suffix of compressed text files to Arrow's name for the compression method.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
#: Maximum number of rows, and approximate maximum number of bytes, that are decoded at once from a Parquet file.
BATCH_ROWS, _BATCH_BYTES = 1024, 64 << 20
#: Suffixes of compressed files for which `datasets` needs a package that may not be installed.
_DECOMPRESSED = (".zst", ".lz4")

#: Number of bytes of a text file that are read at once.
_CHUNK = 1 << 20


def open_builder(path: Path, form: str) -> Any:
    import datasets

    # `datasets` logs the errors that it raises.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    options = {"sep": "\t"} if ".tsv" in (suffix.lower() for suffix in path.suffixes[-2:]) else {}
    with tempfile.TemporaryDirectory(prefix="reflogp-") as cache:  # a builder locks a file there, though a stream is not cached
        if form == "folder":
            return datasets.load_dataset_builder(str(path), cache_dir=cache)
        kind, files = "json" if form == "jsonl" else form, glob.escape(str(path))
        return datasets.load_dataset_builder(kind, data_files=files, cache_dir=cache, **options)


class LocalFiles:
    """One pass over the files of a split. If `form` is "folder", `path` is the folder of which `datasets` decides which files
    belong to a split."""

    def __init__(self, path: Path, form: str, split: str, files: tuple[Path, ...]) -> None:
        self._builder, self._is_folder = open_builder(path, form), form == "folder"
        #: The files of each split, in the order of `datasets`.
        self._splits: dict[str, list[str]] = self._builder.config.data_files
        self._split, self._files = split, files
        self._features: Any = None
        self._rows = 0

    def __iter__(self) -> Iterator[pa.Table | str]:
        """Yield the rows in order, as tables with equal schemas; for a row that cannot be read, the reason."""
        with tempfile.TemporaryDirectory(prefix="reflogp-") as folder:
            copy = Path(folder) / "copy"
            first = next(iter(self._splits))
            if self._is_folder and first != self._split:  # the types of all splits are those of the first split's first rows
                next(self._of_file(Path(self._splits[first][0]), copy), None)
            for file in self._files:
                for item in self._of_file(file, copy):
                    self._rows += 1 if isinstance(item, str) else len(item)
                    yield item

    def _of_file(self, file: Path, copy: Path) -> Iterator[pa.Table | str]:
        readable, done = file, 0
        try:
            if file.suffix.lower() in _DECOMPRESSED:
                readable = copy
                with (
                    pa.input_stream(str(file), compression=COMPRESSIONS[file.suffix.lower()]) as packed,
                    copy.open("wb") as sink,
                ):
                    shutil.copyfileobj(packed, sink)
            for table in self._tables(readable):
                done += len(table)
                yield table
            return
        except MemoryError:
            raise
        except Exception as error:  # `datasets` raises exceptions of many types
            refusal = self._refusal(file, error)
            if self._builder.name != "json":
                raise refusal from error
            try:
                problems, good_rows = _write_good_rows(file, copy)
            except (OSError, pa.ArrowException) as broken:
                raise self._refusal(file, broken) from broken
            if good_rows and not problems:
                raise refusal from error
        try:
            for item in _with_problems(self._tables(copy) if good_rows else (), problems):
                length = 1 if isinstance(item, str) else len(item)
                if done < length:
                    yield item if isinstance(item, str) else item[done:]
                done = max(0, done - length)
        except (MemoryError, DatasetError):
            raise
        except Exception as error:
            raise self._refusal(file, error) from error

    def _tables(self, file: Path) -> Iterator[pa.Table]:
        import datasets
        from datasets.table import table_cast

        self._builder.config.data_files = {self._split: [str(file)]}
        if self._builder.name == "parquet":
            self._builder.config.batch_size = _rows_at_once(file)  # instead of a row group
        stream = self._builder.as_streaming_dataset(split=self._split)
        for _, table in stream._ex_iterable.iter_arrow():
            if self._builder.name == "arrow":
                table.validate(full=True)  # invalid offsets would expose other memory of this process
            if self._features is None:
                self._features = self._builder.info.features or datasets.Features.from_arrow_schema(table.schema)
                self._builder.info.features = self._features
                numbers = _columns_of_numbers(self._features) if self._builder.name == "csv" else ()
                if numbers:  # cells of a CSV file such as 4 or 007, which no trainer takes unless they are read as text
                    self._features |= {name: datasets.Value("string") for name in numbers}
                    self._builder.config.features = self._features
                    yield from self._tables(file)
                    return
            yield table_cast(table, self._features.arrow_schema)

    def _refusal(self, file: Path, error: Exception) -> DatasetError:
        if isinstance(error, DatasetError):
            return error
        from datasets.table import CastError

        rest = f" from row {self._rows} on" if self._rows else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, CastError) and set(error.table_column_names) != set(error.requested_column_names):
            found, first = (shortened_names(names) for names in (error.table_column_names, error.requested_column_names))
            reason = f"the columns are {found}, but those of the first rows are {first}; write the same columns in all rows"
        if self._builder.name == "csv":
            with suppress(OSError, UnicodeDecodeError, pa.ArrowException):
                reason = other_delimiter(next(lines_of(file), b"").decode().strip()) or reason
        if isinstance(error, UnicodeDecodeError):
            reason += "; save the file as UTF-8"
        return DatasetError(f"{file} cannot be read as {self._builder.name}{rest}: {shortened(reason)}")


def _rows_at_once(file: Path) -> int:
    metadata = pq.read_metadata(file)
    size = sum(int(metadata.row_group(number).total_byte_size) for number in range(metadata.num_row_groups))
    return max(1, min(BATCH_ROWS, _BATCH_BYTES * int(metadata.num_rows) // max(1, size)))


def _columns_of_numbers(features: Any) -> list[str]:
    types = features.arrow_schema
    return [
        name
        for name in TEXT_COLUMNS
        if name in features and (pa.types.is_primitive(types.field(name).type) and not pa.types.is_null(types.field(name).type))
    ]


@contextmanager
def _opened(file: Path) -> Iterator[io.BufferedReader]:
    """Open a text file after its byte order mark and white space, and decompress it according to its suffix."""
    with pa.input_stream(str(file), compression=COMPRESSIONS.get(file.suffix.lower())) as stream:
        reader: Any = io.BufferedReader(stream, _CHUNK)
        if reader.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):  # as Excel and PowerShell write it
            reader.read(len(codecs.BOM_UTF8))
        while (head := reader.peek()) and not head.strip():
            reader.read(len(head))
        yield reader


def contains_array(file: Path) -> bool:
    with _opened(file) as reader:
        return reader.peek().lstrip().startswith(b"[")


def lines_of(file: Path) -> Iterator[bytes]:
    with _opened(file) as reader:
        yield from (line for line in reader if line.strip())


def _values(file: Path) -> Iterator[Any]:
    """Yield the rows of a JSON file. For a line that is not JSON, yield the error."""
    if contains_array(file):
        with _opened(file) as reader:
            content = reader.read()
        try:
            yield from json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{file} is not JSON: {error}") from error
        return
    for line in lines_of(file):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            value = error
        yield value


def _write_good_rows(file: Path, copy: Path) -> tuple[dict[int, str], int]:
    """Write the rows that can be read as JSON Lines. Return (dict from bad rows' numbers to reasons, number of good rows)."""
    from datasets.utils.json import ujson_loads

    problems: dict[int, str] = {}
    written = 0
    with copy.open("wb") as sink:
        for number, row in enumerate(_values(file)):
            try:
                if isinstance(row, Exception):
                    raise row
                if not isinstance(row, dict):
                    problems[number] = f"the row has type {type(row).__name__}; expected a JSON object"
                    continue
                line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
                try:
                    ujson_loads(line)
                except ValueError as error:
                    problems[number] = f"a value that `datasets` cannot read, such as a number of more than 64 bits ({error})"
                    continue
                sink.write(line + b"\n")
                written += 1
            except json.JSONDecodeError as error:
                problems[number] = f"not JSON: {error.msg} (character {error.pos + 1})"
            except UnicodeEncodeError:
                problems[number] = "the row contains an unpaired surrogate (such as \\ud800), which UTF-8 cannot encode"
            except (ValueError, RecursionError) as error:
                problems[number] = f"not JSON: {error}"
    return problems, written


def _with_problems(tables: Iterable[pa.Table], problems: dict[int, str]) -> Iterator[pa.Table | str]:
    at, bad = 0, deque(sorted(problems))
    for table in tables:
        while len(table):
            while bad and bad[0] == at:
                yield problems[bad.popleft()]
                at += 1
            count = min(len(table), bad[0] - at) if bad else len(table)
            yield table[:count]
            table, at = table[count:], at + count
    yield from (problems[number] for number in bad)
