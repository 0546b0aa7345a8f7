"""Share a table: export it as a folder of Parquet files with a README, and import an exported folder into a store.

An export contains one row for each key of the table, and a reference.json that describes the reference model.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from reflogp.store.digests import Progress
from reflogp.store.errors import StoreUnavailableError, UsageError
from reflogp.store.maintenance import SHARD_BYTES, merged_rows
from reflogp.store.reference import Reference
from reflogp.store.schema import SCHEMA, columns_table, problem_of_rows
from reflogp.store.shard import write_shard
from reflogp.store.snapshot import Snapshot
from reflogp.store.storage import STORAGE_ERRORS, sentence
from reflogp.store.store import REFERENCE_FILE, Store
from reflogp.store.table import LogprobTable
from reflogp.store.texts import counted, shortened

README_FILE, CONTENTS_FILE, _DATA = "README.md", "contents.json", "data"
DATA_FILE = re.compile(rf"{_DATA}/part-[0-9]{{5,}}\.parquet")
_IMPORT_ROWS = 65_536
_MOST_CONTENTS_BYTES = 16 << 20
_MOST_PROVENANCE_BYTES = 64 << 10


@dataclass(frozen=True)
class Contents:
    """The contents of an export, as listed in its contents.json.

    Attributes:
        reference_id: id of the reference model whose log-probs the rows contain.
        snapshot: number of the exported snapshot.
        rows: number of rows.
        card: hexadecimal sha256 of the README.md that reflogp wrote.
        files: dict from the path in the export to the hexadecimal sha256, for reference.json and each Parquet file.
    """

    reference_id: str
    snapshot: int
    rows: int
    card: str
    files: dict[str, str]

    @classmethod
    def read(cls, file: Path) -> Contents:
        """Parse a contents.json.

        Raises UsageError if the file cannot be read or lists files that do not belong in an export.
        """
        try:
            if file.stat().st_size > _MOST_CONTENTS_BYTES:
                raise ValueError("the file is too large")
            found = json.loads(file.read_text(encoding="utf-8"))
            if "files" not in found:
                raise ValueError("it has no list of files")
            contents = cls(**{**found, "files": dict(found["files"])})
            if not isinstance(contents.rows, int) or not isinstance(contents.reference_id, str):
                raise ValueError("the value of 'rows' or 'reference_id' has the wrong type")
            if others := [name for name in contents.files if name != REFERENCE_FILE and not DATA_FILE.fullmatch(name)]:
                raise ValueError(f"an export cannot contain a file named {shortened(str(others[0]), 100)!r}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{file} cannot be read: {sentence(error)}") from error
        return contents

    @property
    def data(self) -> list[str]:
        """The paths of the export's Parquet files, sorted by name."""
        return sorted(name for name in self.files if name != REFERENCE_FILE)

    def damaged(self, folder: Path) -> list[str]:
        """Return the export's files whose sha256 differs from that in contents.json, as paths relative to `folder`.

        Raises UsageError if a file is missing.
        """
        for name in self.files:
            if not (folder / name).is_file():
                raise UsageError(f"{folder} is not complete: {name} is missing")
        return [name for name, digest in self.files.items() if sha256_of(folder / name) != digest]


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Attributes:
        reference_id: id of the reference model whose log-probs the rows contain.
        rows: number of rows in the export.
        written: number of rows written; the others were skipped, because the store already had at least as many values for
            their keys.
        snapshot: number of a snapshot that contains all the rows.
    """

    reference_id: str
    rows: int
    written: int
    snapshot: int


def export_table(
    table: LogprobTable, folder: str, snapshot: Snapshot | None = None, progress: Progress | None = None
) -> tuple[int, int]:
    """Export a snapshot: write its rows to a folder as Parquet files, together with a README.md and two JSON files.

    The files `data/*.parquet` have one row per key. reference.json describes the reference model, and
    contents.json lists the digests of the other files.

    The folder can be read with `datasets.load_dataset(folder)`, and its data files with any Parquet reader.

    Args:
        table: the table to export.
        folder: a local folder that does not exist yet or is empty. It contains no files until the export is complete.
        snapshot: the snapshot to export, or None for the latest.
        progress: called with (rows written, total rows).

    Returns:
        The number of rows and the number of Parquet files.

    Raises:
        UsageError: the folder is not empty, or cannot be written to.
        DamagedStoreError: a shard is damaged or missing.
        StoreUnavailableError: the store cannot be read.

    Examples:
        >>> from reflogp.store import Store, describe_reference, export_table
        >>> table = Store("./logps").table_of(describe_reference("./sft-model", "bfloat16"))
        >>> rows, files = export_table(table, "./logps-to-share")
        >>> files
        1
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{folder} exists and is not an empty folder; choose another folder")
    snapshot = snapshot or table.snapshot()
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        (partial / _DATA).mkdir(parents=True)
        rows, files, tokens = 0, 0, 0
        made: Counter[str] = Counter()
        for part in merged_rows(table, snapshot, SHARD_BYTES):
            write_shard(part, partial / _DATA / f"part-{files:05}.parquet")
            rows, files, tokens = rows + len(part), files + 1, tokens + (pc.sum(part["scored_len"]).as_py() or 0)
            for entry in part["provenance"].value_counts().to_pylist():
                made[entry["values"]] += entry["counts"]
            if progress:
                progress(rows, len(snapshot))
        if not files:  # an empty table becomes one Parquet file without rows
            pq.write_table(SCHEMA.empty_table(), partial / _DATA / "part-00000.parquet")
            files = 1
        (partial / REFERENCE_FILE).write_text(table.reference.to_json(), encoding="utf-8")
        (partial / README_FILE).write_text(_readme(table.reference, snapshot.number, rows, tokens, made), encoding="utf-8")
        written = [partial / REFERENCE_FILE, *sorted((partial / _DATA).iterdir())]
        digests = {file.relative_to(partial).as_posix(): sha256_of(file) for file in written}
        card = sha256_of(partial / README_FILE)
        contents = Contents(table.reference.reference_id, snapshot.number, rows, card, digests)
        (partial / CONTENTS_FILE).write_text(json.dumps(asdict(contents), indent=1), encoding="utf-8")
        if target.exists():
            target.rmdir()
        partial.replace(target)
    except STORAGE_ERRORS as error:
        raise UsageError(f"the export {folder} cannot be written: {sentence(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return rows, files


def import_folder(store: Store, folder: str, progress: Progress | None = None) -> Imported:
    """Append an export's rows to a store, which is created if it does not exist. Values that the store already has are kept.

    The files' digests and all rows are checked before the first row is written.

    Args:
        store: the store to import into.
        folder: a folder that `export_table` wrote.
        progress: called with (rows done, total rows). Each row counts twice in both numbers, because it is first checked and
            then written.

    Returns:
        An Imported with the number of rows in the export, the number of rows written, and the number of a snapshot that
        contains all the rows.

    Raises:
        UsageError: the folder is not an export, its files are missing or damaged, or its rows are invalid. Nothing is written.
        StoreError: the store cannot be written to, or a file in the folder can no longer be read. Rows that were written before
            the error are kept.

    Examples:
        >>> from reflogp.store import Store, describe_reference, export_table, import_folder
        >>> table = Store("./logps").table_of(describe_reference("./sft-model", "bfloat16"))
        >>> rows, files = export_table(table, "./logps-to-move")
        >>> imported = import_folder(Store("./logps-moved"), "./logps-to-move")
        >>> imported.written == rows
        True
    """
    source = Path(folder)
    files = sorted((source / _DATA).glob("*.parquet"))
    if not (source / REFERENCE_FILE).is_file() or not files:
        raise UsageError(f"{folder} is not an export: an export contains reference.json and data/*.parquet")
    contents = None
    if (source / CONTENTS_FILE).exists():  # exports of older versions have no contents.json
        contents = Contents.read(source / CONTENTS_FILE)
        files = [source / name for name in contents.data]
        if damaged := contents.damaged(source):
            raise UsageError(
                f"{source / damaged[0]} is damaged: its sha256 is not the one in {CONTENTS_FILE}; nothing was imported"
            )
    try:
        reference = Reference.from_json((source / REFERENCE_FILE).read_text())
        if contents is not None and contents.reference_id != reference.reference_id:
            raise ValueError(f"{REFERENCE_FILE} and {CONTENTS_FILE} contain different reference ids")
        total = sum(pq.read_metadata(file).num_rows for file in files)
        done = 0
        for file in files:
            for batch in pq.ParquetFile(file).iter_batches(_IMPORT_ROWS):
                rows = pa.table(batch)
                problem = "wrong columns" if rows.schema.names != SCHEMA.names else _problem_of(rows.cast(SCHEMA))
                if problem:
                    raise UsageError(f"{file}: {problem}; nothing was imported")
                done += len(rows)
                if progress:
                    progress(done, 2 * total)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UsageError(f"{folder} cannot be read: {sentence(error)}; nothing was imported") from error
    table = store.create_table(reference)
    written, snapshot = 0, table.snapshot_number()
    for file in files:
        try:
            for batch in pq.ParquetFile(file).iter_batches(_IMPORT_ROWS):
                appended = table.append(pa.table(batch).cast(SCHEMA))
                written, snapshot = written + appended.written, appended.snapshot
                done += len(batch)
                if progress:
                    progress(done, 2 * total)
        except (OSError, ValueError, pa.ArrowException) as error:
            said = sentence(error)
            raise StoreUnavailableError(f"{file} can no longer be read: {said}; rows imported so far: {written:,}") from error
    return Imported(reference.reference_id, total, written, snapshot)


def sha256_of(file: Path) -> str:
    """Return the sha256 of a file's content, in hexadecimal. Raises OSError if the file cannot be read."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _problem_of(rows: pa.Table) -> str | None:
    """Return what is wrong with the rows of an export, or None if they are valid."""
    if problem := problem_of_rows(rows):
        return problem
    for provenance in rows["provenance"].unique().to_pylist():
        if len(provenance) > _MOST_PROVENANCE_BYTES or _parsed(provenance) is None:
            return "the provenance of a row is too long or not a JSON object"
    return None


def _parsed(provenance: str) -> dict[str, Any] | None:
    """Parse a row's provenance. Return None if it is not a JSON object."""
    try:
        found = json.loads(provenance)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _readme(reference: Reference, snapshot: int, rows: int, tokens: int, made: Counter[str]) -> str:
    """Return the text of an export's README.md, which becomes the dataset card if the export is pushed to the Hub.

    Args:
        reference: the reference model whose log-probs the export contains.
        snapshot: number of the exported snapshot.
        rows, tokens: number of rows and number of log-probs in the export.
        made: dict from each provenance to its number of rows. A provenance is a JSON string that tells how a row's
            values were computed.
    """
    engines: Counter[str] = Counter()
    for provenance, count in made.items():
        about = _parsed(provenance) or {}
        engine = str(about.get("engine", "unknown"))
        engines[f"{engine} {about.get(engine, '')}".strip()] += count
    computed = ", ".join(f"{engine} ({counted(count, 'sequence')})" for engine, count in engines.most_common())
    return f"""---
configs:
- config_name: default
  data_files: data/*.parquet
tags:
- reflogp
---

# Reference log-probs of {reference.name}

| | |
| --- | --- |
| reference model | {reference.name} |
| reference id | `{reference.reference_id}` |
| dtype | {reference.dtype} |
| engine | {computed or "none"} |
| sequences | {rows:,} |
| values | {tokens:,} |
| snapshot of the store | {snapshot} |

The files contain log-probabilities, token counts and hashes of token ids, but none of the dataset's text and no weights.

{columns_table()}

Read this dataset, or this folder, with `datasets.load_dataset`. To train with these values, add them to a reflogp store:

    reflogp store pull ./logps hf://datasets/ORGANISATION/NAME   # from the Hub
    reflogp store import ./logps FOLDER                          # from a folder

`reference.json` describes the reference model, and `contents.json` lists the sha256 of each file.
"""
