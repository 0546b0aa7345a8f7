"""What of some rows a snapshot still lacks, so that the first commit wins for every key and every token.

Knows rows and snapshots. Writes nothing. Called by `LogprobTable.append`, before each try to commit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp_store.schema import SCHEMA, list_sums, one_array
from reflogp_store.snapshot import Found, Snapshot


def without_stored(rows: pa.Table, snapshot: Snapshot) -> pa.Table:
    """Rows that the snapshot lacks, those it has in part with the stored values first; `rows` itself when nothing changes.

    Raises DamagedStoreError when the stored values of a row that would go on from them are damaged.
    """
    rows = _longest_per_key(rows)
    lengths = rows["scored_len"].to_numpy()
    found = snapshot.find(one_array(rows["key"]))
    extended = np.flatnonzero((found.lengths > 0) & (found.lengths < lengths))
    new = np.flatnonzero(found.lengths <= 0)
    if len(new) == len(rows):
        return rows
    parts = [rows.take(pa.array(new))]
    if len(extended):
        parts.append(_with_stored_prefix(rows.take(pa.array(extended)), snapshot, found, extended))
    return pa.concat_tables(parts)


def _longest_per_key(rows: pa.Table) -> pa.Table:
    order = np.argsort(-rows["scored_len"].to_numpy(), kind="stable")
    keys = rows["key"].take(pa.array(order)).to_pylist()
    first: dict[bytes, int] = {}
    for at, key in zip(order, keys, strict=True):
        first.setdefault(key, int(at))
    return rows if len(first) == len(rows) else rows.take(pa.array(sorted(first.values())))


def _with_stored_prefix(rows: pa.Table, snapshot: Snapshot, found: Found, at: npt.NDArray[np.int64]) -> pa.Table:
    """The rows, of which the snapshot has a beginning, with that beginning as it is stored."""
    values = one_array(rows["token_logps"]).to_pylist()
    for row, stored in zip(values, found.token_logps(at), strict=True):
        if stored is None:
            snapshot.require_whole()
        assert stored is not None
        row[: len(stored)] = stored.tolist()
    lists = pa.array(values, pa.list_(pa.float32()))
    columns = {name: rows[name] for name in rows.column_names}
    columns |= {"token_logps": lists, "logp_sum": pa.array(list_sums(lists))}
    return pa.table(columns, schema=SCHEMA)
