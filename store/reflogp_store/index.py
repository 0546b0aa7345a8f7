"""A sorted index of keys: where each key's longest row lies. All of a snapshot's in memory, or some row groups' for a moment.

Knows keys, lengths and places. Reads no file. Called by the snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp_store.keys import keys_as_words

#: Length of a key that is not there.
MISS = -1
#: Memory of one row's entry.
BYTES_PER_ROW = 36

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass
class Places:
    """What is known of each of n keys that were asked for.

    Attributes:
        length: values that are stored, int32; MISS where the key is not there.
        total: their sum, float64; NaN where the key is not there.
        file, row: where the row lies, int32.
    """

    length: npt.NDArray[np.int32]
    total: npt.NDArray[np.float64]
    file: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]

    @classmethod
    def none(cls, count: int) -> Places:
        """Nothing found yet."""
        zeros = np.zeros(count, np.int32)
        return cls(np.full(count, MISS, np.int32), np.full(count, np.nan), zeros, zeros.copy())

    def take(self, order: Int64s) -> Places:
        """The same of the keys in another order."""
        return Places(self.length[order], self.total[order], self.file[order], self.row[order])

    def improve(self, layer: Layer, hi: Words, lo: Words, asked: Int64s | None = None) -> None:
        """Take from `layer` what it has more of.

        Args:
            layer: where to look.
            hi, lo: the words of the keys to look for.
            asked: their places in this object, where they are only some of its keys.
        """
        if not len(layer.hi) or not len(hi):
            return
        at = layer.positions(hi, lo)
        own = self.length if asked is None else self.length[asked]
        better = np.flatnonzero((at >= 0) & (layer.length[at] > own))
        into = better if asked is None else asked[better]
        for field in fields(self):
            getattr(self, field.name)[into] = getattr(layer, field.name)[at[better]]


@dataclass(frozen=True)
class Layer:
    """Entries sorted by key: one per key, of the longest row of a key that has several."""

    hi: Words
    lo: Words
    length: npt.NDArray[np.int32]
    total: npt.NDArray[np.float64]
    file: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]

    @classmethod
    def of(cls, columns: pa.Table, file: int, rows: npt.NDArray[np.int32] | None = None) -> Layer:
        """The entries of one shard's index columns.

        Args:
            columns: key, scored_len, logp_sum.
            file: number of the shard.
            rows: the rows' numbers in the shard; 0, 1, 2, … when None.
        """
        hi, lo = keys_as_words(columns["key"])
        if rows is None:
            rows = np.arange(len(hi), dtype=np.int32)
        length, total = columns["scored_len"].to_numpy(), columns["logp_sum"].to_numpy()
        return cls.merged([cls(hi, lo, length, total, np.full(len(hi), file, np.int32), rows)])

    @classmethod
    def merged(cls, layers: Sequence[Layer]) -> Layer:
        """One layer of several."""
        layers = sorted((layer for layer in layers if len(layer.hi)), key=lambda layer: int(layer.hi[0]))
        if not layers:
            none = np.zeros(0, np.int32)
            return cls(none.astype(np.uint64), none.astype(np.uint64), none, none.astype(np.float64), none, none)
        joined = cls(*(np.concatenate([getattr(layer, field.name) for layer in layers]) for field in fields(cls)))
        if (joined.hi[1:] > joined.hi[:-1]).all():  # sorted shards, one behind the other: what compaction leaves
            return joined
        order = np.argsort(joined.hi, kind="stable")
        hi = joined.hi[order]
        if (hi[1:] == hi[:-1]).any():  # hardly ever but for keys that several rows share
            order = np.lexsort((-joined.length, joined.lo, joined.hi))
            hi = joined.hi[order]
        lo = joined.lo[order]
        first = np.ones(len(order), bool)
        first[1:] = (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])
        kept = order[first]
        return cls(hi[first], lo[first], *(getattr(joined, field.name)[kept] for field in fields(cls)[2:]))

    def positions(self, hi: Words, lo: Words) -> Int64s:
        """Index of each key in this layer, int64 (n,); -1 where it is not."""
        size = len(self.hi)
        at = np.searchsorted(self.hi, hi)
        while True:  # keys that share their first half stand side by side; two in a row are already one in 2**64
            inside = np.minimum(at, size - 1)
            beside = (at < size) & (self.hi[inside] == hi) & (self.lo[inside] < lo)
            if not beside.any():
                break
            at = at + beside
        hit = (at < size) & (self.hi[inside] == hi) & (self.lo[inside] == lo)
        return np.where(hit, at, -1)
