"""A reference's table, and its table with the k most probable tokens of each position, as one table to score into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.store.index import Int64s
from reflogp.store.reference import Reference
from reflogp.store.schema import SCHEMA
from reflogp.store.snapshot import Found, Snapshot, TopValues
from reflogp.store.table import Appended, LogprobTable


class ValuesTable:
    """The values that a run computes: log-probs, and with `top`, the most probable tokens of each position too.

    Rows are appended to both tables, so that whoever needs no most probable tokens does not read them. A key's values are there
    if both tables have them. In the tables `others`, with more most probable tokens, values are looked up too.
    """

    def __init__(self, base: LogprobTable, top: LogprobTable | None = None, others: Sequence[LogprobTable] = ()) -> None:
        self.base, self._top, self._others = base, top, others
        self.top_k = 0 if top is None else top.top_k

    @property
    def uri(self) -> str:
        return self.base.uri

    @property
    def reference(self) -> Reference:
        return self.base.reference

    def snapshot(self) -> ValuesSnapshot:
        tops = [] if self._top is None else [table.snapshot() for table in (self._top, *self._others)]
        return ValuesSnapshot(self.base.snapshot(), tops)

    def append(self, rows: pa.Table) -> Appended:
        """See LogprobTable.append."""
        appended = self.base.append(rows.select(SCHEMA.names))
        return appended if self._top is None else replace(self._top.append(rows), snapshot=appended.snapshot)

    def compact_if_many(self, allowed: int) -> None:
        for table in (self.base, self._top):
            if table is not None:
                table.compact_if_many(allowed)


class ValuesSnapshot:
    def __init__(self, base: Snapshot, tops: Sequence[Snapshot]) -> None:
        self._parts: list[Snapshot | TopSnapshot] = [base, TopSnapshot(tops)] if tops else [base]
        self.number = base.number

    def find(self, keys: pa.Array) -> ValuesFound:
        return ValuesFound([part.find(keys) for part in self._parts])

    def stored_lengths(self, keys: pa.Array) -> npt.NDArray[np.int32]:
        return self.find(keys).lengths


class ValuesFound:
    """The result of a lookup in a ValuesSnapshot. `lengths` are those that all tables have."""

    def __init__(self, parts: list[Found | TopFound]) -> None:
        self._parts = parts
        self.lengths: npt.NDArray[np.int32] = np.minimum.reduce([part.lengths for part in parts])

    def provenances(self, some: Int64s) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            yield from part.provenances(some)


class TopSnapshot:
    """Snapshots of tables with most probable tokens, as one: of each key, the longest row of any table is read."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = snapshots

    def find(self, keys: pa.Array) -> TopFound:
        return TopFound([snapshot.find(keys) for snapshot in self._snapshots])


class TopFound:
    """The result of a lookup in a TopSnapshot, with methods like those of Found."""

    def __init__(self, found: list[Found]) -> None:
        self._found = found
        lengths = np.stack([of.lengths for of in found])
        self._table = lengths.argmax(0)
        self.lengths: npt.NDArray[np.int32] = lengths.max(0)

    def provenances(self, some: Int64s) -> Iterator[dict[str, Any]]:
        for number, of in enumerate(self._found):
            yield from of.provenances(some[self._table[some] == number])

    def top(self, k: int, some: Int64s) -> list[TopValues | None]:
        values: list[TopValues | None] = [None] * len(some)
        for number, of in enumerate(self._found):
            places = np.flatnonzero(self._table[some] == number)
            for place, of_key in zip(places.tolist(), of.top(k, some[places]) if len(places) else (), strict=True):
                values[place] = of_key
        return values
