"""Read and write the Delta log of one reference model's table, and open its snapshots.

reflogp writes the table's data files itself, with a checksum for every page and an encoding that suits log-probs. It commits
the files through delta-rs. A commit names the version that it is based on, and fails if another writer has committed since.

A file that was written for a failed commit is left to a vacuum, because the commit may have succeeded although its response was
lost.
"""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties, RemoveAction

from reflogp.store import storage
from reflogp.store.errors import (
    DamagedStoreError,
    ReferenceNotFoundError,
    SnapshotNotFoundError,
    StoreUnavailableError,
    UsageError,
)
from reflogp.store.reference import Reference, check_format
from reflogp.store.schema import FORMAT, schema_of
from reflogp.store.shard import Shard, write_shard
from reflogp.store.snapshot import Snapshot
from reflogp.store.texts import counted, short_repr

#: Maximum number of seconds to retry a commit while other writers keep committing first.
_PATIENCE = 900.0
#: Maximum pause before a retry, in seconds, and the number of retries after which this maximum starts to decrease.
_LONGEST_PAUSE, _EARLY_TRIES = 0.2, 5
#: Name of the setting in which a Delta table records the store's format number.
_FORMAT_SETTING = "reflogp.format"
#: Name of the setting in which a Delta table records how many of the most probable tokens its rows have.
_TOP_SETTING = "reflogp.top_k"
#: Number of earlier snapshots whose index a table keeps in memory.
_PINNED = 2
_LOG_FOLDER = "_delta_log"
_HOW_TO_GO_ON = f"Restore {_LOG_FOLDER} from a copy, or move the folder away and score again"


@dataclass(frozen=True)
class Written:
    """A shard: its path, size in bytes and number of rows, and when its newest rows were written, in ms since 1970."""

    path: str
    size: int
    rows: int
    time: int


class TableLog:
    """The Delta log, the files and the snapshots of one reference model's table; see `LogprobTable`.

    Attributes:
        top_k: number of most probable tokens that each position of the table's rows has, 0 in a table without them.
    """

    def __init__(self, uri: str, reference: Reference, options: dict[str, str] | None = None) -> None:
        self.uri = uri
        self.reference = reference
        self._options = options
        self._turn = threading.RLock()
        if not storage.may_exist(uri):
            raise self._nothing_yet()
        self.filesystem = storage.open_filesystem(uri, options)
        self._delta = self._open()
        self.top_k = int(self._delta.metadata().configuration.get(_TOP_SETTING) or 0)
        self._latest: Snapshot | None = None
        self._pinned: dict[int | None, Snapshot] = {}

    def __repr__(self) -> str:
        model = f"{self.reference.name} in {self.reference.dtype}"
        return short_repr(type(self).__name__, f"{model}, reference {self.reference.reference_id}, {self.uri}")

    @staticmethod
    def create(uri: str, options: dict[str, str] | None = None, top_k: int = 0) -> None:
        """Create the Delta table if it does not exist, perhaps while other processes do so."""
        try:
            DeltaTable.create(
                uri,
                schema_of(top_k),
                mode="ignore",
                storage_options=options,
                name="reflogp",
                configuration={_FORMAT_SETTING: str(FORMAT)} | ({_TOP_SETTING: str(top_k)} if top_k else {}),
                raise_if_key_not_exists=False,
            )
        except DeltaError as error:
            if not DeltaTable.is_deltatable(uri, options):
                raise StoreUnavailableError(f"the store {uri} cannot be created: {storage.sentence(error)}") from error

    def snapshot(self, number: int | None = None) -> Snapshot:
        """Return the latest snapshot, or the snapshot with the given number.

        Raises SnapshotNotFoundError if there is no snapshot with this number, or if it cannot be read, for example because
        vacuum deleted some of its shards.
        """
        with self._turn:
            if number in self._pinned:
                return self._pinned[number]
            self._refresh()
            latest = self._latest_snapshot()
            if number is None or number == latest.number:
                return latest
            if not 0 <= number < latest.number:
                raise SnapshotNotFoundError(
                    f"reference {self.reference.reference_id} has no snapshot {number} (the latest snapshot is {latest.number})"
                )
            self._pinned[number] = self._earlier_snapshot(number, latest)
            if len(self._pinned) > _PINNED:
                self._pinned.pop(next(iter(self._pinned)))
            return self._pinned[number]

    def _earlier_snapshot(self, number: int, latest: Snapshot) -> Snapshot:
        of_reference = f"snapshot {number} of reference {self.reference.reference_id}"
        try:
            rows_of = {shard.path: shard.rows for shard in shards_of(DeltaTable(self.uri, number, self._options))}
            gone = rows_of.keys() - latest.rows_of.keys() - storage.list_files(self.filesystem).keys()
        except storage.STORAGE_ERRORS as error:
            raise SnapshotNotFoundError(f"{of_reference} cannot be read: {storage.sentence(error)}") from error
        if gone:
            raise SnapshotNotFoundError(
                f"{of_reference} was vacuumed: vacuum deleted {len(gone)} of its {counted(len(rows_of), 'shard')} (the latest "
                f"snapshot is {latest.number})"
            )
        return latest.advanced(number, rows_of, self.filesystem)

    def snapshot_number(self) -> int:
        """Return the number of the latest snapshot."""
        return int(self.delta().version())

    def shards(self) -> list[Written]:
        """Return the shards of the latest snapshot, the oldest rows first. Only the Delta log is read."""
        with self._turn:
            return shards_of(self.delta())

    def totals(self) -> tuple[int, int, int]:
        """Return the numbers of shards, rows and bytes in the latest snapshot. Only the Delta log is read."""
        shards = self.shards()
        return len(shards), sum(shard.rows for shard in shards), sum(shard.size for shard in shards)

    def shard(self, path: str) -> Shard:
        return Shard(self.filesystem, path, self.top_k)

    def delta(self) -> DeltaTable:
        """Return the DeltaTable at its latest version, for delta-rs operations."""
        with self._turn:
            self._refresh()
            return self._delta

    def replace(self, removed: Sequence[str], added: Sequence[Written]) -> bool:
        """Replace shards in one commit, while others may append rows. Return False, without a commit, if one of `removed` is
        gone.
        """
        with self._turn, storage.translate_errors(f"the store {self.uri} cannot be written"):
            for _ in self._attempts():
                if not set(removed) <= {shard.path for shard in shards_of(self._delta)}:
                    return False
                if self._commit(added, removed):
                    return True
        raise AssertionError("unreachable: the last attempt to commit returns or raises an error")

    def write(self, rows: pa.Table, when: int | None = None) -> Written:
        """Write rows as a shard without committing it. `when` is the time of the newest rows, if it is not now."""
        path = f"shard-{uuid.uuid4()}.parquet"
        sink = pa.BufferOutputStream()
        write_shard(rows, sink)
        data = sink.getvalue()
        storage.write_file(self.filesystem, path, data)
        return Written(path, data.size, len(rows), when or int(time.time() * 1000))

    def check_writable(self) -> None:
        """Write and delete a small file, before values are computed that a failed write would lose."""
        probe = f"probe-{uuid.uuid4()}"
        with storage.translate_errors(f"the store {self.uri} cannot be written"):
            storage.write_file(self.filesystem, probe, b"reflogp")
            self.filesystem.delete_file(probe)

    def _open(self) -> DeltaTable:
        try:
            delta = DeltaTable(self.uri, storage_options=self._options)
            self._refuse_empty_entries(delta)
        except TableNotFoundError as error:
            if any(path.endswith(".parquet") for path in storage.list_files(self.filesystem)):
                raise DamagedStoreError(
                    f"{self.uri} has shards but no _delta_log: part of the folder was deleted. {_HOW_TO_GO_ON}"
                ) from error
            raise self._nothing_yet() from error
        except storage.STORAGE_ERRORS as error:
            raise self._unreadable(error) from error
        setting = str(delta.metadata().configuration.get(_FORMAT_SETTING))
        if not setting.isdecimal():
            raise UsageError(f"{self.uri} is a Delta table that reflogp did not create; nothing was read or written")
        check_format(int(setting))
        return delta

    def _nothing_yet(self) -> ReferenceNotFoundError:
        return ReferenceNotFoundError(
            f"the store has no values yet for reference {self.reference.reference_id} ({self.reference.name})"
        )

    def _refuse_empty_entries(self, delta: DeltaTable, since: int | None = None) -> None:
        """Raise DamagedStoreError if a log entry is empty, as after a power failure: delta-rs reads such an entry as a commit
        without rows. The entries from number `since` on are checked (None: all entries after the last checkpoint)."""
        if since is None:
            sizes = storage.list_files(self.filesystem, _LOG_FOLDER)
            summed = max((path for path in sizes if ".checkpoint" in path), default="")
            empty = [path for path, size in sizes.items() if path.endswith(".json") and not size and path > summed]
        else:
            paths = [f"{_LOG_FOLDER}/{number:020}.json" for number in range(since, int(delta.version()) + 1)]
            empty = [entry.path for entry in self.filesystem.get_file_info(paths) if entry.size == 0]
        if empty:
            raise DamagedStoreError(f"the log entry {self.uri}/{empty[0]} is empty. {_HOW_TO_GO_ON}")

    def _unreadable(self, error: BaseException) -> DamagedStoreError | StoreUnavailableError:
        """Return the error if delta-rs cannot read the log. If its files can be read, the log is damaged."""
        try:
            for path in storage.list_files(self.filesystem, _LOG_FOLDER):
                storage.read_file(self.filesystem, path)
        except storage.STORAGE_ERRORS:
            return StoreUnavailableError(f"the store {self.uri} cannot be read: {storage.sentence(error)}")
        return DamagedStoreError(f"the log {self.uri}/{_LOG_FOLDER} is damaged: {storage.sentence(error)}. {_HOW_TO_GO_ON}")

    def _refresh(self) -> None:
        before = int(self._delta.version())
        try:
            self._delta.update_incremental()
            if self._delta.version() > before:
                try:
                    self._refuse_empty_entries(self._delta, before + 1)
                except DamagedStoreError:
                    self._delta.load_as_version(before)  # so that the next call checks the entries again
                    raise
        except storage.STORAGE_ERRORS as error:
            raise self._unreadable(error) from error

    def _latest_snapshot(self) -> Snapshot:
        number, latest = int(self._delta.version()), self._latest
        if latest is None or latest.number != number:
            shards = shards_of(self._delta)
            rows_of = {shard.path: shard.rows for shard in shards}
            first = latest or Snapshot(number, self.reference, self.filesystem, {}, self.uri, self._listed, self.top_k)
            added = {shard.path: shard.size for shard in shards if shard.path not in first.rows_of}
            with storage.translate_errors(f"the store {self.uri} cannot be read"):
                filesystem = storage.open_filesystem(self.uri, self._options, added) if added else self.filesystem
            latest = self._latest = first.advanced(number, rows_of, filesystem)
        return latest

    def _listed(self) -> set[str]:
        """Return the paths of the latest snapshot's shards. Another thread may hold this table's lock."""
        return {shard.path for shard in shards_of(DeltaTable(self.uri, storage_options=self._options))}

    def _attempts(self) -> Iterator[None]:
        """Yield once for each attempt to commit, after loading the table's latest version.

        An attempt fails if another writer commits after the load, so a pause precedes the load. Later pauses are shorter.

        Raises StoreUnavailableError after _PATIENCE seconds, or if an attempt failed although nobody else committed.
        """
        end = time.monotonic() + _PATIENCE
        for attempt in count():
            if attempt:
                time.sleep(random.uniform(0, _LONGEST_PAUSE / attempt if attempt > _EARLY_TRIES else _LONGEST_PAUSE))
            if time.monotonic() > end:
                break
            before = self._delta.version()
            self._refresh()
            if attempt and self._delta.version() == before:
                raise StoreUnavailableError(
                    f"a commit to the store {self.uri} failed, although no other writer committed first: check that the store "
                    "can be written to, and run again"
                )
            yield
        raise StoreUnavailableError(
            f"nothing was written to {self.uri}: for {_PATIENCE / 60:.0f} minutes, another writer committed first at each "
            "attempt; run again when fewer processes write"
        )

    def _commit(self, added: Sequence[Written], removed: Sequence[str]) -> bool:
        """Add and remove shards in the version after the one that was read last. Return False if delta-rs reports a conflict.

        Usually, another writer committed first. If the commit succeeded and the response was lost, the next attempt finds its
        rows.
        """
        actions: list[AddAction | RemoveAction] = [
            AddAction(shard.path, shard.size, {}, shard.time, not removed, json.dumps({"numRecords": shard.rows}))
            for shard in added
        ]
        actions += [RemoveAction(path, not added, int(time.time() * 1000)) for path in removed]
        try:
            self._delta.create_write_transaction(
                actions, mode="append", schema=schema_of(self.top_k), commit_properties=CommitProperties(max_commit_retries=0)
            )
        except CommitFailedError:
            return False
        return True


def shards_of(delta: DeltaTable) -> list[Written]:
    """Return the shards of a Delta table's loaded version, the oldest rows first."""
    actions = pa.table(delta.get_add_actions(flatten=True))
    rows = actions["num_records"] if "num_records" in actions.column_names else pa.nulls(len(actions), pa.int64())
    columns = [actions[name].to_pylist() for name in ("path", "size_bytes")]
    columns += [pc.fill_null(rows, 0).to_pylist(), actions["modification_time"].cast(pa.int64()).to_pylist()]
    return sorted((Written(*shard) for shard in zip(*columns, strict=True)), key=lambda shard: (shard.time, shard.path))
