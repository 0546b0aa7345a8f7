"""Encode the response to a lookup over HTTP: an Arrow IPC stream with one row per key, in the order of the request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from reflogp.store import Snapshot
from reflogp.store.index import MISS
from reflogp.store.schema import stream_messages
from reflogp.store.snapshot import Found

#: Arrow schema of a response, with nulls for a miss. The column `token_logps` is included only if it was requested.
ANSWER = pa.schema([("scored_len", pa.int32()), ("logp_sum", pa.float64()), ("token_logps", pa.list_(pa.float32()))])
#: Maximum number of keys in one batch of a response, and maximum number of bytes of token values; only a batch with a single
#: key can exceed it. For each batch, the row groups that contain its keys are read. Larger batches reduce the amount read in
#: total, but need more memory.
_BATCH_KEYS, _BATCH_BYTES = 131_072, 4 << 20


def answer_schema(snapshot: Snapshot, values: bool) -> pa.Schema:
    """Return the Arrow schema of a response. Its metadata contains the reference id and the snapshot's number."""
    about = {"reference_id": snapshot.reference_id, "snapshot": str(snapshot.number)}
    return pa.schema(list(ANSWER)[: 3 if values else 2]).with_metadata(about)


def answer_table(snapshot: Snapshot, found: Found, values: bool) -> pa.Table:
    """Return the response to a lookup, as a table with the schema from `answer_schema`."""
    missing = found.lengths == MISS
    columns = [
        pa.array(found.lengths, pa.int32(), mask=missing),
        pa.array(found.prefix_sums(np.maximum(found.lengths, 0).astype(np.int64)), pa.float64(), mask=missing),
    ]
    if values:
        columns.append(found.token_lists())
    return pa.table(columns, schema=answer_schema(snapshot, values))


def answer_messages(snapshot: Snapshot, found: Found, values: bool) -> Iterator[pa.Buffer]:
    """Yield a response as the messages of an Arrow IPC stream. Each message is built only when it is needed."""
    tables = (answer_table(snapshot, found.slice(start, stop), values) for start, stop in _batches(found, values))
    return stream_messages(answer_schema(snapshot, values), tables)


def _batches(found: Found, values: bool) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) of the keys of each batch."""
    count = len(found.lengths)
    before = np.zeros(count + 1, np.int64)
    if values:
        np.cumsum(4 * np.maximum(found.lengths, 0).astype(np.int64), out=before[1:])
    start = 0
    while start < count:
        stop = int(np.searchsorted(before, before[start] + _BATCH_BYTES, "right")) - 1
        stop = min(max(stop, start + 1), start + _BATCH_KEYS, count)
        yield start, stop
        start = stop
