"""A reference's table, and its table with the k most probable tokens of each position, as one table to score into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.store.index import Int64s
from reflogp.store.reference import Reference
from reflogp.store.schema import SCHEMA
from reflogp.store.snapshot import Found, Snapshot
from reflogp.store.table import Appended, LogprobTable


class ValuesTable:
    """The values that a run computes: log-probs, and with `top`, the most probable tokens of each position too.

    Rows are appended to both tables, so that whoever needs no most probable tokens does not read them. A key's values are there
    if both tables have them.

    Attributes:
        top_k: number of most probable tokens that appended rows have.
    """

    def __init__(self, base: LogprobTable, top: LogprobTable | None = None) -> None:
        self._base, self._top = base, top
        self.top_k = 0 if top is None else top.top_k

    @property
    def uri(self) -> str:
        return self._base.uri

    @property
    def reference(self) -> Reference:
        return self._base.reference

    def snapshot(self) -> ValuesSnapshot:
        return ValuesSnapshot(self._base.snapshot(), None if self._top is None else self._top.snapshot())

    def append(self, rows: pa.Table) -> Appended:
        """See LogprobTable.append. The snapshot's number is that of a ValuesSnapshot."""
        appended = self._base.append(rows.select(SCHEMA.names))
        return appended if self._top is None else replace(self._top.append(rows), snapshot=appended.snapshot)

    def compact_if_many(self, allowed: int) -> None:
        for table in (self._base, self._top):
            if table is not None:
                table.compact_if_many(allowed)


class ValuesSnapshot:
    """A snapshot of a ValuesTable; see Snapshot.

    Attributes:
        number: number of the snapshot of the table without most probable tokens.
    """

    def __init__(self, base: Snapshot, top: Snapshot | None) -> None:
        self._base, self._top = base, top
        self.number = base.number

    def find(self, keys: pa.Array) -> ValuesFound:
        return ValuesFound([of.find(keys) for of in (self._base, self._top) if of is not None])

    def stored_lengths(self, keys: pa.Array) -> npt.NDArray[np.int32]:
        return self.find(keys).lengths


class ValuesFound:
    """The result of a lookup in a ValuesSnapshot.

    Attributes:
        lengths: number of values of each key that all tables have, or -1 for a miss; int32 (n,).
    """

    def __init__(self, found: list[Found]) -> None:
        self._found = found
        self.lengths: npt.NDArray[np.int32] = np.minimum.reduce([of.lengths for of in found])

    def provenances(self, some: Int64s) -> Iterator[dict[str, Any]]:
        """See Found.provenances."""
        for of in self._found:
            yield from of.provenances(some)
