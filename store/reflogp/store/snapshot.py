"""Look up keys in a snapshot: one numbered, immutable state of one reference model's table.

How keys are looked up depends on the number of rows in the snapshot. For up to INDEX_ROWS rows, an index of all keys is kept in
memory, which suits many small lookups. For more rows, each lookup reads the columns key, scored_len and logp_sum (the index
columns) of the row groups that can contain the keys. Because shards are sorted, a lookup of a few keys reads only a few row
groups, and a large lookup is a single pass over the shards. With or without an index in memory, a lookup first finds the
number of values in each row and the sum of these values. The log-probs of individual tokens are read only if a request needs
them. A snapshot never writes to the store.

This module also defines the columns of the Arrow table that a scoring service returns for a lookup over HTTP.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from reflogp.store import storage
from reflogp.store.commands import repair_command
from reflogp.store.errors import DamagedStoreError, StoreDamageWarning, UsageError
from reflogp.store.index import MISS, Int64s, Layer, Places, Words
from reflogp.store.keys import KEY_TYPE, keys_as_words
from reflogp.store.reference import Reference
from reflogp.store.schema import list_sums, stream_messages
from reflogp.store.shard import LEAST_GROUP_ROWS, READ_BYTES, ROW_GROUP_ROWS, Shard, ShardDamageError
from reflogp.store.texts import counted, short_repr

#: Maximum number of rows for which the whole index is kept in memory. At 36 bytes per row, the index takes at most 1.1 GB.
INDEX_ROWS = 30_000_000
#: Maximum number of layers of the index. Shards that are indexed together form one layer, and a lookup searches every layer. If
#: there are more layers than this maximum, all except the largest layer are merged.
_MAX_LAYERS = 8
#: Number of shards that are read at the same time. Object stores respond slowly, but serve many requests in parallel.
_READERS = 8
#: Maximum number of row groups of one shard whose index columns are in memory at the same time during a lookup without an
#: index. Their size is at most 64 * 4,096 rows * 28 bytes = 7 MB.
_GROUPS_AT_ONCE = 64
#: Maximum number of rows whose token values are read at a time.
_VALUE_ROWS = 65_536
#: Number of keys that are looked up in the index at a time, bytes of working memory per key, and bytes of the result per key. A
#: lookup without an index handles all its keys at once, and keeps the index columns of up to _READERS * _GROUPS_AT_ONCE row
#: groups in memory.
_FIND_KEYS, _FIND_BYTES, _PLACE_BYTES = 131_072, 180, 20


T = TypeVar("T")


class Snapshot:
    """One numbered state of a table. A snapshot never changes; `advanced` returns a new object for a later state.

    Args:
        number: number of the snapshot.
        reference: reference model of the table.
        filesystem: a filesystem whose root is the table's folder.
        rows_of: dict from the path of each shard in the snapshot to its number of rows.
        index_rows: maximum number of rows for which the index is kept in memory.
        table_uri: URI of the table: `<store>/<reference id>/logprobs`.

    A missing or damaged shard causes a StoreDamageWarning, and `damaged` maps the shard's path to the reason. If the shard's
    index columns cannot be read, lookups treat its rows as missing. If only its token values cannot be read, lookups still
    find the number and the sum of the values in each of its rows.

    Examples:
        >>> from reflogp.store import Store, describe_reference, sequence_keys
        >>> table = Store("./logps").table_of(describe_reference("./sft-model", "bfloat16"))
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
        index_rows: int = INDEX_ROWS,
        table_uri: str = "STORE/REFERENCE/logprobs",
    ) -> None:
        self.number = number
        self.reference = reference
        self.rows_of = dict(rows_of)
        self.damaged: dict[str, str] = {}
        self._filesystem = filesystem
        self._index_rows = index_rows
        self._table_uri = table_uri
        self._shards = [Shard(filesystem, path) for path in self.rows_of]
        # (layers of the index, n): the index covers the first n shards. If several threads load the index at the same time,
        # each thread replaces the whole tuple.
        self._index: tuple[list[Layer], int] = ([], 0)

    @property
    def reference_id(self) -> str:
        """Id of the reference model."""
        return self.reference.reference_id

    @property
    def store_uri(self) -> str:
        """URI of the store that contains the table."""
        return storage.split_table_uri(self._table_uri)[0]

    def __len__(self) -> int:
        """Return the number of rows, which can exceed the number of keys: if more tokens of a sequence were scored later, its
        key has several rows until the table is compacted."""
        return sum(self.rows_of.values())

    def __repr__(self) -> str:
        shards = counted(len(self.rows_of), "shard") + (f", {len(self.damaged):,} damaged" if self.damaged else "")
        return short_repr(
            "Snapshot", f"{self.number} of reference {self.reference_id}: {counted(len(self), 'row')} in {shards}"
        )

    def advanced(self, number: int, rows_of: Mapping[str, int]) -> Snapshot:
        """Return a new snapshot with the given number and with the shards in `rows_of`.

        If `rows_of` contains all shards of this snapshot, the new snapshot reuses the index of this snapshot.
        """
        if not rows_of.keys() >= self.rows_of.keys():
            return self._another(number, rows_of)
        later = self._another(number, self.rows_of | dict(rows_of))
        later._shards[: len(self._shards)] = self._shards
        later._index = self._index
        later.damaged = dict(self.damaged)
        return later

    def _another(self, number: int, rows_of: Mapping[str, int]) -> Snapshot:
        return Snapshot(number, self.reference, self._filesystem, rows_of, self._index_rows, self._table_uri)

    def find(self, keys: pa.Array) -> Found:
        """Look up n keys. The result contains the number of stored values of each key, and has methods that read and sum the
        values.

        Args:
            keys: fixed_size_binary(16) array, as returned by `sequence_keys`.
        """
        if len(self) > self._index_rows:
            return Found(self, self._sorted(keys, self._scanned_places))
        parts = [
            self._sorted(keys.slice(start, _FIND_KEYS), self._indexed_places)
            for start in range(0, max(1, len(keys)), _FIND_KEYS)
        ]
        return Found(self, Places.joined(parts))

    def find_bytes(self, count: int) -> int:
        """Return how many bytes of memory a lookup of `count` keys needs, including its result."""
        if len(self) > self._index_rows:
            return count * (_FIND_BYTES + _PLACE_BYTES) + _READERS * _GROUPS_AT_ONCE * ROW_GROUP_ROWS * 28
        return min(count, _FIND_KEYS) * _FIND_BYTES + 2 * count * _PLACE_BYTES

    def _sorted(self, keys: pa.Array, places_of: Callable[[Words, Words], Places]) -> Places:
        """Look up keys with the function `places_of`, and return the results in the order of `keys`.

        `places_of` is called with the sorted keys. `_scanned_places` requires sorted keys. With sorted keys, `_indexed_places`
        can read the index in order.
        """
        hi, lo = keys_as_words(keys)
        order = np.argsort(hi)
        places = places_of(hi[order], lo[order])
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return places.take(back)

    def stored_lengths(self, keys: pa.Array) -> npt.NDArray[np.int32]:
        """Look up n keys. Return the number of stored values of each key, or -1 for a miss, as an int32 array of shape (n,)."""
        return self.find(keys).lengths

    def token_logps(self, keys: pa.Array) -> list[npt.NDArray[np.float32] | None]:
        """Look up keys. Return the stored values of each key as a float32 array, or None for a miss or damaged values."""
        return self.find(keys).token_logps()

    def prefix_sums(self, keys: pa.Array, lengths: Int64s) -> npt.NDArray[np.float64]:
        """Look up n keys, and return the sum of the first `lengths[i]` values of each key i.

        Args:
            keys: fixed_size_binary(16) array, as returned by `sequence_keys`.
            lengths: number of values to sum for each key, int64 of shape (n,).

        Returns:
            The sums in nats, as a float64 array of shape (n,). The sum is NaN for a key that has too few values in the snapshot
            or whose values are damaged.
        """
        return self.find(keys).prefix_sums(lengths)

    def repair_command(self) -> str:
        """Return the command line that repairs the table: it removes damaged shards and repairs the log."""
        return repair_command(self._table_uri)

    def require_whole(self) -> None:
        """Raise DamagedStoreError if a shard is known to be damaged or missing.

        If the snapshot keeps its index in memory, the shards that are not indexed yet are read first, to find unreadable
        shards. Otherwise, only the table's folder is listed, to find missing shards.
        """
        if len(self) <= self._index_rows:
            self._load_index()
        else:
            there = storage.list_files(self._filesystem)
            self.damaged |= {path: "the file is missing" for path in self.rows_of if path not in there}
        if self.damaged:
            shard, problem = next(iter(self.damaged.items()))
            raise DamagedStoreError(
                f"reference {self.reference_id} has {counted(len(self.damaged), 'damaged shard')} (for example {shard}: "
                f"{problem}); nothing is written until the damage is repaired; run {self.repair_command()}"
            )

    def _indexed_places(self, hi: Words, lo: Words) -> Places:
        places = Places.none(len(hi))
        for layer in self._load_index():
            places.improve(layer, hi, lo)
        return places

    def _load_index(self) -> list[Layer]:
        layers, indexed = self._index
        if indexed < len(self._shards):
            new = range(indexed, len(self._shards))
            layers = list(layers)
            read = [layer for layer in self._each(self._layer_of, new) if layer is not None]
            if read:
                layers.append(Layer.merged(read))
                pa.default_memory_pool().release_unused()  # return the memory of the columns to the system
            if len(layers) > _MAX_LAYERS:
                layers.sort(key=lambda layer: -len(layer.hi))
                layers = [layers[0], Layer.merged(layers[1:])]
            self._index = (layers, len(self._shards))
        return layers

    def _layer_of(self, number: int) -> Layer | None:
        try:
            return Layer.of(self._shards[number].index_columns(), number)
        except ShardDamageError as error:
            self._note_damage(number, error)
            return None

    def _scanned_places(self, hi: Words, lo: Words) -> Places:
        """Look up sorted keys without an index, in one pass over the row groups that can contain them.

        At any time, the index entries of at most _READERS * _GROUPS_AT_ONCE row groups are in memory.
        """
        places, lock = Places.none(len(hi)), threading.Lock()

        def look_in(number: int) -> None:
            try:
                for layer in self._touched_layers(number, hi):
                    asked = np.arange(np.searchsorted(hi, layer.hi[0], "left"), np.searchsorted(hi, layer.hi[-1], "right"))
                    with lock:
                        places.improve(layer, hi[asked], lo[asked], asked)
            except ShardDamageError as error:
                self._note_damage(number, error)

        for _ in self._each(look_in, range(len(self._shards))):
            pass
        return places

    def _touched_layers(self, number: int, sorted_hi: Words) -> Iterator[Layer]:
        """Yield index entries for those row groups of shard `number` that can contain a looked-up key."""
        shard = self._shards[number]
        least = np.array([group.least for group in shard.groups], np.uint64)
        greatest = np.array([group.greatest for group in shard.groups], np.uint64)
        asked = np.searchsorted(sorted_hi, greatest, "right") > np.searchsorted(sorted_hi, least, "left")
        touched = [group for group, is_asked in zip(shard.groups, asked, strict=True) if is_asked]
        for at in range(0, len(touched), _GROUPS_AT_ONCE):
            groups = touched[at : at + _GROUPS_AT_ONCE]
            rows = np.concatenate([np.arange(group.start, group.start + group.rows, dtype=np.int32) for group in groups])
            yield Layer.of(shard.index_columns([group.index for group in groups]), number, rows)

    def _each(self, work: Callable[[int], T], numbers: Sequence[int]) -> Iterator[T]:
        """Yield `work(number)` for each number, in order. Several threads compute the results."""
        if len(numbers) <= 1:
            yield from map(work, numbers)
            return
        with ThreadPoolExecutor(min(_READERS, len(numbers)), thread_name_prefix="reflogp-read") as readers:
            yield from readers.map(work, numbers)

    def _note_damage(self, number: int, error: ShardDamageError) -> None:
        path = self._shards[number].path
        if path not in self.damaged:
            self.damaged[path] = str(error)
            warnings.warn(
                f"shard {path} of reference {self.reference_id} is damaged ({error}): lookups treat its "
                f"{counted(self.rows_of[path], 'row')} as missing. To remove the shard, run `{self.repair_command()}`; then "
                "score the same data again",
                StoreDamageWarning,
                stacklevel=2,
            )


class Found:
    """The result of a lookup of n keys in a snapshot.

    Attributes:
        lengths: number of values that the snapshot has for each key, or -1 for a miss; an int32 array of shape (n,).
    """

    def __init__(self, snapshot: Snapshot, places: Places) -> None:
        self.lengths = places.length
        self._snapshot = snapshot
        self._places = places

    def __repr__(self) -> str:
        return short_repr("Found", f"{int((self.lengths != MISS).sum()):,} of {counted(len(self.lengths), 'key')}")

    def token_logps(self, some: Int64s | None = None) -> list[npt.NDArray[np.float32] | None]:
        """Return the stored values of each key as a float32 array, or None for a miss or damaged values.

        If `some` is given, return only the values of the keys at these indices.
        """
        places = np.arange(len(self.lengths)) if some is None else some
        values: dict[int, npt.NDArray[np.float32]] = {}
        for rows, lists in self._values(places[self.lengths[places] != MISS]):
            offsets, flat = lists.offsets.to_numpy(), lists.values.to_numpy(zero_copy_only=False)
            for i, row in enumerate(rows):
                values[int(row)] = flat[offsets[i] : offsets[i + 1]]
        return [values.get(int(place)) for place in places]

    def token_lists(self) -> pa.ListArray:
        """Return the stored values of all keys as one Arrow array of float32 lists, with null for a miss or damaged values.

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
        """Return the results for the keys with the indices `start` to `stop` - 1."""
        return Found(self._snapshot, self._places.take(slice(start, stop)))

    @property
    def nbytes(self) -> int:
        """Memory that this object uses, in bytes."""
        return _PLACE_BYTES * len(self.lengths)

    def values_bytes(self, count: int) -> int:
        """Return how many bytes of memory are needed to read token values and send them in batches of `count` bytes."""
        group = 4 * LEAST_GROUP_ROWS * int(self.lengths.max(initial=0))
        return 2 * count + 2 * max(READ_BYTES, group)

    def prefix_sums(self, lengths: Int64s) -> npt.NDArray[np.float64]:
        """Return the sum of the first `lengths[i]` values of each key i, as a float64 array of shape (n,).

        A key's sum is NaN if the snapshot has fewer values for it than requested, or if its values are damaged. Token values
        are read only for keys that have more stored values than requested.
        """
        sums = np.where(self.lengths == lengths, self._places.total, np.nan)
        sums[lengths == 0] = 0.0
        for rows, lists in self._values(np.flatnonzero((self.lengths > lengths) & (lengths > 0))):
            sums[rows] = list_sums(lists, lengths[rows])
        return sums

    def provenances(self, some: Int64s) -> Iterator[dict[str, Any]]:
        """Yield the provenances of the stored values of the keys at the indices `some`.

        A provenance tells how values were computed. The order is arbitrary. A provenance can be yielded several times,
        because duplicates are removed only among rows that are read together. Nothing is yielded for misses and for rows in
        damaged shards.
        """
        for _, texts in self._values(some[self.lengths[some] != MISS], "provenance"):
            yield from map(json.loads, pc.unique(texts).to_pylist())

    def _values(self, wanted: Int64s, column: str = "token_logps") -> Iterator[tuple[Int64s, pa.Array]]:
        """Read a column for the keys at the indices `wanted`, in parts. For each part, yield the indices of its keys, and the
        column's values for these keys."""
        file, row = self._places.file, self._places.row
        by_place = wanted[np.lexsort((row[wanted], file[wanted]))]
        for of_shard in np.split(by_place, np.flatnonzero(np.diff(file[by_place])) + 1):
            for keys in np.split(of_shard, np.arange(_VALUE_ROWS, len(of_shard), _VALUE_ROWS)):
                if len(keys):
                    number = int(file[keys[0]])
                    try:
                        for part, found in self._snapshot._shards[number].values(column, row[keys]):
                            yield keys[part], found
                    except ShardDamageError as error:
                        self._snapshot._note_damage(number, error)


#: Arrow schemas of a lookup over HTTP. A request contains keys. A response contains one row per key, in the order of the
#: request, with nulls for a miss. The column `token_logps` is included only if it was requested.
QUESTION = pa.schema([pa.field("key", KEY_TYPE, nullable=False)])
ANSWER = pa.schema([("scored_len", pa.int32()), ("logp_sum", pa.float64()), ("token_logps", pa.list_(pa.float32()))])


#: Maximum number of keys in one batch of a response.
_BATCH_KEYS = 131_072


def answer_schema(snapshot: Snapshot, values: bool) -> pa.Schema:
    """Return the Arrow schema of the response to a lookup. The schema's metadata contains the reference id and the snapshot's
    number."""
    about = {"reference_id": snapshot.reference_id, "snapshot": str(snapshot.number)}
    return pa.schema(list(ANSWER)[: 3 if values else 2]).with_metadata(about)


def answer_table(snapshot: Snapshot, found: Found, values: bool) -> pa.Table:
    """Return the response to a lookup of n keys, as a table with the schema from `answer_schema`.

    Args:
        snapshot: the snapshot that the keys were looked up in.
        found: the result of the lookup.
        values: whether to include token_logps.
    """
    missing = found.lengths == MISS
    columns = [
        pa.array(found.lengths, pa.int32(), mask=missing),
        pa.array(found.prefix_sums(np.maximum(found.lengths, 0).astype(np.int64)), pa.float64(), mask=missing),
    ]
    if values:
        columns.append(found.token_lists())
    return pa.table(columns, schema=answer_schema(snapshot, values))


def answer_parts(found: Found, values: bool, most_bytes: int) -> list[tuple[int, int]]:
    """Split a response into batches, and return a tuple (start, stop) for each batch. The batch contains the keys with the
    indices `start` to `stop` - 1.

    Args:
        found: the result of the lookup.
        values: whether the response includes token_logps.
        most_bytes: maximum number of bytes of token values in a batch; only a batch with a single key can exceed it.
    """
    count = len(found.lengths)
    before = np.zeros(count + 1, np.int64)
    if values:
        np.cumsum(4 * np.maximum(found.lengths, 0).astype(np.int64), out=before[1:])
    parts, start = [], 0
    while start < count:
        stop = int(np.searchsorted(before, before[start] + most_bytes, "right")) - 1
        stop = min(max(stop, start + 1), start + _BATCH_KEYS, count)
        parts.append((start, stop))
        start = stop
    return parts


def answer_messages(snapshot: Snapshot, found: Found, values: bool, parts: list[tuple[int, int]]) -> Iterator[pa.Buffer]:
    """Yield a response as the messages of an Arrow IPC stream. Each message is built only when it is needed.

    Args:
        snapshot: the snapshot that the keys were looked up in.
        found: the result of the lookup.
        values: whether to include token_logps.
        parts: (start, stop) for the keys of each batch, as returned by `answer_parts`.
    """
    tables = (answer_table(snapshot, found.slice(start, stop), values) for start, stop in parts)
    return stream_messages(answer_schema(snapshot, values), tables)
