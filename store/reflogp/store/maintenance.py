"""Compact, vacuum, verify and export a table, and drop rows from it.

The functions are the methods of `LogprobTable`. Each change is a new snapshot; earlier snapshots can be read until a vacuum.
"""

from __future__ import annotations

import json
import random
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from reflogp.store.commands import repair_command
from reflogp.store.commits import TableLog, Written
from reflogp.store.digests import Progress
from reflogp.store.errors import DamagedStoreError, StoreError, UsageError
from reflogp.store.index import Int64s
from reflogp.store.reference import REFERENCE_FILE, Reference
from reflogp.store.schema import columns_table, one_array, schema_of
from reflogp.store.shard import Shard, ShardDamageError, write_shard
from reflogp.store.snapshot import Snapshot
from reflogp.store.storage import sentence, translate_errors

#: Approximate size of a compacted shard in bytes. Compaction needs about six times as much memory.
SHARD_BYTES = 128 << 20
#: Shards with fewer bytes than this count as small.
SMALL_BYTES = SHARD_BYTES // 4
#: Maximum number of small shards in a table. If there are more, a writer compacts them. Each writer adds a random number below
#: _SMALL_SHARDS_SPREAD to this limit, so that writers that share a table do not all start compacting at the same time.
SMALL_SHARDS = 64
_SMALL_SHARDS_SPREAD = 32
#: Default retention period of `vacuum`, in hours. During this period, readers of older snapshots can read replaced shards, and
#: writers can commit files that they have written.
RETENTION_HOURS = 168
#: The files of an export, which has one row for each key, beside a reference.json that describes the reference model.
README_FILE, DATA_FILES = "README.md", "data/part-*.parquet"


@dataclass(frozen=True)
class Compacted:
    """The result of a compaction.

    Attributes:
        rows: number of rewritten rows; 0 if there was nothing to do.
        duplicates: number of rows that were dropped because another row has at least as many values for the same key.
        won: whether all merges were committed; False if another process replaced the same shards first.
        snapshot: number of the latest snapshot after the compaction.
    """

    shards_before: int
    shards_after: int
    rows: int
    duplicates: int
    won: bool
    snapshot: int


@dataclass(frozen=True)
class Damage:
    """A damaged shard: its path in the table's folder, what is wrong with it, and its number of rows according to the log."""

    file: str
    problem: str
    rows: int


@dataclass(frozen=True)
class Dropped:
    """The result of `drop`: the number of removed rows, and the number of the snapshot without them."""

    rows: int
    snapshot: int


def compact(table: TableLog, *, only_small: bool = False, progress: Progress | None = None) -> Compacted:
    """Merge consecutive shards, and drop rows of which a longer row has the same key. The order of rows is kept, because rows
    that were scored together are read together.

    Each merge is one commit. Earlier snapshots can still be read, because replaced shards are kept until a vacuum.

    Args:
        only_small: if True, merge only shards smaller than 32 MiB, as scoring does automatically when a table has many of them.
            If False, merge all shards that have less than 64 MiB, and rewrite those with rows to drop.
        progress: called with (rows written, total rows).
    """
    shards = table.shards()
    live = table.snapshot().live_rows()
    small = SMALL_BYTES if only_small else SHARD_BYTES // 2
    has_dead_rows = {path for path, rows in live.items() if rows is not None and not only_small}
    chosen = [shard for shard in shards if shard.path in live and (shard.size < small or shard.path in has_dead_rows)]
    groups = [group for group in _groups(chosen) if len(group) > 1 or group[0].path in has_dead_rows]
    total, read, written, won = sum(shard.rows for group in groups for shard in group), 0, 0, True
    with translate_errors(f"the store {table.uri} cannot be compacted"):
        for group in groups:
            parts = [_live(table.shard(shard.path), live[shard.path], table.uri) for shard in group]
            merged = pa.concat_tables(parts)
            new = table.write(merged, max(shard.time for shard in group))
            won = table.replace([shard.path for shard in group], [new])
            if not won:
                break
            read, written = read + sum(shard.rows for shard in group), written + len(merged)
            if progress:
                progress(read, total)
    return Compacted(len(shards), len(table.shards()), written, read - written, won, table.snapshot_number())


def compact_if_many(table: TableLog, allowed: int) -> Compacted | None:
    """Merge the small shards if there are more than `allowed`. Return None if nothing was merged.

    A compaction that fails is a warning, because the rows that the caller appended are already committed.
    """
    if sum(shard.size < SMALL_BYTES for shard in table.shards()) <= allowed:
        return None
    try:
        return compact(table, only_small=True)
    except StoreError as error:
        warnings.warn(f"the appended rows are stored, but small shards were not compacted: {error}", stacklevel=2)
        return None


def _groups(shards: Sequence[Written]) -> Iterator[list[Written]]:
    group: list[Written] = []
    for shard in shards:
        if group and sum(part.size for part in group) + shard.size > SHARD_BYTES:
            yield group
            group = []
        group.append(shard)
    if group:
        yield group


def _live(shard: Shard, rows: Int64s | None, uri: str) -> pa.Table:
    try:
        table = shard.read()
    except ShardDamageError as error:
        raise DamagedStoreError(f"shard {shard.path} is damaged ({error}). Repair the table: {repair_command(uri)}") from error
    return table if rows is None else table.take(pa.array(rows))


def merged_rows(table: TableLog, snapshot: Snapshot) -> Iterator[pa.Table]:
    """Yield a snapshot's rows, one for each key, as tables that take about SHARD_BYTES in a file each."""
    live = snapshot.live_rows()
    sizes = table.filesystem.get_file_info(list(live))
    shards = [
        Written(info.path, int(info.size or 0), snapshot.rows_of[path], 0) for path, info in zip(live, sizes, strict=True)
    ]
    for group in _groups(shards):
        yield pa.concat_tables([_live(table.shard(shard.path), live[shard.path], table.uri) for shard in group])


def small_shards_allowed() -> int:
    """Return how many small shards a table may have before this writer compacts them."""
    return SMALL_SHARDS + random.randrange(_SMALL_SHARDS_SPREAD)


def vacuum(table: TableLog, retention_hours: int = RETENTION_HOURS, *, dry_run: bool = False, alone: bool = False) -> list[str]:
    """Delete replaced shards and uncommitted files after a retention period, and log entries after the log's own (30 days).

    Compaction leaves behind the shards that it replaced, and crashed writers leave behind uncommitted files. A snapshot can no
    longer be read after one of its shards is deleted.

    Args:
        retention_hours: how many hours to keep a shard after it was replaced, and an uncommitted file after it was written.
            This must be longer than the time for which any reader uses an old snapshot, and longer than the time between the
            write and the commit of any file.
        dry_run: if True, delete nothing, and only return the paths of the files that would be deleted.
        alone: whether to allow a retention period of less than 1 hour, which is safe only if no other process is using the
            store.

    Returns:
        The paths of the deleted files (with `dry_run`, of the files that would be deleted), relative to the table's folder.

    Raises UsageError if `retention_hours` is negative, or is less than 1 without `alone`.
    """
    if retention_hours < 0 or (retention_hours < 1 and not alone):
        raise UsageError(
            f"a retention of {retention_hours} hours is too short: use at least 1 hour, or 0 hours with --alone if no other "
            "process is using the store"
        )
    with translate_errors(f"the store {table.uri} cannot be vacuumed"):
        delta = table.delta()
        deleted: list[str] = delta.vacuum(retention_hours, dry_run=dry_run, enforce_retention_duration=False, full=True)
        if not dry_run:
            delta.cleanup_metadata()
        return deleted


def verify(table: TableLog, progress: Progress | None = None) -> list[Damage]:
    """Read every page and row of the shards in the latest snapshot, and return the damaged shards.

    `progress` is called with (shards read, total shards).
    """
    shards, damages = table.shards(), []
    for done, shard in enumerate(shards, 1):
        with translate_errors(f"the store {table.uri} cannot be read"):
            if problem := table.shard(shard.path).problem(shard.size, shard.rows):
                damages.append(Damage(shard.path, problem, shard.rows))
        if progress:
            progress(done, len(shards))
    return damages


def drop(
    table: TableLog,
    *,
    shards: Sequence[str] = (),
    provenance: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Dropped:
    """Remove rows, in a new snapshot: all rows of the given shards, or all rows whose provenance has the given entries.

    Values that a scoring run stores later for the same keys are new values. Earlier snapshots keep the removed rows until a
    vacuum. A row whose first values were copied from a row with the given provenance is removed too.

    Args:
        shards: paths of shards, as in the result of `verify`.
        provenance: entries of the rows' provenance, such as {"engine": "broken"}.
        progress: called with (shards read, total shards).

    Raises UsageError if neither or both of `shards` and `provenance` are given, or if a shard is not in the table.
    """
    if bool(shards) == (provenance is not None):
        raise UsageError("pass either the shards or the provenance of the rows to drop")
    while True:
        known = {shard.path: shard for shard in table.shards()}
        if unknown := sorted(set(shards) - known.keys()):
            raise UsageError(f"the table {table.uri} has no shard {unknown[0]}")
        removed, added, rows = list(shards), [], sum(known[path].rows for path in shards)
        with translate_errors(f"the store {table.uri} cannot be written"):
            for done, shard in enumerate(known.values() if provenance is not None else (), 1):
                kept, count = _without_provenance(table.shard(shard.path), provenance or {}, table.uri)
                if count:
                    removed.append(shard.path)
                    added += [table.write(kept, shard.time)] if len(kept) else []
                    rows += count
                if progress:
                    progress(done, len(known))
            if not removed or table.replace(removed, added):
                return Dropped(rows, table.snapshot_number())
            if shards and not set(shards) & {shard.path for shard in table.shards()}:  # another process has dropped them
                return Dropped(0, table.snapshot_number())


def _without_provenance(shard: Shard, entries: Mapping[str, Any], uri: str) -> tuple[pa.Table, int]:
    """Return a shard's rows without those whose provenance has the given entries, and the number of the latter."""
    rows = _live(shard, None, uri)
    texts = one_array(rows["provenance"]).dictionary_encode()
    matching = np.array([_has(json.loads(text), entries) for text in texts.dictionary.to_pylist()], bool)
    gone = matching[texts.indices.to_numpy()]
    return rows.filter(pa.array(~gone)), int(gone.sum())


def _has(provenance: dict[str, Any] | None, entries: Mapping[str, Any]) -> bool:
    if provenance is None:
        return False
    return all(provenance.get(name) == value for name, value in entries.items()) or _has(provenance.get("begins_with"), entries)


def export(table: TableLog, folder: str, number: int | None = None, progress: Progress | None = None) -> tuple[int, int]:
    """Write a snapshot's rows to a folder as Parquet files, together with a README.md and a reference.json.

    The folder can be read with `datasets.load_dataset(folder)`, its data files with any Parquet reader, and `import_folder`
    adds it to a store.

    Args:
        folder: a local folder that does not exist yet or is empty. It contains no files until the export is complete.
        number: number of the snapshot to export, or None for the latest.
        progress: called with (rows written, total rows).

    Returns:
        The number of rows and the number of Parquet files.

    Raises UsageError if the folder is not empty, or cannot be written to.
    """
    target, snapshot = Path(folder), table.snapshot(number)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{folder} exists and is not an empty folder; choose another folder")
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    rows = files = 0
    try:
        (partial / "data").mkdir(parents=True)
        for part in merged_rows(table, snapshot) if len(snapshot) else [schema_of(table.top_k).empty_table()]:
            write_shard(part, partial / f"data/part-{files:05}.parquet")
            rows, files = rows + len(part), files + 1
            if progress:
                progress(rows, len(snapshot))
        (partial / REFERENCE_FILE).write_text(table.reference.to_json(), encoding="utf-8")
        (partial / README_FILE).write_text(_readme(table.reference, table.top_k), encoding="utf-8")
        partial.replace(target)  # which may be an empty folder
    except OSError as error:
        raise UsageError(f"the export {folder} cannot be written: {sentence(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return rows, files


def _readme(reference: Reference, top_k: int) -> str:
    """Return the text of an export's README.md, which becomes the dataset card if the export is pushed to the Hub."""
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
| dtype | {reference.dtypes()} |

The files contain log-probabilities, token counts and hashes of token ids, but none of the dataset's text and no weights.

{columns_table(top_k)}

Read this dataset, or this folder, with `datasets.load_dataset`. To train with these values, add them to a reflogp store:

    reflogp store pull ./logps hf://datasets/ORGANISATION/NAME   # from the Hub
    reflogp store import ./logps FOLDER                          # from a folder

`reference.json` describes the reference model. Values that the store already has are kept.
"""
