"""Compaction: many shards into few, sorted one behind the other, each key once. And the deletion of what it leaves behind.

Knows shards and their key ranges. Runs in bounded memory: the range of keys is cut into parts, and a part is read, sorted and
written at a time; since every shard is sorted, a part of it is a stretch of its row groups. Called by `reflogp store compact`
and `vacuum`, by export, and after an append that leaves too many small shards.
"""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reflogp_store.errors import DamagedStoreError, StoreError, StoreUnavailableError, UsageError
from reflogp_store.keys import keys_as_words
from reflogp_store.log import Written
from reflogp_store.shard import Shard, ShardDamageError, sorted_by_key
from reflogp_store.storage import STORAGE_ERRORS, sentence
from reflogp_store.table import LogprobTable

#: Bytes of a compacted shard, about. Compaction holds about six times as much in memory.
SHARD_BYTES = 128 << 20
#: A shard of fewer bytes is small.
SMALL_BYTES = SHARD_BYTES // 4
#: This many small shards are compacted by the append that made the last of them; a random few more, so that writers who share
#: a table do not all begin at once.
SMALL_SHARDS = 64
_SMALL_SHARDS_SPREAD = 32
#: Hours that a replaced shard is kept for readers of older snapshots, and an uncommitted one for its writer.
RETENTION_HOURS = 168

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Compacted:
    """What a compaction did.

    Attributes:
        shards_before, shards_after: of the table.
        rows: rows written anew; 0 where there was nothing to do.
        duplicates: rows left out because a longer row of their key is there.
        won: False when another process compacted the same shards first; nothing was changed then.
        snapshot: number of the latest snapshot after it.
    """

    shards_before: int
    shards_after: int
    rows: int
    duplicates: int
    won: bool
    snapshot: int


def compact(
    table: LogprobTable, *, only_small: bool = False, shard_bytes: int = SHARD_BYTES, progress: Progress | None = None
) -> Compacted:
    """Merge shards. Readers of earlier snapshots are not disturbed: what is replaced stays until `vacuum`.

    Args:
        table: what to compact.
        only_small: merge just the small shards (what appends do by themselves); otherwise all, unless all is in order.
        shard_bytes: size of the new shards.
        progress: called with (rows written, rows in all).

    Raises:
        DamagedStoreError: a shard is damaged.
        StoreUnavailableError: the store cannot be read or written. The table is then as it was.
    """
    sizes = table.shards()
    number = table.snapshot_number()
    chosen = [path for path, size in sizes.items() if not only_small or size < SMALL_BYTES]
    shards = [table.shard(path) for path in chosen]
    try:
        if len(shards) < 2 or (not only_small and _in_order(shards) and max(map(sizes.__getitem__, chosen)) <= 2 * shard_bytes):
            return Compacted(len(sizes), len(sizes), 0, 0, True, number)
        parts = max(1, round(sum(sizes[path] for path in chosen) / shard_bytes))
        total = sum(group.rows for shard in shards for group in shard.groups)
        written: list[Written] = []
        try:
            for rows in merged(shards, parts):
                written.append(table.write(rows))
                if progress:
                    progress(sum(shard.rows for shard in written), total)
        except BaseException:
            table.discard(written)
            raise
    except ShardDamageError as error:
        raise DamagedStoreError(
            f"compaction met a damaged shard ({error}); run `reflogp store verify --repair` first"
        ) from error
    except STORAGE_ERRORS as error:
        raise StoreUnavailableError(f"the store {table.uri} cannot be compacted: {sentence(error)}") from error
    won = table.replace(chosen, written)
    rows_written = sum(shard.rows for shard in written)
    after = len(sizes) - len(chosen) + len(written) if won else len(sizes)
    return Compacted(len(sizes), after, rows_written, total - rows_written, won, table.snapshot_number())


def merged(shards: Sequence[Shard], parts: int) -> Iterator[pa.Table]:
    """All rows of some shards, sorted by key, the longest row of each key only, in about `parts` tables.

    Keys are digests, so equal stretches of the key space hold about equally many.
    """
    bounds = [(part << 64) // parts for part in range(parts)] + [1 << 64]
    for least, behind in pairwise(bounds):
        pieces = []
        for shard in shards:
            groups = [group.index for group in shard.groups if group.greatest >= least and group.least < behind]
            if groups:
                rows = shard.rows(groups)
                words = keys_as_words(rows["key"])[0]
                start = int(np.searchsorted(words, np.uint64(least)))
                stop = len(words) if behind == 1 << 64 else int(np.searchsorted(words, np.uint64(behind)))
                pieces.append(rows.slice(start, stop - start))
        rows = _first_of_each_key(sorted_by_key(pa.concat_tables(pieces))) if pieces else None
        if rows is not None and len(rows):
            yield rows


def small_shards_allowed() -> int:
    """How many small shards one writer leaves before it compacts them."""
    return SMALL_SHARDS + random.randrange(_SMALL_SHARDS_SPREAD)


def compact_if_many(table: LogprobTable, allowed: int) -> Compacted | None:
    """Merge the small shards when there are more than `allowed`; None when there are not, or it could not be done.

    What was appended is committed already, so a compaction that fails is a warning.
    """
    if sum(size < SMALL_BYTES for size in table.shards().values()) <= allowed:
        return None
    try:
        return compact(table, only_small=True)
    except StoreError as error:
        warnings.warn(f"small shards were not compacted: {error}", stacklevel=2)
        return None


def vacuum(
    table: LogprobTable, retention_hours: float = RETENTION_HOURS, *, dry_run: bool = False, alone: bool = False
) -> list[str]:
    """Delete shards that compaction replaced, and files that a writer never committed, when older than the retention.

    Snapshots from before the oldest compaction of which shards are deleted can then no longer be read.

    Args:
        table: what to vacuum.
        retention_hours: age from which files go. Readers of older snapshots and writers need theirs for as long.
        dry_run: delete nothing, only say what would be.
        alone: nobody else reads or writes now; allows a retention below one hour.

    Returns:
        The deleted files.

    Raises:
        UsageError: a retention that could delete what a writer is about to commit.
        StoreUnavailableError: the clock of this machine is behind the table's last commit, or the store cannot be written.
    """
    if retention_hours < 0 or (retention_hours < 1 and not alone):
        raise UsageError(f"retention of {retention_hours} hours: below 1 hour only where nobody else reads or writes the store")
    ahead = table.committed_at() - time.time()
    if ahead > 60:
        raise StoreUnavailableError(
            f"the last commit is {ahead / 3600:.1f} hours ahead of this machine's clock: nothing was deleted"
        )
    try:
        return table.delta().vacuum(
            retention_hours=math.ceil(retention_hours), dry_run=dry_run, enforce_retention_duration=False, full=True
        )
    except STORAGE_ERRORS as error:
        raise StoreUnavailableError(f"the store {table.uri} cannot be vacuumed: {sentence(error)}") from error


def _in_order(shards: Sequence[Shard]) -> bool:
    """Whether the shards' key ranges lie one behind the other."""
    ranges = sorted((shard.groups[0].least, shard.groups[-1].greatest) for shard in shards if shard.groups)
    return all(before[1] < after[0] for before, after in pairwise(ranges))


def _first_of_each_key(rows: pa.Table) -> pa.Table:
    if len(rows) < 2:
        return rows
    keys = rows["key"].combine_chunks()
    keys = keys if isinstance(keys, pa.Array) else pa.concat_arrays(keys.chunks)
    first = pa.concat_arrays([pa.array([True]), pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))])
    return rows.filter(first) if not pc.all(first).as_py() else rows
