"""Look up keys in a snapshot: one numbered, immutable state of one reference model's table.

A snapshot keeps an index of all its keys in memory, at 36 bytes per row, with the number and sum of each row's values. The
log-probs of individual tokens are read from the shards only if a request needs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from reflogp.store import storage
from reflogp.store.commands import repair_command
from reflogp.store.errors import DamagedStoreError, SnapshotNotFoundError, StoreError, UsageError
from reflogp.store.index import MISS, Int64s, Layer, Places
from reflogp.store.keys import keys_as_words
from reflogp.store.reference import Reference
from reflogp.store.schema import TOP_COLUMNS, list_sums
from reflogp.store.shard import INDEX_COLUMNS, Shard, ShardDamageError, ShardMissingError
from reflogp.store.texts import counted, short_repr

#: Maximum number of layers of the index. Shards that are indexed together form one layer, and a lookup searches every layer. If
#: there are more layers than this maximum, all except the largest layer are merged.
_MAX_LAYERS = 8
#: Number of shards that are read at the same time. Object stores respond slowly, but serve many requests in parallel.
_READERS = 8
#: Maximum number of rows whose token values are read at a time.
_VALUE_ROWS = 65_536

#: Ids and log-probs of the most probable tokens of each position of a sequence, int32 and float32 (positions, k).
TopValues = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


class Snapshot:
    """One numbered state of a table. A snapshot never changes; `advanced` returns a new object for a later state.

    Args:
        number: number of the snapshot.
        reference: reference model of the table.
        filesystem: a filesystem whose root is the table's folder.
        rows_of: dict from the path of each shard in the snapshot to its number of rows.
        table_uri: URI of the table: `<store>/<reference id>/logprobs`.
        latest_shards: function that returns the paths of the shards in the table's latest snapshot.
        top_k: number of most probable tokens that each position of the table's rows has.

    Lookups raise DamagedStoreError if a shard is damaged, and SnapshotNotFoundError if a vacuum has deleted a shard that the
    snapshot needs.

    Examples:
        >>> from reflogp.store import Store, describe_reference, sequence_keys
        >>> table = Store("./logps")[describe_reference("./sft-model", "bfloat16")]
        >>> snapshot = table.snapshot()
        >>> keys = sequence_keys([[1, 5, 9]], [[7, 2]])
        >>> snapshot.stored_lengths(keys)  # -1: a miss
        array([-1], dtype=int32)
        >>> snapshot.token_logps(keys)
        [None]
    """

    def __init__(
        self,
        number: int,
        reference: Reference,
        filesystem: pafs.FileSystem,
        rows_of: Mapping[str, int],
        table_uri: str,
        latest_shards: Callable[[], Iterable[str]],
        top_k: int = 0,
    ) -> None:
        self.number = number
        self.top_k = top_k
        self.reference = reference
        self.rows_of = dict(rows_of)
        self._table_uri = table_uri
        self._latest_shards = latest_shards
        # Shards are numbered, and later snapshots keep the numbers.
        self._shards = {number: Shard(filesystem, path, top_k) for number, path in enumerate(self.rows_of)}
        # The index's layers, and the numbers of the shards that they cover. If several threads load the index at the same time,
        # each thread replaces the whole tuple.
        self._index: tuple[list[Layer], frozenset[int]] = ([], frozenset())

    @property
    def reference_id(self) -> str:
        return self.reference.reference_id

    @property
    def store_uri(self) -> str:
        return storage.split_table_uri(self._table_uri)[0]

    def __len__(self) -> int:
        """Return the number of rows: more than keys, if more tokens of a sequence were scored later and nothing was compacted
        since.
        """
        return sum(self.rows_of.values())

    def __repr__(self) -> str:
        rows, shards = counted(len(self), "row"), counted(len(self.rows_of), "shard")
        return short_repr("Snapshot", f"{self.number} of reference {self.reference_id}: {rows} in {shards}")

    def advanced(self, number: int, rows_of: Mapping[str, int], filesystem: pafs.FileSystem) -> Snapshot:
        """Return a new snapshot with the shards in `rows_of`, which reuses this one's index. `filesystem` opens the other
        shards.
        """
        kept = {place: shard for place, shard in self._shards.items() if shard.path in rows_of}
        known = {shard.path for shard in kept.values()}
        added = [path for path in rows_of if path not in known]
        first = max(self._shards, default=-1) + 1
        later = Snapshot(number, self.reference, filesystem, rows_of, self._table_uri, self._latest_shards, self.top_k)
        later._shards = kept | {first + place: Shard(filesystem, path, self.top_k) for place, path in enumerate(added)}
        layers, indexed = self._index
        if gone := sorted(indexed - kept.keys()):
            if any(layer.omits_rows for layer in layers):  # an omitted row may now be its key's longest
                return later
            layers = [layer.without(gone) for layer in layers]
        later._index = layers, indexed & kept.keys()
        return later

    def find(self, keys: pa.Array) -> Found:
        """Look up n keys, a fixed_size_binary(16) array as from `sequence_keys`. The result has their lengths, and reads
        values.
        """
        return Found(self, _look_up(self._load_index(), keys))

    def stored_lengths(self, keys: pa.Array) -> npt.NDArray[np.int32]:
        """Look up n keys. Return the number of stored values of each key, or -1 for a miss, as an int32 array of shape (n,)."""
        return self.find(keys).lengths

    def token_logps(self, keys: pa.Array) -> list[npt.NDArray[np.float32] | None]:
        """Look up keys. Return the stored values of each key as a float32 array, or None for a miss."""
        return self.find(keys).token_logps()

    def prefix_sums(self, keys: pa.Array, lengths: Int64s) -> npt.NDArray[np.float64]:
        """Look up n keys, and return the sum of the first `lengths[i]` values of each key i.

        The sums are in nats, float64 of shape (n,); NaN for a key that has too few values. `lengths` is int64 of shape (n,).
        """
        return self.find(keys).prefix_sums(lengths)

    def live_rows(self) -> dict[str, Int64s | None]:
        """Return, for each shard's path, the indices of its rows that lookups use: of several rows of a key, the one with the
        most values. None stands for all rows."""
        layer = Layer.merged(list(self._load_index()))
        counts = np.bincount(layer.file, minlength=max(self._shards, default=-1) + 1)
        return {
            shard.path: None if counts[place] == self.rows_of[shard.path] else np.sort(layer.row[layer.file == place])
            for place, shard in self._shards.items()
        }

    def _load_index(self) -> list[Layer]:
        layers, indexed = self._index
        new = [place for place in self._shards if place not in indexed]
        if new:
            with ThreadPoolExecutor(min(_READERS, len(new)), thread_name_prefix="reflogp-read") as readers:
                layers = [*layers, Layer.merged(list(readers.map(self._layer_of, new)))]
            pa.default_memory_pool().release_unused()  # return the memory of the columns to the system
            if len(layers) > _MAX_LAYERS:
                layers.sort(key=lambda layer: -len(layer.hi))
                layers = [layers[0], Layer.merged(layers[1:])]
            self._index = (layers, indexed | frozenset(new))
        return layers

    def _layer_of(self, place: int) -> Layer:
        shard = self._shards[place]
        try:
            return Layer.of(shard.read(INDEX_COLUMNS), place)
        except ShardDamageError as error:
            raise self.unreadable(shard, error) from error

    def unreadable(self, shard: Shard, error: ShardDamageError) -> StoreError:
        """Return the error to raise if a shard is damaged, or was deleted by a vacuum."""
        if isinstance(error, ShardMissingError) and shard.path not in self._latest_shards():
            return SnapshotNotFoundError(
                f"snapshot {self.number} of reference {self.reference_id} was vacuumed after it was opened ({shard.path} is "
                "gone): open the latest snapshot"
            )
        return DamagedStoreError(
            f"shard {shard.path} of reference {self.reference_id} is damaged ({error}). To remove it with its "
            f"{counted(self.rows_of[shard.path], 'row')}, run `{repair_command(self._table_uri)}`; then score the same data "
            "again"
        )


def _look_up(layers: list[Layer], keys: pa.Array) -> Places:
    """Look up keys in all layers, in ascending order, which reads the layers in order."""
    hi, lo = keys_as_words(keys)
    order = np.argsort(hi)
    hi, lo, places = hi[order], lo[order], Places.none(len(hi))
    for layer in layers:
        places.improve(layer, hi, lo)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return places.take(back)


class Found:
    """The result of a lookup of n keys in a snapshot.

    Attributes:
        lengths: number of stored values of each key, or -1 for a miss; int32 (n,).
    """

    def __init__(self, snapshot: Snapshot, places: Places) -> None:
        self.lengths = places.length
        self._snapshot = snapshot
        self._places = places

    def __repr__(self) -> str:
        return short_repr("Found", f"{int((self.lengths != MISS).sum()):,} of {counted(len(self.lengths), 'key')}")

    def token_logps(self, some: Int64s | None = None) -> list[npt.NDArray[np.float32] | None]:
        """Return the stored values of each key (`some`: of the keys at these indices), or None for a miss."""
        places = np.arange(len(self.lengths)) if some is None else some
        values = self.lists("token_logps", places)
        return [values.get(place) for place in places.tolist()]

    def top(self, k: int, some: Int64s | None = None) -> list[TopValues | None]:
        """Return, for each key, the k most probable tokens at each position that has a value, or None for a miss.

        The ids, int32 (n, k), and their log-probs in nats, float32 (n, k), are in the order of TopLogps (the engine's values).

        Raises UsageError if the table has fewer than k tokens at each position.
        """
        width = self._snapshot.top_k
        if k > width:
            raise UsageError(f"the table has the {width} most probable tokens of each position, not {k}")
        places = np.arange(len(self.lengths)) if some is None else some
        ids, logps = (self.lists(column.name, places) for column in TOP_COLUMNS)
        return [
            (ids[place].reshape(-1, width)[:, :k], logps[place].reshape(-1, width)[:, :k]) if place in ids else None
            for place in places.tolist()
        ]

    def lists(self, column: str, places: Int64s) -> dict[int, npt.NDArray[Any]]:
        """Return the list in a column of each key at the indices `places` that is not a miss, in the order of `places`."""
        found: dict[int, npt.NDArray[Any]] = dict.fromkeys(places[self.lengths[places] != MISS].tolist(), np.zeros(0))
        for rows, lists in self._values(places[self.lengths[places] != MISS], column):
            offsets, flat = lists.offsets.to_numpy(), lists.values.to_numpy(zero_copy_only=False)
            for i, row in enumerate(rows.tolist()):
                found[row] = flat[offsets[i] : offsets[i + 1]]
        return found

    def token_lists(self) -> pa.ListArray:
        """Return the values of all keys as one Arrow array of float32 lists, with null for a miss.

        Raises UsageError if there are more values than one array can contain, because its offsets have only 32 bits.
        """
        lengths = np.maximum(self.lengths, 0).astype(np.int64)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise UsageError(f"{int(offsets[-1]):,} token values do not fit in one Arrow array: look up fewer keys at a time")
        values, missing = np.zeros(int(offsets[-1]), np.float32), np.ones(len(lengths), bool)
        for rows, lists in self._values(np.flatnonzero(self.lengths != MISS)):
            starts, flat = lists.offsets.to_numpy(), lists.values.to_numpy(zero_copy_only=False)
            whole = np.flatnonzero(np.diff(starts) == lengths[rows])
            for i, row in zip(whole.tolist(), rows[whole].tolist(), strict=True):
                values[offsets[row] : offsets[row + 1]] = flat[starts[i] : starts[i + 1]]
            missing[rows[whole]] = False
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values), mask=pa.array(missing))

    def slice(self, start: int, stop: int) -> Found:
        return Found(self._snapshot, self._places.take(slice(start, stop)))

    def prefix_sums(self, lengths: Int64s) -> npt.NDArray[np.float64]:
        """Return the sum of the first `lengths[i]` values of each key i, float64 (n,); NaN if there are fewer values.

        Token values are read only for keys that have more values than requested.
        """
        sums = np.where(self.lengths == lengths, self._places.total, np.nan)
        sums[lengths == 0] = 0.0
        for rows, lists in self._values(np.flatnonzero((self.lengths > lengths) & (lengths > 0))):
            sums[rows] = list_sums(lists, lengths[rows])
        return sums

    def provenances(self, some: Int64s) -> Iterator[dict[str, Any]]:
        """Yield, in any order, the provenances of the values of the keys at the indices `some` that are not misses.

        A provenance tells how values were computed. It can be yielded several times, because duplicates are removed only among
        rows that are read together.
        """
        for _, texts in self._values(some[self.lengths[some] != MISS], "provenance"):
            yield from map(json.loads, pc.unique(texts).to_pylist())

    def provenance_of(self, some: Int64s) -> list[dict[str, Any]]:
        """Return the provenance of each key at the indices `some`, none of which may be a miss."""
        found: dict[int, str] = {}
        for rows, texts in self._values(some, "provenance"):
            found |= zip(rows.tolist(), texts.to_pylist(), strict=True)
        return [json.loads(found[row]) for row in some.tolist()]

    def _values(self, wanted: Int64s, column: str = "token_logps") -> Iterator[tuple[Int64s, pa.Array]]:
        """Read a column for the keys at the indices `wanted`, in parts: yield the indices of the part's keys, and
        their values.
        """
        file, row = self._places.file, self._places.row
        by_place = wanted[np.lexsort((row[wanted], file[wanted]))]
        for of_shard in np.split(by_place, np.flatnonzero(np.diff(file[by_place])) + 1):
            for keys in np.split(of_shard, np.arange(_VALUE_ROWS, len(of_shard), _VALUE_ROWS)):
                if len(keys):
                    shard = self._snapshot._shards[int(file[keys[0]])]
                    try:
                        for part, found in shard.values(column, row[keys]):
                            yield keys[part], found
                    except ShardDamageError as error:
                        raise self._snapshot.unreadable(shard, error) from error
