"""Compact and vacuum a table: merge many shards into a few sorted shards that share no keys, and delete old shards.

Compaction uses bounded memory: it divides the range of keys into parts, and reads, sorts and writes one part at a time. Every
shard is sorted by key, so the rows of a part are in consecutive row groups of each shard.
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import pyarrow as pa

from reflogp.store import log
from reflogp.store.commands import repair_command
from reflogp.store.digests import Progress
from reflogp.store.errors import DamagedStoreError, StoreError, StoreUnavailableError, UsageError
from reflogp.store.keys import keys_as_words
from reflogp.store.log import Written
from reflogp.store.schema import SCHEMA
from reflogp.store.shard import Shard, ShardDamageError, longest_of_each_key
from reflogp.store.storage import STORAGE_ERRORS, list_files, sentence, unfinished_files
from reflogp.store.table import LogprobTable
from reflogp.store.texts import counted

#: Approximate size of a compacted shard in bytes. Compaction needs about six times as much memory, plus a row group per shard.
SHARD_BYTES = 128 << 20
#: Shards with fewer bytes than this count as small.
SMALL_BYTES = SHARD_BYTES // 4
#: Maximum number of small shards in a table. If there are more, a writer compacts them. Each writer adds a random number below
#: _SMALL_SHARDS_SPREAD to this limit, so that writers that share a table do not all start compacting at the same time.
SMALL_SHARDS = 64
_SMALL_SHARDS_SPREAD = 32
#: Maximum number of overlapping shards that one pass merges. A pass keeps one row group (4 MB) of each shard in memory. If more
#: shards overlap, they are merged in several passes.
_MERGED_AT_ONCE = 128
#: Default retention period of `vacuum`, in hours. During this period, readers of older snapshots can read replaced shards, and
#: writers can commit files that they have written.
RETENTION_HOURS = 168


@dataclass(frozen=True)
class Compacted:
    """The result of a compaction.

    Attributes:
        shards_before, shards_after: number of shards in the table before and after the compaction.
        rows: number of rewritten rows; 0 if there was nothing to do.
        duplicates: number of rows that were dropped because another row has at least as many values for the same key.
        won: whether all merges were committed; False if the last merge was discarded, because another process compacted the
            same shards first.
        snapshot: number of the latest snapshot after the compaction.
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
    """Merge shards. Earlier snapshots can still be read, because replaced shards are kept until `vacuum` deletes them.

    Args:
        table: the table to compact.
        only_small: if True, merge only shards smaller than 32 MiB, as scoring does automatically when a table has many of them.
            If False, merge all shards, or do nothing if their key ranges do not overlap and no shard is larger than twice
            `shard_bytes`. In both cases, a single shard is never rewritten.
        shard_bytes: approximate size of the new shards in bytes; 128 MiB by default.
        progress: called with (rows written, total rows). If the shards are merged in several steps, both
            numbers refer to the current step.

    Returns:
        A Compacted with the number of shards before and after the compaction, and the number of rewritten rows.

    Raises:
        DamagedStoreError: a shard or the log is damaged.
        StoreUnavailableError: the store cannot be read or written to; no rows are lost.

    Examples:
        >>> from reflogp.store import Store, describe_reference, compact
        >>> table = Store("./logps").table_of(describe_reference("./sft-model", "bfloat16"))
        >>> compacted = compact(table)
        >>> compacted.shards_after <= compacted.shards_before
        True
    """
    table.require_whole_log()
    sizes = table.shards()
    before, number = len(sizes), table.snapshot_number()
    chosen = [path for path, size in sizes.items() if not only_small or size < SMALL_BYTES]
    rows = duplicates = 0
    try:
        while len(chosen) > 1:
            shards = [table.shard(path) for path in chosen]
            stages = _overlaps(shards) > _MERGED_AT_ONCE
            if not only_small and not rows and not stages and _in_order(shards) and max(sizes.values()) <= 2 * shard_bytes:
                break
            batches = (
                [shards[at : at + _MERGED_AT_ONCE] for at in range(0, len(shards), _MERGED_AT_ONCE)] if stages else [shards]
            )
            chosen = []
            for batch in batches:
                written, total = _merge(table, batch, sum(sizes[shard.path] for shard in batch), shard_bytes, progress)
                if not table.replace([shard.path for shard in batch], written):
                    return Compacted(before, len(table.shards()), rows, duplicates, False, table.snapshot_number())
                chosen += [shard.path for shard in written]
                sizes |= {shard.path: shard.size for shard in written}
                kept = sum(shard.rows for shard in written)
                rows, duplicates = rows + kept, duplicates + total - kept
            if not stages:
                break
    except ShardDamageError as error:
        raise DamagedStoreError(
            f"a shard is damaged ({error}). Before compaction, repair the table: {repair_command(table.uri)}"
        ) from error
    except STORAGE_ERRORS as error:
        raise StoreUnavailableError(f"the store {table.uri} cannot be compacted: {sentence(error)}") from error
    after = len(table.shards())
    return Compacted(before, after, rows, duplicates, True, table.snapshot_number() if rows else number)


def _merge(
    table: LogprobTable, shards: Sequence[Shard], size: int, shard_bytes: int, progress: Progress | None
) -> tuple[list[Written], int]:
    """Merge shards into new, uncommitted shards; return the new shards and the number of rows read."""
    total = sum(group.rows for shard in shards for group in shard.groups)
    written: list[Written] = []
    try:
        for rows in merged(shards, max(1, round(size / shard_bytes))):
            written.append(table.write(rows))
            if progress:
                progress(sum(shard.rows for shard in written), total)
    except BaseException:
        table.discard(written)
        raise
    return written, total


def merged(shards: Sequence[Shard], parts: int) -> Iterator[pa.Table]:
    """Merge several shards, and yield their rows in key order, as at most `parts` tables.

    If several rows have the same key, only the row with the most log-probs is kept.

    Each table contains the keys of one of `parts` equal ranges. Because keys are digests, each range contains about the same
    number of keys. Each row group is read once; rows that belong to a later range stay in memory until that range's table is
    yielded. Therefore, memory contains at most the rows of one range, plus one row group per shard.
    """
    readers = [_Reader(shard) for shard in shards]
    for part in range(parts):
        behind = (part + 1 << 64) // parts
        pieces = [piece for reader in readers if len(piece := reader.up_to(behind))]
        if pieces:
            yield longest_of_each_key(pa.concat_tables(pieces))


class _Reader:
    """Reads a shard's rows in key order; each call of `up_to` returns the rows of the next range of keys."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._left = list(shard.groups)
        self._rest: pa.Table = SCHEMA.empty_table()

    def up_to(self, behind: int) -> pa.Table:
        """Return the rows that no earlier call returned and whose key's first 64-bit word is below `behind`."""
        groups = [group.index for group in self._left if group.least < behind]
        self._left = self._left[len(groups) :]
        rows = pa.concat_tables([self._rest, self._shard.rows(groups)]) if groups else self._rest
        words = keys_as_words(rows["key"])[0]
        stop = len(words) if behind >= 1 << 64 else int(np.searchsorted(words, np.uint64(behind)))
        # The rest is copied, because a slice would keep all the rows in memory.
        self._rest = rows.take(pa.array(np.arange(stop, len(rows)))) if stop < len(rows) else SCHEMA.empty_table()
        return rows.slice(0, stop)


def small_shards_allowed() -> int:
    """Return how many small shards a table may have before this writer compacts them."""
    return SMALL_SHARDS + random.randrange(_SMALL_SHARDS_SPREAD)


def compact_if_many(table: LogprobTable, allowed: int) -> Compacted | None:
    """Merge the small shards if the table has more than `allowed` of them. Return None if nothing was merged.

    If the compaction fails, a warning is issued instead of an error, because the rows that the caller appended are already
    committed.
    """
    if sum(size < SMALL_BYTES for size in table.shards().values()) <= allowed:
        return None
    try:
        return compact(table, only_small=True)
    except StoreError as error:
        warnings.warn(f"the appended rows are stored, but small shards were not compacted: {error}", stacklevel=2)
        return None


def vacuum(
    table: LogprobTable, retention_hours: int = RETENTION_HOURS, *, dry_run: bool = False, alone: bool = False
) -> list[str]:
    """Delete replaced shards and uncommitted files after a retention period.

    Compaction leaves behind the shards that it replaced, and crashed writers leave behind uncommitted files. A snapshot can no
    longer be read after one of its shards is deleted.

    Args:
        table: the table to vacuum.
        retention_hours: how many hours to keep a shard after it was replaced, and an uncommitted file after it was written.
            This must be longer than the time for which any reader uses an old snapshot, and longer than the time between the
            write and the commit of any file.
        dry_run: if True, delete nothing, and only return the paths of the files that would be deleted.
        alone: whether to allow a retention period of less than 1 hour, which is safe only if no other process is using the
            store.

    Returns:
        The paths of the deleted files (with `dry_run`, of the files that would be deleted), relative to the table's folder.

    Raises:
        UsageError: `retention_hours` is negative, or is less than 1 without `alone`.
        DamagedStoreError: the log is damaged or a shard is missing. Nothing is deleted, because a repair may need files that
            seem unused.
        StoreUnavailableError: the time of the table's last commit is more than 1 minute ahead of this machine's clock, or the
            store cannot be read or written to.

    Examples:
        >>> from reflogp.store import Store, describe_reference, vacuum
        >>> table = Store("./logps").table_of(describe_reference("./sft-model", "bfloat16"))
        >>> vacuum(table, retention_hours=168, dry_run=True)
        []
    """
    if retention_hours < 0 or (retention_hours < 1 and not alone):
        raise UsageError(
            f"a retention of {retention_hours} hours is too short: use at least 1 hour, or 0 hours with --alone if no other "
            "process is using the store"
        )
    try:
        ahead = table.committed_at() - time.time()
        if ahead > 60:
            raise StoreUnavailableError(
                f"the last commit is {counted(round(ahead / 60), 'minute')} ahead of this machine's clock, so nothing was "
                "deleted: check the clocks of this machine and of the machine that made the commit"
            )
        _require_every_file(table)
        deleted = table.delta().vacuum(retention_hours, dry_run=dry_run, enforce_retention_duration=False, full=True)
        for file in unfinished_files(table.uri):  # delta-rs does not list unfinished files
            with contextlib.suppress(FileNotFoundError):  # the file's writer has just renamed it
                if file.stat().st_mtime <= time.time() - 3600 * retention_hours:
                    if not dry_run:
                        file.unlink()
                    deleted.append(str(file.relative_to(table.uri)))
        return deleted
    except STORAGE_ERRORS as error:
        raise StoreUnavailableError(f"the store {table.uri} cannot be vacuumed: {sentence(error)}") from error


def _require_every_file(table: LogprobTable) -> None:
    """Raise DamagedStoreError if the log or one of its checkpoints is damaged, or if a shard that the log lists is missing."""
    number, sizes = table.numbered_shards()
    there = list_files(table.filesystem)
    problems = log.checked(table.filesystem, number, sizes).problems
    problems |= {path: "the file is missing" for path in sizes if path not in there}
    if problems:
        file, problem = next(iter(problems.items()))
        raise DamagedStoreError(
            f"the table is damaged ({file}: {problem}). Before a vacuum, repair the table: {repair_command(table.uri)}"
        )


def _in_order(shards: Sequence[Shard]) -> bool:
    """Return True if the shards' key ranges do not overlap."""
    ranges = sorted((shard.groups[0].least, shard.groups[-1].greatest) for shard in shards if shard.groups)
    return all(before[1] < after[0] for before, after in pairwise(ranges))


def _overlaps(shards: Sequence[Shard]) -> int:
    """Return the maximum number of shards whose key ranges all contain the same key."""
    ends = [
        end for shard in shards if shard.groups for end in ((shard.groups[0].least, 1), (shard.groups[-1].greatest + 1, -1))
    ]
    return max(accumulate(step for _, step in sorted(ends)), default=0)
