"""Select the rows and tokens that a snapshot lacks, so that the first commit wins for every key and every token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from reflogp.store.schema import SCHEMA, list_sums, one_array
from reflogp.store.shard import longest_of_each_key, sorted_by_key
from reflogp.store.snapshot import Snapshot


def without_stored(rows: pa.Table, snapshot: Snapshot) -> pa.Table:
    """Return the rows that the snapshot lacks. A row that it has in part gets the stored values first.

    Returns `rows` itself if nothing changes, which shows the caller that a shard written from these rows is still valid.

    Raises DamagedStoreError if the stored values of a row that continues them are damaged.
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
    """Return the rows with their first values replaced by the stored values."""
    values = one_array(rows["token_logps"]).to_pylist()
    for row, beginning in zip(values, stored, strict=True):
        row[: len(beginning)] = beginning.tolist()
    lists = pa.array(values, pa.list_(pa.float32()))
    columns = {name: rows[name] for name in rows.column_names}
    columns |= {"token_logps": lists, "logp_sum": pa.array(list_sums(lists))}
    return pa.table(columns, schema=SCHEMA)
