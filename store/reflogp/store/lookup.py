"""A lookup as one Arrow table: what crosses a border when a store is asked over HTTP, written once for both sides.

Knows the columns of question and answer. Does not know HTTP. Called by the service (to answer) and by the client (to read).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from reflogp.store.arrow_stream import stream_messages
from reflogp.store.index import MISS
from reflogp.store.keys import KEY_TYPE
from reflogp.store.snapshot import Found, Snapshot

#: What is asked: keys. What is answered, in the keys' order, null for a miss; `token_logps` only where it is asked for.
QUESTION = pa.schema([pa.field("key", KEY_TYPE, nullable=False)])
ANSWER = pa.schema([("scored_len", pa.int32()), ("logp_sum", pa.float64()), ("token_logps", pa.list_(pa.float32()))])


#: Keys of one batch of an answer.
_BATCH_KEYS = 131_072


def answer_schema(snapshot: Snapshot, values: bool) -> pa.Schema:
    """The columns of an answer; the metadata names reference_id and snapshot."""
    about = {"reference_id": snapshot.reference_id, "snapshot": str(snapshot.number)}
    return pa.schema(list(ANSWER)[: 3 if values else 2]).with_metadata(about)


def answer_table(snapshot: Snapshot, found: Found, values: bool) -> pa.Table:
    """The answer to n keys that were looked up; its metadata names reference_id and snapshot.

    Args:
        snapshot: where they were looked up.
        found: the lookup.
        values: give token_logps too.
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
    """(first key, key behind the last) of each batch of an answer.

    Args:
        found: the lookup.
        values: give token_logps too.
        most_bytes: of token values in a batch; one key's values are never divided.
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
    """An answer as the messages of an Arrow IPC stream, each made when it is asked for.

    Args:
        snapshot, found, values: as `answer_table`.
        parts: from `answer_parts`.
    """
    tables = (answer_table(snapshot, found.slice(start, stop), values) for start, stop in parts)
    return stream_messages(answer_schema(snapshot, values), tables)
