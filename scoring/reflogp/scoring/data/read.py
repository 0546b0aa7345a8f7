"""Read rows from JSON Lines, JSON, CSV, Parquet or Arrow files, from datasets saved with `save_to_disk`, or from the HF Hub.

A row that cannot be read is yielded as a `Row` with an error message, so that the rows after it can still be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from reflogp.scoring.data.files import BATCH_ROWS, COMPRESSIONS, LocalFiles, contains_array, lines_of, open_builder
from reflogp.scoring.data.images import OpenFile, below, bytes_of_images
from reflogp.scoring.errors import DatasetError
from reflogp.store import ReflogpError, UsageError
from reflogp.store.digests import FileIdentity, require_unchanged
from reflogp.store.hub import SCHEME, HubFile
from reflogp.store.texts import first_line, shortened

FileFormat = Literal["jsonl", "json", "csv", "parquet", "arrow", "folder", "hub"]

_SUFFIXES: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
#: The suffixes that `dataset_suffix` accepts, as text for messages such as "does not end in …". The rare suffixes .ndjson and
#: .feather are left out.
SUFFIXES_IN_WORDS = ".jsonl, .json, .csv, .parquet or .arrow (the first three can be compressed, such as .jsonl.gz or .csv.zst)"
_TEXT: set[FileFormat] = {"jsonl", "json", "csv"}
#: A batch of rows ends when its rows exceed this many bytes in total.
_BATCH_BYTES = 256 << 20

#: A row as it was read: (columns, error message, size in bytes). The columns are None for an unreadable row, the error message
#: is None for a readable row, and the size is 0 if it is unknown.
_Read = tuple[dict[str, Any] | None, str | None, int]


@dataclass(frozen=True)
class Row:
    """A row with its number in the dataset, from 0: its columns, or the problem that makes it unreadable.

    Attributes:
        size: approximate size in bytes. Only the images are counted for saved datasets, hub datasets and Python objects.
    """

    number: int
    columns: dict[str, Any] | None
    problem: str | None = None
    size: int = 0


class RowSource:
    """A dataset that can be read from the start any number of times.

    Only a file with a JSON array is read into memory as a whole.

    Args:
        data: a local path, the name of a dataset on the Hugging Face Hub (a hub dataset), or the URI of a file on the Hub
            (hf://datasets/ORGANISATION/NAME[@REVISION]/PATH). The path can be that of a file, of a folder saved by `datasets`
            (a saved dataset), or of a folder of files in one format.
        confined: True for a dataset that somebody else has written. Only local files are then read: names of hub datasets and
            hf:// URIs are rejected, and so are saved datasets whose metadata names files outside their folder.
        open_image: function that opens an image file. It takes the path that a row contains, and returns a file descriptor. If
            None, rows can contain the path of any file. Relative paths are then resolved against the folder of the dataset's
            files, or against the current folder if `files` is empty.
        is_fetched: whether the files of a folder are those of the split alone, under names that do not say so.

    Attributes:
        format: format of the files; "folder" for a saved dataset, but "arrow" for one that is `confined`.
        files: the files that are read; empty for the formats "folder" and "hub".
    """

    name: str
    split = "train"
    format: FileFormat = "json"
    files: tuple[Path, ...] = ()
    _check: Callable[[], None] | None = None
    _dataset: Any = None
    _schema: pa.Schema | None = None
    _numbers: frozenset[int] | None = None

    def __init__(
        self,
        data: str,
        split: str = "train",
        confined: bool = False,
        check: Callable[[], None] | None = None,
        open_image: OpenFile | None = None,
        is_fetched: bool = False,
    ) -> None:
        self.name = data
        self.split = split
        self._check = check
        path = self._path = _downloaded(data) if data.startswith(SCHEME) and not confined else Path(data).expanduser()
        if path.is_dir():
            self.format, self.files = _folder_format(path, split, is_fetched)
        elif path.is_file():
            self.format, self.files = _file_format(path), (path,)
        elif (
            confined
            or path.exists()
            or data.startswith((".", "/", "~"))
            or Path(data).suffix.lower() in {*_SUFFIXES, *COMPRESSIONS}
        ):
            raise DatasetError(f"dataset {data!r}: no such file")
        else:
            self.format = "hub"
        if self.format == "folder" and confined:
            self.format, self.files = "arrow", _saved_files(path, split)
            self._path = self.files[0] if self.files else path
        of_folder = path.rglob("*") if self.format == "folder" else ()
        self._identities = {file: FileIdentity.at(file) for file in (*self.files, *of_folder) if file.is_file()}
        if self.format in ("folder", "hub"):
            self._dataset = _load_with_datasets(data, self.format, split)
        self.open_image = open_image or below(self.files[0].parent if self.files else None)

    def __iter__(self) -> Iterator[Row]:
        for number, (columns, problem, size) in enumerate(self._read()):
            if self._check is not None:
                self._check()
            if self._numbers is None or number in self._numbers:
                yield Row(number, columns, problem, size)

    def only(self, numbers: Iterable[int]) -> RowSource:
        """Return a copy of this source that yields only the rows with these numbers. `count` still covers all rows."""
        some = copy(self)
        some._numbers = frozenset(numbers)
        return some

    def check_unchanged(self) -> None:
        """Raise FileChangedError if a local file was written to, replaced or deleted after the dataset was opened. If you read
        the dataset more than once, call this method before you publish a result."""
        require_unchanged(self._identities)

    def count(self) -> int:
        """Return the number of rows, including unreadable rows. Except for Parquet files and datasets of `datasets`, the rows
        are read for it."""
        if self._dataset is not None:
            return len(self._dataset)
        with self._named_errors():
            if self.format == "parquet":
                return sum(int(pq.read_metadata(file).num_rows) for file in self.files)
            if self.format == "jsonl" and not self.is_json_array():
                return sum(1 for file in self.files for _ in lines_of(file))
        count = 0
        for item in self._local_files():
            count += 1 if isinstance(item, str) else len(item)
            if self._check is not None:
                self._check()
        return count

    def count_unless_in_memory(self) -> int | None:
        """Return the number of rows, or None for a JSON array, which would be in memory as a whole once more."""
        return None if self.is_json_array() else self.count()

    def is_json_array(self) -> bool:
        with self._named_errors():
            return self.format in ("json", "jsonl") and any(map(contains_array, self.files))

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise DatasetError(f"{self.name} cannot be read as {self.format}: {shortened(str(error))}") from error

    def _local_files(self) -> LocalFiles:
        return LocalFiles(self._path, "folder" if self._path.is_dir() else self.format, self.split, self.files)

    def schema(self) -> pa.Schema:
        if self._dataset is not None:
            return self._dataset.with_format("arrow")[:1].schema if len(self._dataset) else pa.schema([])
        if self._schema is None:
            self._schema = next((item.schema for item in self._local_files() if isinstance(item, pa.Table)), pa.schema([]))
        return self._schema

    def _read(self) -> Iterator[_Read]:
        if self._dataset is not None:
            yield from ((columns, None, bytes_of_images(columns)) for columns in rows_of_dataset(self._dataset))
            return
        for item in self._local_files() if self.files else ():
            if isinstance(item, str):
                yield None, item, 0
            else:
                self._schema = item.schema
                size = item.nbytes // max(1, len(item))
                yield from ((columns, None, size) for columns in rows_of_table(item))


def rows_of_table(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, decoded as `datasets` decodes them."""
    import datasets

    features = datasets.Features.from_arrow_schema(table.schema)
    return rows_of_dataset(datasets.Dataset(table, datasets.DatasetInfo(features=features), fingerprint="rows"))


def table_of_rows(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return rows (see `rows_of_table`) as a table with this schema."""
    import datasets

    if not rows:
        return schema.empty_table()
    features = datasets.Features.from_arrow_schema(schema)
    columns = {name: [row.get(name) for row in rows] for name in features}
    encoded = {name: feature for name, feature in features.items() if not _is_of_values(feature)}
    others = datasets.Dataset.from_dict({name: columns[name] for name in encoded}, features=datasets.Features(encoded))
    # The types that `datasets` infers have no nanoseconds, and no integers from 2**63 on.
    arrays = [
        others.data[field.name].cast(field.type) if field.name in encoded else pa.array(columns[field.name], field.type)
        for field in schema
    ]
    return pa.table(arrays, schema=schema)


def _is_of_values(feature: Any) -> bool:
    """Return whether a column consists of plain values, lists and structs: `datasets` encodes no part of it."""
    import datasets

    if isinstance(feature, dict):
        return all(map(_is_of_values, feature.values()))
    inner = getattr(feature, "feature", None)
    return isinstance(feature, datasets.Value) if inner is None else _is_of_values(inner)


def rows_of_dataset(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `datasets.Dataset` in the dataset's output format.

    Images are yielded as {"bytes": …, "path": …}, without being decoded. The exception is a column with a fixed mode, such as
    RGB: its images are decoded, because `datasets` converts them to that mode.
    """
    dataset = without_decoding(dataset)
    for batch in dataset.iter(batch_size=BATCH_ROWS):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def without_decoding(dataset: Any) -> Any:
    """Return a `datasets.Dataset` or `IterableDataset` with image decoding turned off, except for images with a fixed mode."""
    for name, feature in (dataset.features or {}).items():
        kept = _undecoded(feature)
        if kept is not feature:
            dataset = dataset.cast_column(name, kept)
    return dataset


def _undecoded(feature: Any) -> Any:
    import datasets

    if isinstance(feature, datasets.Image):
        # If the feature has a mode, `datasets` converts the decoded images to that mode, so decoding stays on.
        return datasets.Image(decode=False) if feature.decode and feature.mode is None else feature
    inner = getattr(feature, "feature", None)
    if inner is None:
        return feature
    kept = _undecoded(inner)
    return feature if kept is inner else type(feature)(kept)


def batched(rows: Iterable[Row], count: int) -> Iterator[list[Row]]:
    """Yield lists of up to `count` rows. If rows are long, a list has fewer rows, so that it uses less memory."""
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
    """Return the lower-case suffix of a file name (`.jsonl`, `.csv.gz`, …), or None for an unsupported suffix."""
    path = PurePosixPath(name)
    packed = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    suffix = PurePosixPath(path.stem).suffix.lower() if packed else path.suffix.lower()
    found = _SUFFIXES.get(suffix)
    return suffix + packed if found in _TEXT or (found and not packed) else None


def _file_format(path: Path) -> FileFormat:
    suffix = dataset_suffix(path.name)
    if suffix is None:
        raise DatasetError(f"{path}: unknown file type; the name must end in {SUFFIXES_IN_WORDS}")
    return _SUFFIXES[f".{suffix.split('.')[1]}"]  # without the suffix of a compression


def _folder_format(folder: Path, split: str, is_fetched: bool) -> tuple[FileFormat, tuple[Path, ...]]:
    """Return the format and the files of a split of a folder.

    `datasets` decides which files belong to a split: by metadata in a README.md, or by names such as train-00000.parquet.
    """
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        return "folder", ()
    try:
        of_splits = open_builder(folder, "folder").config.data_files or {}
    except Exception as error:  # `datasets` raises exceptions of many types
        text = shortened(first_line(error))
        raise DatasetError(f"the folder {folder} cannot be read as a dataset ({type(error).__name__}: {text})") from error
    if split not in of_splits and not (is_fetched and len(of_splits) == 1):
        raise DatasetError(f"the folder {folder} has no split {split!r}; choose from {', '.join(map(str, of_splits))}")
    files = of_splits[split] if split in of_splits else next(iter(of_splits.values()))
    data = tuple(Path(file) for file in files if dataset_suffix(file) is not None)
    formats = {_file_format(file) for file in data}
    if not formats:
        raise DatasetError(f"{folder} has no file whose name ends in {SUFFIXES_IN_WORDS}")
    if len(formats) != 1:
        raise DatasetError(f"{folder} has files in several formats: leave only one format, or pass a single file")
    return formats.pop(), data


def _downloaded(uri: str) -> Path:
    try:
        file = HubFile.parse(uri)
        if dataset_suffix(file.path) is None:
            raise UsageError(f"{file.path} does not end in {SUFFIXES_IN_WORDS}")
        return file.download()
    except ReflogpError as error:
        raise DatasetError(f"dataset {uri}: {error}") from error


def _load_with_datasets(data: str, form: FileFormat, split: str) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(data) if form == "folder" else datasets.load_dataset(data, split=split)
    except Exception as error:  # `datasets` raises exceptions of many types if a dataset cannot be loaded
        saved = "cannot be loaded as a saved dataset"
        from_hub = "is not a local file or folder, and cannot be loaded from the hub"
        raise DatasetError(
            f"dataset {data!r} {saved if form == 'folder' else from_hub} "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DatasetError(f"dataset {data!r} has no split {split!r}; choose from {', '.join(loaded)}")
        loaded = loaded[split]
    return loaded


def _saved_files(folder: Path, split: str) -> tuple[Path, ...]:
    """Return the Arrow files that a saved dataset's state.json lists. Raises DatasetError if the name of a file or of the split
    could refer to a path outside the folder."""
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
            if split not in splits:
                raise DatasetError(f"dataset {str(folder)!r} has no split {split!r}; choose from {', '.join(map(str, splits))}")
            folder = folder / _plain_name(split, folder)
        listed = json.loads((folder / "state.json").read_bytes())["_data_files"]
        return tuple(folder / _plain_name(entry["filename"], folder) for entry in listed)
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise DatasetError(f"{folder} is not a saved dataset: its description cannot be read") from error


def _plain_name(name: object, folder: Path) -> str:
    if not isinstance(name, str) or not name or name.startswith(".") or any(ch in name for ch in "/\\\0"):
        raise DatasetError(f"the saved dataset {folder} contains an invalid file or split name: {name!r}")
    return name
