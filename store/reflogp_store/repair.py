"""Verification of a whole table, log and shards, and the repair of what is damaged.

Reads everything. A repair loses only what is damaged: a damaged shard is dropped, a damaged log entry is written anew from what
it still says. Called by `reflogp store verify`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from reflogp_store import log, storage
from reflogp_store.errors import StoreUnavailableError
from reflogp_store.shard import Shard
from reflogp_store.table import LogprobTable

#: Damaged files are kept here, inside the table's folder; Delta readers pass over names that begin with an underscore.
_DAMAGED_FOLDER = "_damaged"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Damage:
    """A file of a table that verification found wrong.

    Attributes:
        file: its path in the table's folder.
        problem: what is wrong.
        rows: rows that cannot be read because of it; None where that cannot be told.
    """

    file: str
    problem: str
    rows: int | None


def verify(table: LogprobTable, progress: Progress | None = None) -> list[Damage]:
    """Read every entry of the log, and every page of every shard of the latest snapshot; check each row.

    Args:
        table: what to read.
        progress: called with (files read, files in all).

    Returns:
        The damaged files; empty when all is well.

    Raises:
        StoreUnavailableError: the storage does not answer.
    """
    try:
        entries = len(log.versions(table.filesystem))
        shards = {path: table.shard(path) for path in table.shards()}

        def entry_read(done: int, _: int) -> None:
            if progress:
                progress(done, entries + len(shards))

        replayed = log.replay(table.filesystem, entry_read)
        rows = {path: count for path, (count, _) in replayed.shards.items()}
        damages = [Damage(log.entry_path(version), problem, None) for version, problem in replayed.problems.items()]
        for done, (path, shard) in enumerate(shards.items(), 1):
            problem = shard.problem()
            if problem:
                damages.append(Damage(path, problem, rows.get(path)))
            if progress:
                progress(entries + done, entries + len(shards))
    except storage.STORAGE_ERRORS as error:
        raise StoreUnavailableError(f"the store {table.uri} cannot be read: {storage.sentence(error)}") from error
    return damages


def repair(table: LogprobTable, damages: list[Damage]) -> LogprobTable:
    """Mend the log, then drop damaged shards in one commit. The next scoring run fills the gap.

    Nobody else should write meanwhile. What a damaged log entry was is kept in the folder `_damaged`.

    Args:
        table: what was verified.
        damages: what `verify` found.

    Returns:
        The table, opened anew.

    Raises:
        StoreUnavailableError: the store cannot be written.
    """
    try:
        _mend_log(table, [damage.file for damage in damages])
    except storage.STORAGE_ERRORS as error:
        raise StoreUnavailableError(f"the store {table.uri} cannot be repaired: {storage.sentence(error)}") from error
    mended = table.reopened()
    damaged = {path for path in mended.shards() if mended.shard(path).problem()}
    if damaged:
        mended.replace(sorted(damaged), [])
    return mended


def _mend_log(table: LogprobTable, files: list[str]) -> None:
    filesystem = table.filesystem
    damaged = {log.entry_path(version): version for version in range(max(log.versions(filesystem), default=-1) + 1)}
    versions = [version for file, version in damaged.items() if file in files]
    if not versions:
        return

    def whole(path: str) -> tuple[int, int] | None:
        shard = Shard(filesystem, path)
        if shard.problem():
            return None
        return sum(group.rows for group in shard.groups), int(filesystem.get_file_info(path).size)

    for version in versions:
        entry = log.read_entry(filesystem, version)
        data = storage.read_file(filesystem, log.entry_path(version))
        if data is not None:
            storage.write_file(filesystem, f"{_DAMAGED_FOLDER}/{version:020}-{int(time.time())}.json", data)
        if version == 0:
            entry.lines = _first_entry() + [line for line in entry.lines if not line.keys() & {"protocol", "metaData"}]
        storage.write_file(filesystem, log.entry_path(version), log.mended(entry, whole, int(time.time() * 1000)))
    for path in storage.list_files(filesystem, log.FOLDER):  # made from the damaged entries, or read in their place
        if ".checkpoint" in path or path.endswith("_last_checkpoint"):
            filesystem.delete_file(path)


def _first_entry() -> list[dict[str, object]]:
    """Protocol and metadata as a new table has them."""
    with tempfile.TemporaryDirectory() as folder:
        LogprobTable.create(folder)
        return log.read_entry(storage.open_filesystem(folder), 0).lines
