"""Append the log-probs of one reference model to a Delta Lake table, and open numbered snapshots of the table.

reflogp writes the table's data files itself, with a checksum for every page and an encoding that suits log-probs. It commits
the files through delta-rs. A commit names the version that it is based on, and fails if another writer has committed since
then. In that case, the commit is retried without the rows that the other writer has already stored. The values that are
committed first for a key are therefore kept, and never change. Compaction and repair, which use `LogprobTable.replace`, are in
separate modules.
"""

from __future__ import annotations

import functools
import json
import random
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties, RemoveAction

from reflogp.store import log, storage
from reflogp.store.commands import repair_command
from reflogp.store.errors import (
    DamagedStoreError,
    ReferenceNotFoundError,
    SnapshotNotFoundError,
    StoreDamageWarning,
    StoreUnavailableError,
    UsageError,
)
from reflogp.store.log import Written
from reflogp.store.reference import Reference, check_format
from reflogp.store.schema import FORMAT, SCHEMA, list_sums, one_array
from reflogp.store.shard import Shard, longest_of_each_key, shard_digest, sorted_by_key, write_shard
from reflogp.store.snapshot import INDEX_ROWS, Snapshot
from reflogp.store.texts import counted, short_repr


def without_stored(rows: pa.Table, snapshot: Snapshot) -> pa.Table:
    """Return only the rows that have more values than the snapshot has for the same key.

    If the snapshot has some values for the key of a returned row, these stored values replace the first values of that row.

    If no row is changed, moved or omitted, `rows` itself is returned. In that case, a shard that was already written from these
    rows is still valid.

    Raises DamagedStoreError if stored values that should replace a row's first values are damaged.
    """
    rows = longest_of_each_key(rows)
    lengths = rows["scored_len"].to_numpy()
    found = snapshot.find(one_array(rows["key"]))
    wanted = found.lengths < lengths
    begun = np.flatnonzero(wanted & (found.lengths > 0))
    stored = found.token_logps(begun)
    if any(values is None for values in stored):
        snapshot.require_whole()
    begins = one_array(rows["token_logps"])
    other = [
        int(at)
        for at, values in zip(begun, stored, strict=True)
        if values is not None and not np.array_equal(begins[int(at)].values.to_numpy()[: len(values)], values)
    ]
    if wanted.all() and not other:
        return rows
    wanted[other] = False
    by_place = dict(zip(begun.tolist(), stored, strict=True))
    parts = [rows.filter(pa.array(wanted))]
    if other:
        parts.append(_beginning_with(rows.take(pa.array(other)), [by_place[at] for at in other]))
    return sorted_by_key(pa.concat_tables(parts))


def _beginning_with(rows: pa.Table, stored: list[Any]) -> pa.Table:
    """Return the rows with each row's first values replaced by the values that are stored for its key."""
    values = one_array(rows["token_logps"]).to_pylist()
    for row, beginning in zip(values, stored, strict=True):
        row[: len(beginning)] = beginning.tolist()
    lists = pa.array(values, pa.list_(pa.float32()))
    columns = {name: rows[name] for name in rows.column_names}
    columns |= {"token_logps": lists, "logp_sum": pa.array(list_sums(lists))}
    return pa.table(columns, schema=SCHEMA)


F = TypeVar("F", bound=Callable[..., Any])

#: Maximum number of seconds to retry a commit while other writers keep committing first.
_PATIENCE = 900.0
#: Maximum pause before a retry, in seconds, and the number of retries after which this maximum starts to decrease.
_LONGEST_PAUSE, _EARLY_TRIES = 0.2, 5
#: Settings of the Delta table. All log entries are kept, because a repair needs them. Files that compaction replaced are kept
#: until the table is vacuumed.
_SETTINGS: dict[str, str | None] = {log.FORMAT_SETTING: str(FORMAT), "delta.enableExpiredLogCleanup": "false"}


@dataclass(frozen=True)
class Appended:
    """The result of one append.

    Attributes:
        snapshot: number of a snapshot that contains all the rows.
        written: number of rows that were committed.
        already_there: number of rows that were skipped, because the table or another appended row has at least as many values
            for the same key.
    """

    snapshot: int
    written: int
    already_there: int


def _in_turn(method: F) -> F:
    """Make a LogprobTable method wait while another thread runs a method with this decorator on the same table."""

    @functools.wraps(method)
    def waiting(table: LogprobTable, *args: Any, **keywords: Any) -> Any:
        with table._turn:
            return method(table, *args, **keywords)

    return cast(F, waiting)


class LogprobTable:
    """The table with the log-probs of one reference model.

    Args:
        uri: folder or object store prefix of the Delta table.
        reference: the reference model of the table.
        options: delta-rs storage options.
        index_rows: a snapshot keeps an index of all its keys in memory if it has at most this many rows.

    Threads can share a table: calls to `snapshot`, `append` and `replace` wait for each other.

    If the log is so damaged that delta-rs cannot read it, a StoreDamageWarning is issued. The table then contains only the
    shards that are named in the log's readable entries, and cannot be written to.

    Examples:
        >>> from reflogp.store import Store, describe_reference
        >>> table = Store("./logps").table_of(describe_reference("./sft-model", "bfloat16"))
        >>> table.snapshot()
        Snapshot(... of reference ...: ... rows in ... shard...)
        >>> shards, rows, size = table.totals()
    """

    def __init__(
        self, uri: str, reference: Reference, options: dict[str, str] | None = None, index_rows: int = INDEX_ROWS
    ) -> None:
        self.uri = uri
        self.reference = reference
        if not storage.may_exist(uri):
            raise self._nothing_yet()
        self.filesystem = storage.open_filesystem(uri, options)
        self._reading = storage.open_for_reading(uri, options)
        self._options = options
        self._index_rows = index_rows
        self._salvaged: log.Replayed | None = None
        self._opened = self._open()
        self._latest: Snapshot | None = None
        self._turn = threading.RLock()

    def __repr__(self) -> str:
        model = f"{self.reference.name} in {self.reference.dtype}"
        return short_repr("LogprobTable", f"{model}, reference {self.reference.reference_id}, {self.uri}")

    @staticmethod
    def create(uri: str, options: dict[str, str] | None = None) -> None:
        """Create the Delta table if it does not exist. Two processes can safely create the same table at the same time."""
        try:
            DeltaTable.create(
                uri,
                SCHEMA,
                mode="ignore",
                storage_options=options,
                name="reflogp",
                configuration=_SETTINGS,
                raise_if_key_not_exists=False,
            )
        except DeltaError as error:
            if not DeltaTable.is_deltatable(uri, options):
                raise StoreUnavailableError(f"the store {uri} cannot be created: {storage.sentence(error)}") from error
        except storage.STORAGE_ERRORS as error:
            raise StoreUnavailableError(f"the store {uri} cannot be written: {storage.sentence(error)}") from error

    @_in_turn
    def snapshot(self, number: int | None = None) -> Snapshot:
        """Return the latest snapshot, or the snapshot with the given number.

        Args:
            number: number of the snapshot, or None for the latest.

        Raises:
            SnapshotNotFoundError: there is no snapshot with this number, or the snapshot cannot be read, for example because
                vacuum deleted some of its shards.
            StoreUnavailableError: the table cannot be read.
        """
        self._refresh()
        latest = self._latest_snapshot()
        if number in (None, latest.number):
            return latest
        there = f"the latest snapshot is {latest.number}"
        if number is None or not 0 <= number < latest.number:
            raise SnapshotNotFoundError(f"reference {self.reference.reference_id} has no snapshot {number} ({there})")
        try:
            rows_of = _rows_of(DeltaTable(self.uri, version=number, storage_options=self._options))
            gone = (rows_of.keys() - latest.rows_of.keys()) - storage.list_files(self.filesystem).keys()
        except storage.STORAGE_ERRORS as error:
            raise SnapshotNotFoundError(
                f"snapshot {number} of reference {self.reference.reference_id} cannot be read: {storage.sentence(error)}"
            ) from error
        if gone:
            raise SnapshotNotFoundError(
                f"snapshot {number} of reference {self.reference.reference_id} was vacuumed: vacuum deleted {len(gone)} of its "
                f"{counted(len(rows_of), 'shard')} ({there})"
            )
        return Snapshot(number, self.reference, self._reading, rows_of, self._index_rows, self.uri)

    @_in_turn
    def append(self, rows: pa.Table) -> Appended:
        """Commit rows as one shard. Readers see either all of these rows or none.

        A row is skipped if the table already has at least as many values for its key. If the table has some values for the key,
        but fewer than the row, the table's values are kept, and only the row's remaining values are added. A value that has
        been read therefore never changes.

        Args:
            rows: a table from schema.shard_table, with keys in any order.

        Returns:
            An Appended: the numbers of written and skipped rows, and the number of a snapshot that contains all the rows.

        Raises:
            UsageError: a value is not finite.
            DamagedStoreError: a shard or the log is damaged. Writing to a damaged table could store the same keys again with
                different values.
            StoreUnavailableError: the shard or the commit cannot be written, or other writers commit first for 15 minutes.
                Earlier commits are kept.
        """
        if not np.isfinite(one_array(rows["token_logps"]).flatten().to_numpy(zero_copy_only=False)).all():
            raise UsageError("some log-probs are not finite; nothing was stored")
        asked = len(rows)
        written: Written | None = None
        try:
            for _ in self._tries():
                latest = self._latest_snapshot()
                fresh = without_stored(rows, latest)
                self._require_whole(latest)
                if fresh is not rows and written is not None:  # the written file no longer matches the rows
                    self.filesystem.delete_file(written.path)
                    written = None
                rows = fresh
                if not len(rows):
                    return Appended(latest.number, 0, asked)
                if written is None:
                    written = self.write(rows)
                before = self._delta.version()
                if self._commit([written], []):
                    self._refresh()
                    return Appended(before + 1, len(rows), asked - len(rows))
                if self._arrived(written.path, before):  # the commit succeeded; only the response was lost
                    return Appended(self.snapshot_number(), len(rows), asked - len(rows))
                self._require_there([written])
        except storage.STORAGE_ERRORS as error:  # keep the shard: the commit may have succeeded
            raise StoreUnavailableError(f"the store {self.uri} cannot be written: {storage.sentence(error)}") from error
        raise AssertionError("unreachable: the last attempt to commit returns or raises an error")

    @_in_turn
    def replace(self, removed: Sequence[str], added: Sequence[Written]) -> bool:
        """Remove the `removed` shards from the table and add the `added` shards, in one commit.

        Each `removed` shard must be damaged, or the `added` shards must contain its keys with at least as many values. Other
        writers may append rows at the same time. If another process has already removed one of the `removed` shards,
        nothing is committed, the files of the `added` shards are deleted, and the result is False.

        Raises StoreUnavailableError if the commit cannot be written or the file of an `added` shard is missing, and
        DamagedStoreError if the log is damaged.
        """
        try:
            self._require_there(added)  # a vacuum may have deleted one shard while the others were written
            for _ in self._tries():
                self._require_whole(None)
                if not set(removed) <= self._rows_of_now().keys():
                    self.discard(added)
                    return False
                before = self._delta.version()
                if self._commit(added, removed):
                    self._refresh()
                    return True
                if added and self._arrived(added[0].path, before):
                    return True
        except storage.STORAGE_ERRORS as error:  # keep the shards: the commit may have succeeded
            raise StoreUnavailableError(f"the store {self.uri} cannot be written: {storage.sentence(error)}") from error
        raise AssertionError("unreachable: the last attempt to commit returns or raises an error")

    def write(self, rows: pa.Table) -> Written:
        """Write rows as a shard without committing it. Raises one of storage.STORAGE_ERRORS."""
        path = f"shard-{uuid.uuid4()}.parquet"
        sink = pa.BufferOutputStream()
        write_shard(sorted_by_key(rows), sink)
        data = sink.getvalue()
        try:
            storage.write_file(self.filesystem, path, data)
        except BaseException:
            for part in storage.unfinished_files(self.uri):
                if part.name.startswith(path):
                    part.unlink(missing_ok=True)
            raise
        return Written(path, data.size, len(rows), shard_digest(data))

    def discard(self, written: Sequence[Written]) -> None:
        """Delete shards that will not be committed. If a shard cannot be deleted now, vacuum deletes it later."""
        for shard in written:
            try:
                self.filesystem.delete_file(shard.path)
            except storage.STORAGE_ERRORS:
                continue

    def check_writable(self) -> None:
        """Check that the store can be written to, by writing and deleting a small file.

        Call this method before values are computed, because a failed write would lose them.

        Raises StoreUnavailableError if the file cannot be written, and DamagedStoreError if the log is damaged.
        """
        self._require_whole(None)
        probe = f"probe-{uuid.uuid4()}"
        try:
            storage.write_file(self.filesystem, probe, b"reflogp")
            self.filesystem.delete_file(probe)
        except storage.STORAGE_ERRORS as error:
            raise StoreUnavailableError(f"the store {self.uri} cannot be written: {storage.sentence(error)}") from error

    @_in_turn
    def snapshot_number(self) -> int:
        """Return the number of the latest snapshot."""
        self._refresh()
        return self._salvaged.version if self._salvaged else int(self._delta.version())

    def shards(self) -> dict[str, int]:
        """Return a dict from the path of each shard in the latest snapshot to its size in bytes. Only the Delta log is read."""
        return self.numbered_shards()[1]

    @_in_turn
    def numbered_shards(self) -> tuple[int, dict[str, int]]:
        """Return the number of the latest snapshot, and a dict from the path of each of its shards to its size in bytes."""
        self._refresh()
        if self._salvaged:
            return self._salvaged.version, {path: shard.size for path, shard in self._salvaged.shards.items()}
        actions = pa.table(self._delta.get_add_actions(flatten=True))
        sizes = dict(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))
        return int(self._delta.version()), sizes

    @_in_turn
    def totals(self) -> tuple[int, int, int]:
        """Return the numbers of shards, rows and bytes in the latest snapshot. Only the Delta log is read."""
        sizes = self.shards()
        return len(sizes), sum(self._rows_of_now().values()), sum(sizes.values())

    def shard(self, path: str) -> Shard:
        """Return an object that reads the shard at this path."""
        return Shard(self._reading, path)

    def committed_at(self) -> float:
        """Return the commit time of the latest snapshot, in seconds since 1970, according to the clock of the machine that
        committed it. Raises DamagedStoreError if the table's log is damaged."""
        return float(self.delta().history(1)[0]["timestamp"]) / 1000

    def reopened(self) -> LogprobTable:
        """Open this table again, and return it as a new LogprobTable."""
        return LogprobTable(self.uri, self.reference, self._options, self._index_rows)

    @property
    def log_is_damaged(self) -> bool:
        """Whether the log was damaged when this object read it. To read the log after a repair, call `reopened`."""
        return self._salvaged is not None

    @_in_turn
    def require_whole_log(self) -> None:
        """Raise DamagedStoreError if the log is damaged."""
        self._refresh()
        self._require_whole(None)

    @_in_turn
    def delta(self) -> DeltaTable:
        """Return the DeltaTable, for delta-rs operations. Raises DamagedStoreError if the table's log is damaged."""
        self.require_whole_log()
        return self._delta

    def _open(self) -> DeltaTable | None:
        try:
            delta = DeltaTable(self.uri, storage_options=self._options)
        except TableNotFoundError as error:
            if any(path.endswith(".parquet") for path in storage.list_files(self.filesystem)):
                raise DamagedStoreError(
                    f"{self.uri} has shards but no _delta_log: part of the folder was deleted. Restore _delta_log from a copy, "
                    "or move the folder away and score again"
                ) from error
            raise self._nothing_yet() from error
        except storage.STORAGE_ERRORS as error:
            self._salvaged = self._salvage(error)
            return None
        setting = str(delta.metadata().configuration.get(log.FORMAT_SETTING))
        if setting.isdecimal():
            check_format(int(setting))
            return delta
        if [field.name for field in delta.schema().fields] != SCHEMA.names:
            raise UsageError(f"{self.uri} is a Delta table that reflogp did not create; nothing was read or written")
        self._salvaged = self._salvage(ValueError(f"the table's setting {log.FORMAT_SETTING} is {setting}, not a number"))
        return None

    def _nothing_yet(self) -> ReferenceNotFoundError:
        return ReferenceNotFoundError(
            f"the store has no values yet for reference {self.reference.reference_id} ({self.reference.name})"
        )

    @property
    def _delta(self) -> DeltaTable:
        assert self._opened is not None, "the log is damaged, so there is no DeltaTable; check _salvaged before using _delta"
        return self._opened

    def _salvage(self, error: BaseException) -> log.Replayed:
        """Replay the log's readable entries, because delta-rs could not read the log and raised `error`.

        Raises StoreUnavailableError if the log's files cannot be read, or if the replay finds no damage.
        """
        try:
            replayed = log.replay(self._reading)
        except storage.STORAGE_ERRORS:
            raise StoreUnavailableError(f"the store {self.uri} cannot be read: {storage.sentence(error)}") from error
        if not replayed.problems:
            raise StoreUnavailableError(f"the store {self.uri} cannot be read: {storage.sentence(error)}") from error
        warnings.warn(
            f"the log of reference {self.reference.reference_id} is damaged ({replayed.first_problem()}): its undamaged "
            f"entries can still be read, but nothing can be written. Repair it: {repair_command(self.uri)}",
            StoreDamageWarning,
            stacklevel=4,
        )
        return replayed

    def _refresh(self) -> None:
        if self._salvaged:
            return
        try:
            self._delta.update_incremental()
        except storage.STORAGE_ERRORS as error:
            self._salvaged = self._salvage(error)

    def _rows_of_now(self) -> dict[str, int]:
        if self._salvaged:
            return {path: shard.rows for path, shard in self._salvaged.shards.items()}
        return _rows_of(self._delta)

    def _latest_snapshot(self) -> Snapshot:
        number, latest = self._salvaged.version if self._salvaged else int(self._delta.version()), self._latest
        if latest is None:
            latest = Snapshot(number, self.reference, self._reading, self._rows_of_now(), self._index_rows, self.uri)
        elif latest.number != number:
            latest = latest.advanced(number, self._rows_of_now())
        self._latest = latest
        return latest

    def _require_whole(self, snapshot: Snapshot | None) -> None:
        if self._salvaged:
            raise DamagedStoreError(
                f"the log of reference {self.reference.reference_id} is damaged ({self._salvaged.first_problem()}); nothing is "
                f"written until it is repaired; run {repair_command(self.uri)}"
            )
        if snapshot is not None and snapshot.damaged:
            snapshot.require_whole()

    def _arrived(self, path: str, before: int) -> bool:
        """Return whether the shard at `path` was committed after version `before`, although the commit seemed to fail.

        The log's entries are searched, because another process may already have compacted the shard and thereby removed it from
        the table.

        Raises StoreUnavailableError if the table has no version after `before`. In this case, the commit failed for another
        reason than a commit of another writer.
        """
        self._refresh()
        self._require_whole(None)
        since = range(before + 1, int(self._delta.version()) + 1)
        if not since:
            raise StoreUnavailableError(
                f"a commit to the store {self.uri} failed, although no other writer committed first: check that the store can "
                "be written to, and run again"
            )
        return any(path in log.read_entry(self.filesystem, version).added for version in since)

    def _tries(self) -> Iterator[None]:
        """Yield once for each attempt to commit, after loading the table's latest version.

        An attempt fails if another writer commits after the load and before the attempt commits. To keep this interval short,
        this method pauses before the load, not after it. After several failed attempts, the pauses become shorter.

        Raises StoreUnavailableError after _PATIENCE seconds.
        """
        end = time.monotonic() + _PATIENCE
        for attempt in count():
            if attempt:
                time.sleep(random.uniform(0, _LONGEST_PAUSE / attempt if attempt > _EARLY_TRIES else _LONGEST_PAUSE))
            if time.monotonic() > end:
                break
            self._refresh()
            yield
        raise StoreUnavailableError(
            f"nothing was written to {self.uri}: for {_PATIENCE / 60:.0f} minutes, another writer committed first at each "
            "attempt; run again when fewer processes write"
        )

    def _require_there(self, written: Sequence[Written]) -> None:
        """Raise StoreUnavailableError if a shard was deleted before its commit."""
        for shard in written:
            if self.filesystem.get_file_info(shard.path).size != shard.size:
                raise StoreUnavailableError(
                    f"{shard.path} was deleted before it was committed to {self.uri}, perhaps by a vacuum with too short "
                    "a retention period; run again"
                )

    def _commit(self, added: Sequence[Written], removed: Sequence[str]) -> bool:
        """Add and remove shards in one commit. The commit creates the next version after the table version that was read last.

        Return False if delta-rs reports a conflict with another commit. Usually, another writer committed first. However, the
        commit may have succeeded if the response to it was lost (see `_arrived`).
        """
        now = int(time.time() * 1000)
        replaces = bool(removed)
        actions: list[AddAction | RemoveAction] = [
            AddAction(shard.path, shard.size, {}, now, not replaces, json.dumps({"numRecords": shard.rows})) for shard in added
        ]
        actions += [RemoveAction(path, bool(not added), now) for path in removed]
        try:
            self._delta.create_write_transaction(
                actions,
                mode="append",
                schema=SCHEMA,
                commit_properties=CommitProperties(
                    max_commit_retries=0,
                    custom_metadata=log.redundant(added, removed),
                ),
            )
        except CommitFailedError:
            return False
        except DeltaError as error:
            raise StoreUnavailableError(f"the store {self.uri} refused a commit: {storage.sentence(error)}") from error
        return True


def _rows_of(delta: DeltaTable) -> dict[str, int]:
    actions = pa.table(delta.get_add_actions(flatten=True))
    rows = actions["num_records"] if "num_records" in actions.column_names else pa.nulls(len(actions), pa.int64())
    return dict(zip(actions["path"].to_pylist(), pc.fill_null(rows, 0).to_pylist(), strict=True))
