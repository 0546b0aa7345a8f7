"""One reference model's table in a store: append, numbered snapshots, verification.

A Delta Lake table whose data files reflogp writes itself (so that pages carry checksums and log-probs a fitting encoding)
and commits through delta-rs. A commit names the version that it read: when another writer came first it fails, what the
other wrote is dropped from ours, and we try again. So the first commit wins for a key, and no key's value ever changes.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties

from reflogp_store import storage
from reflogp_store.errors import (
    ReferenceNotFoundError,
    SnapshotNotFoundError,
    StoreUnavailableError,
)
from reflogp_store.reference import Reference
from reflogp_store.schema import SCHEMA, list_sums, open_shard, write_shard
from reflogp_store.snapshot import Snapshot

#: Losing a commit to another writer this often in a row means something other than contention.
_MAX_COMMIT_TRIES = 200
#: Longest pause between two tries, in seconds.
_MAX_PAUSE = 0.5


@dataclass(frozen=True)
class Appended:
    """What one append did.

    Attributes:
        snapshot: number of the first snapshot that has all the rows.
        written: rows committed.
        already_there: rows left out because another commit had their keys for enough tokens.
    """

    snapshot: int
    written: int
    already_there: int


@dataclass(frozen=True)
class Damage:
    """A shard that verification found wrong, and why."""

    shard: str
    problem: str


class LogprobTable:
    """The log-probs of one reference model.

    Args:
        uri: folder or object store prefix of the Delta table.
        reference: what the table holds.
        options: delta-rs storage options.
    """

    def __init__(self, uri: str, reference: Reference, options: dict[str, str] | None = None) -> None:
        self.uri = uri
        self.reference = reference
        self._options = options
        self._filesystem = storage.open_filesystem(uri, options)
        self._delta = self._open()
        self._latest: Snapshot | None = None

    @staticmethod
    def create(uri: str, options: dict[str, str] | None = None) -> None:
        """Create the Delta table unless it is there. Two creators at once are fine."""
        try:
            DeltaTable.create(uri, SCHEMA, mode="ignore", storage_options=options, name="reflogp")
        except DeltaError as error:
            if not DeltaTable.is_deltatable(uri, options):
                raise StoreUnavailableError(f"the store {uri} cannot be created: {error}") from error
        except storage.STORAGE_ERRORS as error:
            raise StoreUnavailableError(f"the store {uri} cannot be written: {error}") from error

    def snapshot(self, number: int | None = None) -> Snapshot:
        """A snapshot: the latest, or the one of that number.

        Raises:
            SnapshotNotFoundError: no such number, or its files were vacuumed.
            StoreUnavailableError: the table cannot be read.
        """
        if number is None or number == self._delta.version():
            self._refresh()
            assert self._latest is not None
            if number in (None, self._latest.number):
                return self._latest
        try:
            at = DeltaTable(self.uri, version=number, storage_options=self._options)
        except storage.STORAGE_ERRORS as error:
            raise SnapshotNotFoundError(
                f"reference {self.reference.reference_id} has no snapshot {number} (the latest is {self._delta.version()})"
            ) from error
        return Snapshot(number, self.reference.reference_id, self._filesystem, _files(at))

    def append(self, rows: pa.Table, on_wait: Callable[[], None] | None = None) -> Appended:
        """Commit rows (schema.SCHEMA) as one shard. All become visible at once, or none.

        A key that the table has for as many tokens is left out. A key that it has for fewer is written with the stored
        values first and the new ones after them, so that a value once read never changes.

        Raises:
            StoreUnavailableError: the shard or the commit cannot be written. What was committed before stays.
        """
        self._refresh()
        asked = len(rows)
        shard: str | None = None
        try:
            for attempt in range(_MAX_COMMIT_TRIES):
                assert self._latest is not None
                fresh = _without_stored(rows, self._latest)
                if fresh is not rows and shard is not None:  # the file that was written no longer says what we would commit
                    self._filesystem.delete_file(shard)
                    shard = None
                rows = fresh
                if not len(rows):
                    return Appended(self._latest.number, 0, asked)
                if shard is None:
                    shard = f"shard-{uuid.uuid4()}.parquet"
                    size = self._write(shard, rows)
                before = self._delta.version()
                if self._commit(shard, size, rows):
                    self._refresh()
                    return Appended(before + 1, len(rows), asked - len(rows))
                self._refresh()
                if shard in self._latest.files:  # it did arrive; only the answer was lost
                    return Appended(self._latest.number, len(rows), asked - len(rows))
                if self._delta.version() == before:
                    raise StoreUnavailableError(f"the store {self.uri} refuses commits after version {before}")
                if on_wait:
                    on_wait()
                time.sleep(random.uniform(0, min(_MAX_PAUSE, 0.01 * 2 ** min(attempt, 6))))
        except storage.STORAGE_ERRORS as error:
            raise StoreUnavailableError(f"the store {self.uri} cannot be written: {error}") from error
        raise StoreUnavailableError(f"the store {self.uri}: {_MAX_COMMIT_TRIES} commits in a row lost to other writers")

    def check_writable(self) -> None:
        """Write and remove a small file, so that a job fails before it computes and not after.

        Raises StoreUnavailableError when that is not possible.
        """
        probe = f".probe-{uuid.uuid4()}"
        try:
            storage.write_file(self._filesystem, probe, b"reflogp")
            self._filesystem.delete_file(probe)
        except storage.STORAGE_ERRORS as error:
            raise StoreUnavailableError(f"the store {self.uri} cannot be written: {error}") from error

    def snapshot_number(self) -> int:
        """Number of the latest snapshot, without indexing its keys."""
        self._delta.update_incremental()
        return int(self._delta.version())

    def totals(self) -> tuple[int, int, int]:
        """(shards, rows, bytes) of the latest snapshot, from the Delta log alone."""
        self._delta.update_incremental()
        actions = pa.table(self._delta.get_add_actions(flatten=True))
        return (
            actions.num_rows,
            pc.sum(actions["num_records"]).as_py() or 0,
            pc.sum(actions["size_bytes"]).as_py() or 0,
        )

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
        """Read every page of the latest snapshot and check every row.

        Args:
            progress: called with (shards read, shards in all).

        Returns:
            The damaged shards; empty when all is well.
        """
        self._delta.update_incremental()
        files = _files(self._delta)
        damages = []
        for done, path in enumerate(files, 1):
            problem = self._problem_of(path)
            if problem:
                damages.append(Damage(path, problem))
            if progress:
                progress(done, len(files))
        return damages

    def _problem_of(self, path: str) -> str | None:
        try:
            with self._filesystem.open_input_file(path) as source:
                for batch in open_shard(source).iter_batches():
                    problem = _problem_of_rows(pa.table(batch))
                    if problem:
                        return problem
        except FileNotFoundError:
            return "the file is gone"
        except (OSError, pa.ArrowException) as error:
            return str(error).split("\n")[0]
        return None

    def _open(self) -> DeltaTable:
        try:
            return DeltaTable(self.uri, storage_options=self._options)
        except TableNotFoundError as error:
            raise ReferenceNotFoundError(
                f"the store holds nothing yet for reference {self.reference.reference_id} ({self.reference.name})"
            ) from error
        except storage.STORAGE_ERRORS as error:
            raise StoreUnavailableError(f"the store {self.uri} cannot be read: {error}") from error

    def _refresh(self) -> None:
        try:
            self._delta.update_incremental()
        except storage.STORAGE_ERRORS as error:
            raise StoreUnavailableError(f"the store {self.uri} cannot be read: {error}") from error
        version, latest = self._delta.version(), self._latest
        if latest is None:
            self._latest = Snapshot(version, self.reference.reference_id, self._filesystem, _files(self._delta))
        elif latest.number != version:
            self._latest = latest.advanced(version, _files(self._delta))

    def _write(self, path: str, rows: pa.Table) -> int:
        with self._filesystem.open_output_stream(path) as sink:
            write_shard(rows, sink)
        return int(self._filesystem.get_file_info(path).size)

    def _commit(self, path: str, size: int, rows: pa.Table) -> bool:
        """Commit one shard on top of the version that was read; False when another commit took its place."""
        add = AddAction(path, size, {}, int(time.time() * 1000), True, json.dumps({"numRecords": len(rows)}))
        try:
            self._delta.create_write_transaction(
                [add],
                mode="append",
                schema=SCHEMA,
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except CommitFailedError:
            return False
        except DeltaError as error:
            raise StoreUnavailableError(f"the store {self.uri} refused a commit: {error}") from error
        return True


def _files(delta: DeltaTable) -> list[str]:
    actions = pa.table(delta.get_add_actions(flatten=True))
    return [str(path) for path in actions["path"].to_pylist()]


def _without_stored(rows: pa.Table, snapshot: Snapshot) -> pa.Table:
    """Rows that the snapshot lacks, those it has in part with the stored values first; `rows` itself when nothing changes."""
    rows = _longest_per_key(rows)
    keys = rows["key"].combine_chunks()
    lengths = _list_lengths(rows)
    stored = snapshot.stored_lengths(keys)
    kept = np.flatnonzero(stored < lengths)
    extended = np.flatnonzero((stored > 0) & (stored < lengths))
    if len(extended):
        rows = _with_stored_prefix(rows, snapshot, extended)
    return rows.take(pa.array(kept)) if len(kept) < len(rows) else rows


def _longest_per_key(rows: pa.Table) -> pa.Table:
    lengths = _list_lengths(rows)
    order = np.argsort(-lengths, kind="stable")
    keys = rows["key"].take(pa.array(order)).to_pylist()
    first: dict[bytes, int] = {}
    for at, key in zip(order, keys, strict=True):
        first.setdefault(key, int(at))
    return rows if len(first) == len(rows) else rows.take(pa.array(sorted(first.values())))


def _with_stored_prefix(rows: pa.Table, snapshot: Snapshot, extended: npt.NDArray[np.int64]) -> pa.Table:
    stored = snapshot.token_logps(rows["key"].combine_chunks().take(pa.array(extended)))
    values = rows["token_logps"].combine_chunks().to_pylist()
    for at, prefix in zip(extended, stored, strict=True):
        assert prefix is not None
        values[at][: len(prefix)] = prefix.tolist()
    lists = pa.array(values, pa.list_(pa.float32()))
    columns = {name: rows[name] for name in rows.column_names}
    columns |= {"token_logps": lists, "logp_sum": pa.array(list_sums(lists))}
    return pa.table(columns, schema=SCHEMA)


def _list_lengths(rows: pa.Table) -> npt.NDArray[np.int32]:
    lengths: npt.NDArray[np.int32] = rows["token_logps"].combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    return lengths


def _problem_of_rows(rows: pa.Table) -> str | None:
    """What is wrong with rows of a shard, or None."""
    if not rows.schema.equals(SCHEMA):
        return f"columns are {rows.schema.names}, expected {SCHEMA.names}"
    lists = rows["token_logps"].combine_chunks()
    values: npt.NDArray[Any] = lists.flatten().to_numpy(zero_copy_only=False)
    if not np.isfinite(values).all():
        return f"{np.count_nonzero(~np.isfinite(values))} values are not finite"
    if (_list_lengths(rows) > rows["completion_len"].to_numpy()).any():
        return "a row holds more values than its completion has tokens"
    if not np.allclose(list_sums(lists), rows["logp_sum"].to_numpy(), rtol=1e-9, atol=1e-6):
        return "a logp_sum is not the sum of its row"
    return None
