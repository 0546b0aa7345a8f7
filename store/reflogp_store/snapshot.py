"""A snapshot: one numbered state of one reference model's table, and how keys are looked up in it.

Keeps a sorted index of every key in memory (36 bytes a row: key, stored length, sum, where the values lie) and reads
token values only for rows that need them. Never writes. Called by the scorer (hits and misses), by joins and by commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs

from reflogp_store.errors import StoreUnavailableError
from reflogp_store.keys import keys_as_words
from reflogp_store.schema import list_sums, open_shard

#: Stored length of a key that the snapshot has not.
MISS = -1
#: More index layers than this are merged, so that a lookup never searches many.
_MAX_LAYERS = 8

Int64s = npt.NDArray[np.int64]


class Snapshot:
    """One numbered state of a table. Immutable: `advanced` gives another one."""

    def __init__(
        self,
        number: int,
        reference_id: str,
        filesystem: pafs.FileSystem,
        files: Iterable[str],
        _earlier: Snapshot | None = None,
    ) -> None:
        self.number = number
        self.reference_id = reference_id
        self._filesystem = filesystem
        known = _earlier.files if _earlier is not None else ()
        new = sorted(set(files).difference(known))
        #: Shards, in the order of the index's file numbers.
        self.files: tuple[str, ...] = (*known, *new)
        self._layers: list[_Layer] = list(_earlier._layers) if _earlier is not None else []
        if new:
            self._layers.append(_Layer.read(filesystem, new, first_file=len(known)))
        if len(self._layers) > _MAX_LAYERS:
            self._layers = [self._layers[0], _Layer.merged(self._layers[1:])]

    def __len__(self) -> int:
        """Rows. A key whose completion was scored further later counts once per row until compaction."""
        return sum(len(layer.hi) for layer in self._layers)

    def advanced(self, number: int, files: Iterable[str]) -> Snapshot:
        """Snapshot `number` with `files`; reads only the shards that this one has not indexed."""
        files = set(files)
        earlier = self if files.issuperset(self.files) else None
        return Snapshot(number, self.reference_id, self._filesystem, files, earlier)

    def stored_lengths(self, keys: pa.Array) -> npt.NDArray[np.int32]:
        """Values that the snapshot holds for each key, int32 (n,); -1 for a miss."""
        return self._find(keys).length

    def token_logps(self, keys: pa.Array) -> list[npt.NDArray[np.float32] | None]:
        """Stored values of each key, n arrays of float32; None for a miss."""
        found = self._find(keys)
        values: list[npt.NDArray[np.float32] | None] = [None] * len(keys)
        for rows, lists in self._values(found, np.flatnonzero(found.length != MISS)):
            offsets, flat = lists.offsets.to_numpy(), lists.values.to_numpy(zero_copy_only=False)
            for i, row in enumerate(rows):
                values[row] = flat[offsets[i] : offsets[i + 1]]
        return values

    def prefix_sums(self, keys: pa.Array, lengths: Int64s) -> npt.NDArray[np.float64]:
        """Sum of each key's first `lengths[i]` values, float64 (n,); NaN where the snapshot has fewer.

        Reads token values only for rows whose stored length differs from the one asked for.
        """
        found = self._find(keys)
        sums = np.where(found.length == lengths, found.total, np.nan)
        sums[lengths == 0] = 0.0
        for rows, lists in self._values(found, np.flatnonzero((found.length > lengths) & (lengths > 0))):
            sums[rows] = list_sums(lists, lengths[rows])
        return sums

    def _find(self, keys: pa.Array) -> _Found:
        hi, lo = keys_as_words(keys)
        n = len(hi)
        found = _Found(np.full(n, MISS, np.int32), np.full(n, np.nan), np.zeros(n, np.int32), np.zeros(n, np.int32))
        for layer in self._layers:
            if not len(layer.hi):
                continue
            at = layer.positions(hi, lo)
            better = np.flatnonzero((at >= 0) & (layer.length[at] > found.length))
            for name in ("length", "total", "file", "row"):
                getattr(found, name)[better] = getattr(layer, name)[at[better]]
        return found

    def _values(self, found: _Found, wanted: Int64s) -> Iterator[tuple[Int64s, pa.ListArray]]:
        """(rows, their token values in that order), one shard after the other."""
        by_file = wanted[np.lexsort((found.row[wanted], found.file[wanted]))]
        for rows in np.split(by_file, np.flatnonzero(np.diff(found.file[by_file])) + 1):
            if len(rows):
                yield rows, _read_values(self._filesystem, self.files[found.file[rows[0]]], found.row[rows])


@dataclass
class _Found:
    """Where each of n keys lies."""

    length: npt.NDArray[np.int32]
    total: npt.NDArray[np.float64]
    file: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]


@dataclass(frozen=True)
class _Layer:
    """A sorted index of some shards: one entry per key, the longest row of a key that has several."""

    hi: npt.NDArray[np.uint64]
    lo: npt.NDArray[np.uint64]
    length: npt.NDArray[np.int32]
    total: npt.NDArray[np.float64]
    file: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]

    @classmethod
    def read(cls, filesystem: pafs.FileSystem, files: Sequence[str], first_file: int) -> _Layer:
        return cls.merged([cls._of_shard(filesystem, path, first_file + i) for i, path in enumerate(files)])

    @classmethod
    def _of_shard(cls, filesystem: pafs.FileSystem, path: str, file: int) -> _Layer:
        keys, lengths, totals = [], [], []
        for batch in read_batches(filesystem, path, ["key", "token_logps", "logp_sum"]):
            keys.append(batch.column("key"))
            lengths.append(batch.column("token_logps").value_lengths().to_numpy(zero_copy_only=False))
            totals.append(batch.column("logp_sum").to_numpy())
        if not keys:
            keys, lengths, totals = [pa.array([], pa.binary())], [np.zeros(0, np.int32)], [np.zeros(0)]
        hi, lo = keys_as_words(pa.concat_arrays(keys))
        rows = np.arange(len(hi), dtype=np.int32)
        return cls(hi, lo, np.concatenate(lengths).astype(np.int32), np.concatenate(totals), np.full_like(rows, file), rows)

    @classmethod
    def merged(cls, layers: Sequence[_Layer]) -> _Layer:
        columns = {
            name: np.concatenate([getattr(layer, name) for layer in layers])
            for name in ("hi", "lo", "length", "total", "file", "row")
        }
        order = np.lexsort((-columns["length"], columns["lo"], columns["hi"]))
        hi, lo = columns["hi"][order], columns["lo"][order]
        first = np.ones(len(order), bool)
        first[1:] = (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])
        return cls(**{name: column[order[first]] for name, column in columns.items()})

    def positions(self, hi: npt.NDArray[np.uint64], lo: npt.NDArray[np.uint64]) -> Int64s:
        """Index of each key in this layer, int64 (n,); -1 where it is not."""
        size = len(self.hi)
        if not size:
            return np.full(len(hi), -1)
        at = np.searchsorted(self.hi, hi)
        while True:  # keys that share their first half stand side by side; two in a row are already one in 2**64
            inside = np.minimum(at, size - 1)
            beside = (at < size) & (self.hi[inside] == hi) & (self.lo[inside] < lo)
            if not beside.any():
                break
            at = at + beside
        hit = (at < size) & (self.hi[inside] == hi) & (self.lo[inside] == lo)
        return np.where(hit, at, -1)


def read_batches(filesystem: pafs.FileSystem, path: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Record batches of one shard.

    Raises StoreUnavailableError, naming the shard, when it is gone or damaged.
    """
    try:
        with filesystem.open_input_file(path) as source:
            yield from open_shard(source).iter_batches(columns=columns)
    except (OSError, pa.ArrowInvalid) as error:
        raise StoreUnavailableError(f"shard {path} cannot be read: {error}") from error


def _read_values(filesystem: pafs.FileSystem, path: str, rows: npt.NDArray[np.int32]) -> pa.ListArray:
    """Token values of some rows (ascending) of one shard; reads only the row groups that hold them."""
    try:
        with filesystem.open_input_file(path) as source:
            shard = open_shard(source)
            sizes = [shard.metadata.row_group(i).num_rows for i in range(shard.num_row_groups)]
            starts = np.concatenate([[0], np.cumsum(sizes)])
            groups = np.searchsorted(starts, rows, "right") - 1
            used = np.unique(groups)
            lists = shard.read_row_groups(used.tolist(), columns=["token_logps"]).column(0).combine_chunks()
    except (OSError, pa.ArrowInvalid) as error:
        raise StoreUnavailableError(f"shard {path} cannot be read: {error}") from error
    kept_before = np.concatenate([[0], np.cumsum(np.asarray(sizes)[used])])[:-1]
    local = rows - starts[groups] + kept_before[np.searchsorted(used, groups)]
    taken = lists.take(pa.array(local))
    return taken.chunk(0) if isinstance(taken, pa.ChunkedArray) else taken
