"""Verify the log and the shards of a table, and repair damage.

Verification reads the whole table. A repair removes damaged shards, with all their rows, and rewrites damaged log entries from
their readable parts. If a log entry is missing, the repair also restores the rows of undamaged shards that no log entry names.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass

import pyarrow.fs as pafs

from reflogp.store import log, storage
from reflogp.store.digests import Progress
from reflogp.store.errors import StoreUnavailableError
from reflogp.store.schema import SCHEMA
from reflogp.store.shard import Shard
from reflogp.store.table import LogprobTable

#: Subfolder where a repair keeps the original content of damaged log entries. Its name begins with an underscore, so Delta
#: readers skip it.
_DAMAGED_FOLDER = "_damaged"


@dataclass(frozen=True)
class Damage:
    """A damaged file in a table.

    Attributes:
        file: path of the file, relative to the table's folder.
        problem: what is wrong with the file.
        rows: number of rows in the damaged shard; None if unknown, or if the file belongs to the log.
    """

    file: str
    problem: str
    rows: int | None


def verify(table: LogprobTable, progress: Progress | None = None) -> list[Damage]:
    """Check every log entry, and every page and row of the shards in the latest snapshot.

    Args:
        table: the table to verify.
        progress: called with (files read, total files).

    Returns:
        The damaged files; an empty list if no file is damaged.

    Raises:
        StoreUnavailableError: the store cannot be read.

    Examples:
        >>> from reflogp.store import Store, describe_reference, verify
        >>> table = Store("./logps").table_of(describe_reference("./sft-model", "bfloat16"))
        >>> verify(table)
        []
    """
    try:
        number, sizes = table.numbered_shards()
        shards = {path: table.shard(path) for path in sizes}

        def entry_read(done: int, _: int) -> None:
            if progress:
                progress(done, number + 1 + len(shards))

        replayed = log.checked(table.filesystem, number, sizes, entry_read)
        damages = [Damage(file, problem, None) for file, problem in replayed.problems.items()]
        for done, (path, shard) in enumerate(shards.items(), 1):
            committed = replayed.shards.get(path)
            problem = shard.problem(committed.digest if committed else None)
            if problem:
                damages.append(Damage(path, problem, committed.rows if committed else None))
            if progress:
                progress(number + 1 + done, number + 1 + len(shards))
    except storage.STORAGE_ERRORS as error:
        raise StoreUnavailableError(f"the store {table.uri} cannot be read: {storage.sentence(error)}") from error
    return damages


def repair(table: LogprobTable, damages: list[Damage]) -> LogprobTable:
    """Repair the log, then remove damaged shards in one commit. The next scoring run with the same data computes the removed
    log-probs again.

    If a log entry is missing, the rows of undamaged shards that no other log entry names are appended to the table.

    No other process should write to the store during a repair. The original content of a damaged log entry is kept in the
    table's subfolder `_damaged`.

    Args:
        table: the table that was verified.
        damages: the list that `verify` returned.

    Returns:
        The repaired table, as a new object.

    Raises:
        StoreUnavailableError: the store cannot be read or written to.

    Examples:
        >>> from reflogp.store import Store, describe_reference, repair, verify
        >>> table = Store("./logps").table_of(describe_reference("./sft-model", "bfloat16"))
        >>> repair(table, verify(table))
        LogprobTable(sft-model in bfloat16, reference ..., ...)
    """
    try:
        _mend_log(table.filesystem, [damage.file for damage in damages if damage.file.startswith(log.FOLDER)])
    except storage.STORAGE_ERRORS as error:
        raise StoreUnavailableError(f"the store {table.uri} cannot be repaired: {storage.sentence(error)}") from error
    repaired = table.reopened()
    damaged = {damage.file for damage in (verify(repaired) if damages else [])} & repaired.shards().keys()
    if damaged:
        repaired.replace(sorted(damaged), [])
    if any(damage.problem == log.GONE for damage in damages):
        _bring_back(repaired)
    return repaired


def _bring_back(table: LogprobTable) -> None:
    """Append the rows of all undamaged shards that no log entry names.

    Each of these shards was either committed by a log entry that is now lost, or left behind by a writer that crashed. In both
    cases, its rows contain valid values of this reference. If the table already has values for a key, those values are kept.
    """
    last = max(log.versions(table.filesystem), default=-1)
    named = {path for version in range(last + 1) for path in log.read_entry(table.filesystem, version).named}
    for path in sorted(storage.list_files(table.filesystem)):
        if path.endswith(".parquet") and path not in named and table.shard(path).problem() is None:
            for rows in table.shard(path).batches():
                table.append(rows.cast(SCHEMA))


def _mend_log(filesystem: pafs.FileSystem, files: list[str]) -> None:
    """Rewrite damaged log entries, and delete all checkpoints of the log.

    The checkpoints are deleted because they may have been built from the damaged entries.

    `files` lists the paths of the damaged log entries and checkpoints. If it is empty, nothing is changed.
    """
    if not files:
        return

    def whole(path: str, digest: str | None) -> log.Written | None:
        shard = Shard(filesystem, path)
        if shard.problem(digest):
            return None
        rows = sum(group.rows for group in shard.groups)
        return log.Written(path, int(filesystem.get_file_info(path).size), rows, shard.digest())

    for version in (v for v in range(max(log.versions(filesystem), default=-1) + 1) if log.entry_path(v) in files):
        entry = log.read_entry(filesystem, version)
        data = storage.read_file(filesystem, log.entry_path(version))
        if data is not None:
            storage.write_file(filesystem, f"{_DAMAGED_FOLDER}/{version:020}-{int(time.time())}.json", data)
        if version == 0:
            entry.lines = _first_entry() + [line for line in entry.lines if not line.keys() & {"protocol", "metaData"}]
        storage.write_file(filesystem, log.entry_path(version), log.repaired(entry, whole, int(time.time() * 1000)))
    for path in log.checkpoints(filesystem):
        filesystem.delete_file(path)


def _first_entry() -> list[dict[str, object]]:
    """Return the protocol and metadata lines of a new table's log."""
    with tempfile.TemporaryDirectory() as folder:
        LogprobTable.create(folder)
        return log.read_entry(storage.open_filesystem(folder), 0).lines
