"""Rows out of dataset files: JSON lines, JSON, CSV, Parquet, Arrow, a `datasets` folder, a hub name.

Knows file formats. Does not know prompts, tokens or keys. A row that cannot be read is an item of its own in the stream,
with its number and what is wrong, so that one bad line never hides the good ones. Called by `tokenize`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from reflogp_service.errors import DatasetError

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
_COMPRESSED = {".gz", ".bz2", ".zst", ".lz4"}
_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Row:
    """One row of a dataset: its number (from 0), and its columns or what made it unreadable."""

    number: int
    columns: dict[str, Any] | None
    problem: str | None = None


class RowSource:
    """A dataset that can be read from its beginning any number of times, in bounded memory.

    Args:
        data: a file, a folder that `datasets.save_to_disk` wrote, a folder of files of one format, or a hub name.
        split: of a hub dataset or a saved DatasetDict.

    Raises:
        DatasetError: nothing of that name can be opened.
    """

    def __init__(self, data: str, split: str = "train") -> None:
        self.name = data
        self.split = split
        self._dataset: Any = None
        path = Path(data).expanduser()
        self.files: tuple[Path, ...] = ()
        if path.is_dir():
            self.format, self.files = _folder_format(path)
        elif path.is_file():
            self.format, self.files = _file_format(path), (path,)
        elif path.exists() or data.startswith((".", "/", "~")) or Path(data).suffix in {*_SUFFIXES, *_COMPRESSED}:
            raise DatasetError(f"dataset {data!r}: no such file")
        else:
            self.format = "hub"
        if self.format in ("folder", "hub"):
            self._dataset = _load_with_datasets(data, self.format, split)

    def __iter__(self) -> Iterator[Row]:
        for number, (columns, problem) in enumerate(self._rows()):
            yield Row(number, columns, problem)

    def count(self) -> int:
        """Rows in all, readable or not. Lines of text are counted by reading them, everything else by its metadata."""
        if self._dataset is not None:
            return len(self._dataset)
        if self.format == "jsonl":
            return sum(1 for file in self.files for line in _lines(file) if line.strip())
        if self.format == "parquet":
            return sum(pq.ParquetFile(file).metadata.num_rows for file in self.files)
        return sum(1 for _ in self._rows())

    def schema(self) -> pa.Schema:
        """Arrow schema of the readable rows' columns (for text formats: found by reading them all once)."""
        if self._dataset is not None:
            return self._dataset.with_format("arrow")[:1].schema if len(self._dataset) else pa.schema([])
        if self.format == "parquet":
            return pa.unify_schemas([pq.read_schema(file) for file in self.files])
        schemas: list[pa.Schema] = []
        for rows in batched((row.columns for row in self if row.columns is not None), _BATCH_ROWS):
            found = pa.Table.from_pylist(rows).schema
            schemas = [pa.unify_schemas([*schemas, found], promote_options="permissive")]
        return schemas[0] if schemas else pa.schema([])

    def _rows(self) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
        if self._dataset is not None:
            for batch in self._dataset.iter(batch_size=_BATCH_ROWS):
                for values in zip(*batch.values(), strict=True):
                    yield dict(zip(batch, values, strict=True)), None
            return
        read = {"jsonl": _jsonl, "json": _json, "csv": _csv, "parquet": _parquet, "arrow": _arrow}[self.format]
        for file in self.files:
            try:
                yield from read(file)
            except (OSError, pa.ArrowException, EOFError, UnicodeDecodeError, csv.Error) as error:
                raise DatasetError(f"{file} cannot be read as {self.format}: {str(error).splitlines()[0]}") from error


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of up to `size` items."""
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


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


def _lines(file: Path) -> Iterator[bytes]:
    with pa.input_stream(str(file), compression="detect") as stream:
        yield from io.BufferedReader(stream, 1 << 20)


def _jsonl(file: Path) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    for line in _lines(file):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield None, f"not JSON: {error}"
            continue
        yield (value, None) if isinstance(value, dict) else (None, f"not a JSON object but a {type(value).__name__}")


def _json(file: Path) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    """One array of objects, or JSON lines under the wrong name."""
    text = b"".join(_lines(file))
    if not text.lstrip().startswith(b"["):
        yield from _jsonl(file)
        return
    try:
        values = json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{file} is not JSON: {error}") from error
    for value in values:
        yield (value, None) if isinstance(value, dict) else (None, f"not a JSON object but a {type(value).__name__}")


def _csv(file: Path) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    """Every column as text; an empty cell is null, as it is to `datasets`. A line with another number of cells is a bad row."""
    csv.field_size_limit(1 << 30)
    with pa.input_stream(str(file), compression="detect") as stream:
        reader = csv.reader(io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8", newline=""))
        header = next(reader, None)
        if not header:
            raise DatasetError(f"{file} has no header line")
        for cells in reader:
            if len(cells) != len(header):
                yield None, f"{len(cells)} columns where the header has {len(header)}"
            else:
                yield {name: cell or None for name, cell in zip(header, cells, strict=True)}, None


def _parquet(file: Path) -> Iterator[tuple[dict[str, Any], None]]:
    for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS):
        for row in batch.to_pylist():
            yield row, None


def _arrow(file: Path) -> Iterator[tuple[dict[str, Any], None]]:
    with pa.memory_map(str(file)) as source:
        try:
            reader = pa.ipc.open_file(source)
            batches: Iterable[pa.RecordBatch] = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            batches = pa.ipc.open_stream(source)
        for batch in batches:
            for row in batch.to_pylist():
                yield row, None
