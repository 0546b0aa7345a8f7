"""Rows out of dataset files: JSON lines, JSON, CSV, Parquet, Arrow, a `datasets` folder, a hub name.

Knows file formats. Does not know prompts, tokens or keys. A row that cannot be read is an item of its own in the stream,
with its number and what is wrong, so that one bad line never hides the good ones. What reading may cost is `bounds`'.
Called by `tokenize`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from reflogp.scoring.data.arrow_bounds import arrow_batches
from reflogp.scoring.data.bounds import BATCH_ROWS, Meter, ReadBounds, RecordLines, lines, open_text, read_group, rows_of
from reflogp.scoring.data.parquet_bounds import open_parquet, parquet_batches
from reflogp.scoring.errors import DatasetError
from reflogp.store import FileChangedError
from reflogp.store.digests import FileIdentity
from reflogp.store.texts import shortened

FileFormat = Literal["jsonl", "json", "csv", "parquet", "arrow", "folder", "hub"]

_SUFFIXES: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
#: What `dataset_suffix` takes, in words, behind "ends in" or "end in".
SUFFIXES_IN_WORDS = ".jsonl, .json, .csv, .parquet or .arrow; text may end in .gz or .zst behind that"
_COMPRESSED = {".gz", ".bz2", ".zst", ".lz4"}
_TEXT: set[FileFormat] = {"jsonl", "json", "csv"}
#: A list of rows ends where they have so many bytes together.
_BATCH_BYTES = 256 << 20
#: A saved dataset's description of itself is no longer.
_STATE_BYTES = 16 << 20
#: An escape that may be half of a surrogate pair.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SPACE = re.compile(r"[ \t\n\r]*")

#: A row's columns or None, what is wrong with it or None, its bytes as they were read (0 where that is not known).
_Read = tuple[dict[str, Any] | None, str | None, int]


@dataclass(frozen=True)
class Row:
    """One row of a dataset: its number (from 0), and its columns or what made it unreadable; its bytes where they are known."""

    number: int
    columns: dict[str, Any] | None
    problem: str | None = None
    size: int = 0


class RowSource:
    """A dataset that can be read from its beginning any number of times, in bounded memory.

    Args:
        data: a file, a folder that `datasets.save_to_disk` wrote, a folder of files of one format, or a hub name.
        split: of a hub dataset or a saved DatasetDict.
        bounds: for data that others sent: what is longer is refused, what a saved dataset names outside its folder too, and
            there is no hub.
        check: called at every step of reading; raises to stop.

    Raises:
        DatasetError: nothing of that name can be opened.
    """

    def __init__(
        self,
        data: str,
        split: str = "train",
        bounds: ReadBounds | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.name = data
        self.split = split
        self._bounds = bounds
        self._check = check
        self._dataset: Any = None
        self._numbers: frozenset[int] | None = None
        path = Path(data).expanduser()
        self.files: tuple[Path, ...] = ()
        if path.is_dir():
            self.format, self.files = _folder_format(path)
        elif path.is_file():
            self.format, self.files = _file_format(path), (path,)
        elif bounds or path.exists() or data.startswith((".", "/", "~")) or Path(data).suffix in {*_SUFFIXES, *_COMPRESSED}:
            raise DatasetError(f"dataset {data!r}: no such file")
        else:
            self.format = "hub"
        if self.format == "folder" and bounds:
            self.format, self.files = "arrow", _saved_files(path, split)
        of_folder = path.rglob("*") if self.format == "folder" else ()
        self._identities = {file: FileIdentity.at(file) for file in (*self.files, *of_folder) if file.is_file()}
        if self.format in ("folder", "hub"):
            self._dataset = _load_with_datasets(data, self.format, split)

    def __iter__(self) -> Iterator[Row]:
        for number, (columns, problem, size) in enumerate(self._rows()):
            if self._numbers is None or number in self._numbers:
                yield Row(number, columns, problem, size)

    def only(self, numbers: Iterable[int]) -> RowSource:
        """The same dataset, of which these rows alone are given, with their numbers; `count` and `schema` stay the whole's."""
        some = copy(self)
        some._numbers = frozenset(numbers)
        return some

    def check_unchanged(self) -> None:
        """Raise FileChangedError when a local file was replaced or written to since the dataset was opened.

        Whoever reads a dataset more than once calls it before it hands on what it made.
        """
        for file, identity in self._identities.items():
            try:
                same = FileIdentity.at(file) == identity
            except OSError:
                same = False
            if not same:
                raise FileChangedError(f"{file} was changed or replaced while it was read; run again")

    def count(self) -> int:
        """Rows in all, readable or not. Lines of text are counted by reading them, everything else by its metadata."""
        if self._dataset is not None:
            return len(self._dataset)
        if self.format == "jsonl":
            return sum(1 for _ in self._lines())
        if self.format == "parquet":
            return sum(open_parquet(file, self._bounds).metadata.num_rows for file in self.files)
        return sum(1 for _ in self._rows())

    def schema(self, usable: Callable[[dict[str, Any]], bool] = lambda columns: True) -> pa.Schema:
        """Arrow schema of the readable rows' columns (for text formats: found by reading them all once).

        Args:
            usable: which rows count; a row that is left out anyway must not decide what type a column has.
        """
        if self._dataset is not None:
            return self._dataset.with_format("arrow")[:1].schema if len(self._dataset) else pa.schema([])
        if self.format == "parquet":
            return pa.unify_schemas([open_parquet(file, self._bounds).schema_arrow for file in self.files])
        schemas: list[pa.Schema] = []
        for rows in batched((row for row in self if row.columns is not None and usable(row.columns)), BATCH_ROWS):
            try:
                found = pa.Table.from_pylist([row.columns for row in rows]).schema
                schemas = [pa.unify_schemas([*schemas, found], promote_options="permissive")]
            except (pa.ArrowException, OverflowError) as error:
                raise DatasetError(f"{self.name}: a column has no one type: {shortened(str(error))}") from error
        return schemas[0] if schemas else pa.schema([])

    def _rows(self) -> Iterator[_Read]:
        for read in self._read():
            if self._check is not None:
                self._check()
            yield read

    def _read(self) -> Iterator[_Read]:
        if self._dataset is not None:
            for batch in self._dataset.iter(batch_size=BATCH_ROWS):
                for values in zip(*batch.values(), strict=True):
                    yield dict(zip(batch, values, strict=True)), None, 0
            return
        meter = Meter(self._bounds, self.name, self._check)
        read = {"jsonl": _jsonl, "json": _json, "csv": _csv, "parquet": _parquet, "arrow": _arrow}[self.format]
        for file in self.files:
            with _said_as_dataset_error(file, self.format):
                yield from read(file, meter)

    def _lines(self) -> Iterator[bytes | None]:
        """Lines of text that are not blank; None for one that is too long."""
        meter = Meter(self._bounds, self.name, self._check)
        for file in self.files:
            with _said_as_dataset_error(file, self.format), open_text(file, meter) as reader:
                yield from (line for line in lines(reader, meter.bounds.row_bytes) if line is None or line.strip())


def batched(rows: Iterable[Row], count: int) -> Iterator[list[Row]]:
    """Lists of up to `count` rows; of fewer where rows are so long that a list would not be bounded in memory."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += row.size
        if len(batch) == count or size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def dataset_suffix(name: str) -> str | None:
    """How a dataset file's name ends, in small letters: `.jsonl`, `.csv.gz`, …; None for a name that no reader knows."""
    path = PurePosixPath(name)
    packed = path.suffix.lower() if path.suffix.lower() in _COMPRESSED else ""
    suffix = PurePosixPath(path.stem).suffix.lower() if packed else path.suffix.lower()
    found = _SUFFIXES.get(suffix)
    return suffix + packed if found in _TEXT or (found and not packed) else None


@contextmanager
def _said_as_dataset_error(file: Path, form: FileFormat) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(
            f"{file} cannot be read as {form}: {shortened((str(error) or type(error).__name__).splitlines()[0])}"
        ) from error


def _file_format(path: Path) -> FileFormat:
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    found = _SUFFIXES.get(suffixes[-1].lower()) if suffixes else None
    if found is None:
        raise DatasetError(f"{path}: unknown file type; use one of {', '.join(_SUFFIXES)} (may be compressed)")
    return found


def _folder_format(folder: Path) -> tuple[FileFormat, tuple[Path, ...]]:
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        return "folder", ()
    files = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith((".", "_")))
    data = [p for p in files if any(suffix in _SUFFIXES for suffix in p.suffixes)]
    formats = {_file_format(p) for p in data}
    if len(formats) != 1:
        raise DatasetError(f"{folder} holds {'no data files' if not formats else 'files of several formats'}")
    return formats.pop(), tuple(data)


def _load_with_datasets(data: str, form: FileFormat, split: str) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(data) if form == "folder" else datasets.load_dataset(data, split=split)
    except Exception as error:  # the hub client raises dozens of kinds, all meaning "cannot be had"
        raise DatasetError(
            f"dataset {data!r} is neither a local file nor a hub dataset that can be reached ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''})"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DatasetError(f"dataset {data!r} has no split {split!r}; it has {', '.join(loaded)}")
        loaded = loaded[split]
    return loaded


def _saved_files(folder: Path, split: str) -> tuple[Path, ...]:
    """The Arrow files of a saved dataset, as its state.json lists them; none that lies elsewhere."""
    if (folder / "dataset_dict.json").is_file():
        splits = [str(name) for name in _state(folder / "dataset_dict.json").get("splits", [])]
        if split not in splits:
            raise DatasetError(f"dataset {str(folder)!r} has no split {split!r}; it has {', '.join(splits)}")
        folder = folder / _plain_name(split, folder)
    listed = _state(folder / "state.json").get("_data_files", [])
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in listed]
    return tuple(folder / _plain_name(name, folder) for name in names)


def _state(file: Path) -> dict[str, Any]:
    """A JSON object of a saved dataset, whose lists are lists."""
    try:
        with file.open("rb") as raw:
            state = json.loads(raw.read(_STATE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{file.parent} is no saved dataset: {file.name} cannot be read") from error
    if not isinstance(state, dict) or not all(isinstance(state.get(name, []), list) for name in ("splits", "_data_files")):
        raise DatasetError(f"{file.parent} is no saved dataset: {file.name} does not describe one")
    return state


def _plain_name(name: object, folder: Path) -> str:
    if not isinstance(name, str) or not name or name.startswith(".") or any(ch in name for ch in "/\\\0"):
        raise DatasetError(f"the saved dataset {folder} names a file that is not its own: {name!r}")
    return name


def _jsonl(file: Path, meter: Meter) -> Iterator[_Read]:
    with open_text(file, meter) as reader:
        yield from _json_lines(reader, meter.bounds)


def _json_lines(reader: io.BufferedReader, bounds: ReadBounds) -> Iterator[_Read]:
    for line in lines(reader, bounds.row_bytes):
        if line is None:
            yield None, bounds.too_long(), 0
            continue
        if not line.strip():
            continue
        yield _json_row(line)


def _json_row(line: bytes) -> _Read:
    """A row from a line of JSON. Bytes that are not valid text make a bad row, as an escape of half a character does."""
    try:
        text = line.decode(json.detect_encoding(line))
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}", 0
    return _object(value, len(line), text)


def _object(value: Any, size: int, text: str) -> _Read:
    """A row from a JSON value and the text that it was written as."""
    if not isinstance(value, dict):
        return None, f"not a JSON object but a {type(value).__name__}", 0
    problem = _surrogate_problem(value) if _SURROGATE.search(text) else None
    return (value, None, size) if problem is None else (None, problem, 0)


def _surrogate_problem(value: Any) -> str | None:
    """Look through keys and values; a pair that was written as two escapes is one character by now."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "it has half of a surrogate pair (such as \\ud800), which no tokenizer and no file takes"
    except RecursionError:
        return "it is nested too deeply"
    return None


def _json(file: Path, meter: Meter) -> Iterator[_Read]:
    """One array of objects, decoded one after the other, or JSON lines under the wrong name."""
    with open_text(file, meter) as reader:
        while (head := reader.peek()) and not head.strip():
            reader.read(len(head))
        if not head.lstrip().startswith(b"["):
            yield from _json_lines(reader, meter.bounds)
            return
        content = read_group(reader, meter, file)
    try:
        text = content.decode(json.detect_encoding(content))
        del content
        yield from _json_array(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{file} is not JSON: {error}") from error


def _json_array(text: str) -> Iterator[_Read]:
    """The rows of a JSON array. Raises ValueError where the text is not one."""
    decode = json.JSONDecoder().raw_decode

    def skip(at: int) -> int:
        found = _SPACE.match(text, at)
        return found.end() if found else at

    at = skip(skip(0) + 1)
    if text[at : at + 1] != "]":
        while True:
            begin = at
            value, at = decode(text, begin)
            yield _object(value, at - begin, text[begin:at])
            at = skip(at)
            if text[at : at + 1] == "]":
                break
            if text[at : at + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = skip(at + 1)
    if skip(at + 1) != len(text):
        raise json.JSONDecodeError("Extra data", text, at + 1)


def _csv(file: Path, meter: Meter) -> Iterator[_Read]:
    """Every column as text; an empty cell is null, as it is to `datasets`. A line with another number of cells is a bad row."""
    csv.field_size_limit(min(meter.bounds.row_bytes, 1 << 30))
    with open_text(file, meter) as reader:
        records = RecordLines(reader, meter.bounds.row_bytes, file)
        rows = csv.reader(records)
        header = next(rows, None)
        if not header:
            raise DatasetError(f"{file} has no header line")
        records.next_record()
        for cells in rows:
            size = records.next_record()
            if len(cells) != len(header):
                yield None, f"{len(cells)} columns where the header has {len(header)}", 0
            else:
                yield {name: cell or None for name, cell in zip(header, cells, strict=True)}, None, size


def _parquet(file: Path, meter: Meter) -> Iterator[_Read]:
    if meter.bounded:
        yield from _bounded(parquet_batches(file, meter), meter)
        return
    for batch in pq.ParquetFile(file).iter_batches(BATCH_ROWS):
        for row in batch.to_pylist():
            yield row, None, 0


def _arrow(file: Path, meter: Meter) -> Iterator[_Read]:
    if meter.bounded:
        yield from _bounded(arrow_batches(file, meter), meter)
        return
    with pa.memory_map(str(file)) as source:
        try:
            reader = pa.ipc.open_file(source)
            batches: Iterable[pa.RecordBatch] = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            batches = pa.ipc.open_stream(source)
        for batch in batches:
            batch.validate(full=True)
            for row in batch.to_pylist():
                yield row, None, 0


def _bounded(batches: Iterable[pa.RecordBatch], meter: Meter) -> Iterator[_Read]:
    for batch in batches:
        for row, size in rows_of(batch, meter):
            yield row, None if row is not None else meter.bounds.too_long(), size
