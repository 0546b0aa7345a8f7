"""Encode the result of a lookup as one Arrow table, for lookups over HTTP.

Both the service, which writes it, and the client, which reads it, use these columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from reflogp.store.arrow_stream import stream_messages
from reflogp.store.index import MISS
from reflogp.store.keys import KEY_TYPE
from reflogp.store.snapshot import Found, Snapshot

#: Columns of the request: keys. Columns of the response, in the keys' order, null for a miss; `token_logps` only on request.
QUESTION = pa.schema([pa.field("key", KEY_TYPE, nullable=False)])
ANSWER = pa.schema([("scored_len", pa.int32()), ("logp_sum", pa.float64()), ("token_logps", pa.list_(pa.float32()))])


#: Maximum number of keys in one batch of a response.
_BATCH_KEYS = 131_072


def answer_schema(snapshot: Snapshot, values: bool) -> pa.Schema:
    """Return the columns of a response; the metadata holds reference_id and snapshot."""
    about = {"reference_id": snapshot.reference_id, "snapshot": str(snapshot.number)}
    return pa.schema(list(ANSWER)[: 3 if values else 2]).with_metadata(about)


def answer_table(snapshot: Snapshot, found: Found, values: bool) -> pa.Table:
    """Return the response for n keys; its metadata holds reference_id and snapshot.

    Args:
        snapshot: the snapshot in which the keys were looked up.
        found: the result of the lookup.
        values: include token_logps.
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
    """Return (first key, key after the last) for each batch of a response.

    Args:
        found: the result of the lookup.
        values: include token_logps.
        most_bytes: maximum bytes of token values in a batch; the values of one key are never divided.
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
    """Yield a response as the messages of an Arrow IPC stream, each made only when it is needed.

    Args:
        snapshot, found, values: as for `answer_table`.
        parts: from `answer_parts`.
    """
    tables = (answer_table(snapshot, found.slice(start, stop), values) for start, stop in parts)
    return stream_messages(answer_schema(snapshot, values), tables)
