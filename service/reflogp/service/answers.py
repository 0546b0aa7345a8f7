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
