"""Look up keys in a sorted index. If several rows have the same key, the lookup finds the row with the most log-probs.

An index consists of layers. If several layers have an entry for a key, the entry with the most log-probs is used. This module
reads no files.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.store.keys import keys_as_words

#: The length that a lookup returns for a key that was not found.
MISS = -1

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass
class Places:
    """The results of looking up n keys: where each key's row is stored, and the number and sum of the row's values.

    Attributes:
        length: number of stored values, int32 (n,), or MISS if the key was not found.
        total: sum of the values, float64 (n,), or NaN if the key was not found.
        file, row: index of the shard, and index of the row in the shard, int32 (n,); 0 if the key was not found.
    """

    length: npt.NDArray[np.int32]
    total: npt.NDArray[np.float64]
    file: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]

    @classmethod
    def none(cls, count: int) -> Places:
        zeros = np.zeros(count, np.int32)
        return cls(np.full(count, MISS, np.int32), np.full(count, np.nan), zeros, zeros.copy())

    def take(self, order: Int64s | slice) -> Places:
        return Places(self.length[order], self.total[order], self.file[order], self.row[order])

    def improve(self, layer: Layer, hi: Words, lo: Words) -> None:
        """Replace each result by that of one more layer, if the layer has more values for the key. `hi` and `lo` are the words
        of the keys.
        """
        if not len(layer.hi) or not len(hi):
            return
        at = layer.positions(hi, lo)
        better = np.flatnonzero((at >= 0) & (layer.length[at] > self.length))
        for field in fields(self):
            getattr(self, field.name)[better] = getattr(layer, field.name)[at[better]]


@dataclass(frozen=True)
class Layer:
    """Index entries of one or more shards, sorted by key. Each key has one entry, for its row with the most log-probs.

    Attributes:
        hi, lo: first and second 64-bit word of each key; see `keys_as_words`.
        length, total, file, row: as in `Places`.
        omits_rows: whether rows have no entry, because another row of their key has at least as many log-probs.
    """

    hi: Words
    lo: Words
    length: npt.NDArray[np.int32]
    total: npt.NDArray[np.float64]
    file: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]
    omits_rows: bool = False

    @classmethod
    def of(cls, columns: pa.Table, file: int) -> Layer:
        """Return the entries of the shard with the number `file`, in the order of its rows: a layer only after `merged`.
        `columns` are the shard's columns key, scored_len and logp_sum.
        """
        hi, lo = keys_as_words(columns["key"])
        rows = np.arange(len(hi), dtype=np.int32)
        length, total = columns["scored_len"].to_numpy(), columns["logp_sum"].to_numpy()
        return cls(hi, lo, length, total, np.full(len(hi), file, np.int32), rows)

    def without(self, files: list[int]) -> Layer:
        kept = ~np.isin(self.file, files)
        return self if kept.all() else replace(self, **{name: getattr(self, name)[kept] for name in _ARRAYS})

    @classmethod
    def merged(cls, layers: list[Layer]) -> Layer:
        """Merge layers, or entries of shards. The list `layers` is emptied, so that each array can be freed once it
        is copied.
        """
        there = sorted((layer for layer in layers if len(layer.hi)), key=lambda layer: int(layer.hi[0]))
        layers.clear()
        if not there:
            none = np.zeros(0, np.int32)
            return cls(none.astype(np.uint64), none.astype(np.uint64), none, none.astype(np.float64), none, none)
        omits_rows = any(layer.omits_rows for layer in there)
        parts = {name: [getattr(layer, name) for layer in there] for name in _ARRAYS}
        del there
        joined: dict[str, npt.NDArray[Any]] = {name: np.concatenate(parts.pop(name)) for name in _ARRAYS}
        hi = joined["hi"]
        if not (hi[1:] > hi[:-1]).all():
            kept = each_key_once(hi, joined["lo"], joined["length"])
            omits_rows |= len(kept) < len(hi)
            for name in _ARRAYS:
                joined[name] = joined[name][kept]
        return cls(**joined, omits_rows=omits_rows)

    def positions(self, hi: Words, lo: Words) -> Int64s:
        """Return the index of each key in this layer, int64 (n,); -1 if the layer lacks the key."""
        size = len(self.hi)
        at = np.searchsorted(self.hi, hi)
        while True:  # one iteration almost always suffices: two keys have the same `hi` with a probability of 1 in 2**64
            inside = np.minimum(at, size - 1)
            beside = (at < size) & (self.hi[inside] == hi) & (self.lo[inside] < lo)
            if not beside.any():
                break
            at = at + beside
        hit = (at < size) & (self.hi[inside] == hi) & (self.lo[inside] == lo)
        return np.where(hit, at, -1)


_ARRAYS = tuple(field.name for field in fields(Layer) if field.name != "omits_rows")


def each_key_once(hi: Words, lo: Words, length: npt.NDArray[np.int32]) -> Int64s:
    """For each key, in ascending order of the keys, return the index of the key's entry with the most log-probs."""
    is_in_runs = np.count_nonzero(hi[1:] < hi[:-1]) < len(hi) // 100  # numpy's stable sort merges them
    order = np.argsort(hi, kind="stable" if is_in_runs else None)
    sorted_hi = hi[order]
    if not (sorted_hi[1:] == sorted_hi[:-1]).any():  # no two entries share a key
        return order
    order = np.lexsort((-length, lo, hi))
    sorted_hi, sorted_lo = hi[order], lo[order]
    first = np.ones(len(order), bool)
    first[1:] = (sorted_hi[1:] != sorted_hi[:-1]) | (sorted_lo[1:] != sorted_lo[:-1])
    return order[first]
