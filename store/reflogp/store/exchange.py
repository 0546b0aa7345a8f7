"""Export a table as plain Parquet with a README, for sharing, and import such a folder.

An export has the store's own rows, and a reference.json that describes their reference model.
"""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from reflogp.store.commands import repair_command
from reflogp.store.compaction import SHARD_BYTES, merged
from reflogp.store.digests import Progress
from reflogp.store.errors import DamagedStoreError, StoreUnavailableError, UsageError
from reflogp.store.reference import Reference
from reflogp.store.schema import SCHEMA, problem_of_rows
from reflogp.store.shard import ShardDamageError
from reflogp.store.snapshot import Snapshot
from reflogp.store.storage import STORAGE_ERRORS, list_files, sentence
from reflogp.store.store import REFERENCE_FILE, Store
from reflogp.store.table import LogprobTable

_README, _DATA = "README.md", "data"
_IMPORT_ROWS = 65_536


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Attributes:
        reference_id: reference of the rows.
        rows: rows in the export.
        written: rows that the store lacked, or had with fewer values.
        snapshot: number of the first snapshot that has all the rows.
    """

    reference_id: str
    rows: int
    written: int
    snapshot: int


def export_table(
    table: LogprobTable, folder: str, snapshot: Snapshot | None = None, progress: Progress | None = None
) -> tuple[int, int]:
    """Write a snapshot's rows to `folder`/data/*.parquet, one per key and sorted by key, with a README.md and a reference.json.

    `datasets.load_dataset(folder)` reads the folder, and so does any Parquet reader.

    Args:
        table: the table to export.
        folder: a local folder that does not exist yet or is empty. It appears only when it is complete.
        snapshot: the snapshot to export; None for the latest.
        progress: called with (rows written, total rows).

    Returns:
        The numbers of rows and of Parquet files.

    Raises:
        UsageError: the folder is not empty, or cannot be written.
        DamagedStoreError: a shard is damaged.

    Examples:
        >>> from reflogp.store import Store, describe_reference, export_table
        >>> table = Store("./logps").table_of(describe_reference("./sft-model", "bfloat16"))
        >>> rows, files = export_table(table, "./logps-to-share")
        >>> files
        1
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{folder} exists and is not an empty folder; choose a new folder")
    snapshot = snapshot or table.snapshot()
    shards = [table.shard(path) for path in snapshot.rows_of]
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        sizes = list_files(table.filesystem)
        parts = max(1, round(sum(sizes.get(path, 0) for path in snapshot.rows_of) / SHARD_BYTES))
        (partial / _DATA).mkdir(parents=True)
        rows, files = 0, 0
        for part in merged(shards, parts):
            pq.write_table(part, partial / _DATA / f"part-{files:05}.parquet", compression="zstd")
            rows, files = rows + len(part), files + 1
            if progress:
                progress(rows, len(snapshot))
        if not files:  # an empty table becomes one empty file
            pq.write_table(SCHEMA.empty_table(), partial / _DATA / "part-00000.parquet")
            files = 1
        (partial / REFERENCE_FILE).write_text(table.reference.to_json())
        (partial / _README).write_text(_readme(table.reference, snapshot.number, rows))
        if target.exists():
            target.rmdir()
        partial.replace(target)
    except ShardDamageError as error:
        raise DamagedStoreError(f"a shard is damaged ({error}); before the export run: {repair_command(table.uri)}") from error
    except STORAGE_ERRORS as error:
        raise UsageError(f"the export {folder} cannot be written: {sentence(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return rows, files


def import_folder(store: Store, folder: str, progress: Progress | None = None) -> Imported:
    """Append an export's rows to a store, which is created if it does not exist. As always, the first commit wins for a key.

    All rows are checked before the first row is written.

    Args:
        store: the store to import into.
        folder: a folder that `export_table` wrote.
        progress: called with (rows read, total rows); each row is read twice.

    Returns:
        Numbers of rows in the export and of rows written, with the snapshot; see Imported.

    Raises:
        UsageError: not an export, or invalid rows. Nothing is written.
        StoreError: the store cannot be written.

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
        raise UsageError(f"{folder} is not an export: it needs reference.json and data/*.parquet")
    try:
        reference = Reference.from_json((source / REFERENCE_FILE).read_text())
        total = sum(pq.read_metadata(file).num_rows for file in files)
        done = 0
        for file in files:
            for batch in pq.ParquetFile(file).iter_batches(_IMPORT_ROWS):
                rows = pa.table(batch)
                problem = "columns differ" if rows.schema.names != SCHEMA.names else problem_of_rows(rows.cast(SCHEMA))
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
            raise StoreUnavailableError(f"{file} cannot be read any more: {said}; {written} rows were imported") from error
    return Imported(reference.reference_id, total, written, snapshot)


def _readme(reference: Reference, snapshot: int, rows: int) -> str:
    return f"""---
configs:
- config_name: default
  data_files: data/*.parquet
tags:
- reflogp
---

# Reference log-probs of {reference.name}

{rows:,} sequences, scored in {reference.dtype} by reference `{reference.reference_id}`; snapshot {snapshot} of a reflogp store.

| column | type | meaning |
| --- | --- | --- |
| `key` | binary | 16 bytes that name a sequence by its token ids |
| `prompt_len`, `completion_len` | int32 | tokens of the prompt, of the whole completion |
| `scored_len` | int32 | how many of the completion's first tokens have a value |
| `token_logps` | list of float32 | log p(token given all tokens before it), nats |
| `logp_sum` | float64 | sum of `token_logps` |
| `provenance` | string | JSON: how the values were computed |

    from datasets import load_dataset
    rows = load_dataset("path/to/this/folder", split="train")

Import it into a store: `reflogp store import STORE path/to/this/folder`. `reference.json` describes the reference model.
"""
