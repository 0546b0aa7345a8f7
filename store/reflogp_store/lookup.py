"""A lookup as one Arrow table: what crosses a border when a store is asked over HTTP, written once for both sides.

Knows the columns of question and answer. Does not know HTTP. Called by the service (to answer) and by the client (to read).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from reflogp_store.index import MISS
from reflogp_store.keys import KEY_TYPE
from reflogp_store.snapshot import Found, Snapshot

#: What is asked: keys. What is answered, in the keys' order, null for a miss; `token_logps` only where it is asked for.
QUESTION = pa.schema([pa.field("key", KEY_TYPE, nullable=False)])
ANSWER = pa.schema([("scored_len", pa.int32()), ("logp_sum", pa.float64()), ("token_logps", pa.list_(pa.float32()))])


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
    about = {"reference_id": snapshot.reference_id, "snapshot": str(snapshot.number)}
    return pa.table(columns, schema=pa.schema(list(ANSWER)[: len(columns)])).replace_schema_metadata(about)
