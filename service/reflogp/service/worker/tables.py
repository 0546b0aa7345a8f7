"""Convert sequences and their values to and from tables, sent as Arrow IPC streams between the service and its workers.

Both sides use this module, so it does not import torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from reflogp.store.schema import one_array

#: Tables of a request (SEQUENCES) and of its response (OUTCOMES), in the same order; values are null where there is an error.
#: MASKED_SEQUENCES are rows of padded batches, with padding among their token ids. 32 bits are enough for every token id, and
#: halve the memory of queued requests.
SEQUENCES = pa.schema([("prompt_ids", pa.list_(pa.int32())), ("completion_ids", pa.list_(pa.int32()))])
MASKED_SEQUENCES = SEQUENCES.append(pa.field("attention_mask", pa.list_(pa.int32())))
OUTCOMES = pa.schema([("token_logps", pa.list_(pa.float32())), ("error", pa.string())])


def token_count(sequences: pa.Table) -> int:
    """Return the number of tokens of all prompts and completions."""
    return sum(len(one_array(sequences[name]).flatten()) for name in SEQUENCES.names)


def table_of(body: bytes) -> pa.Table:
    """Read the table of an Arrow IPC stream."""
    return pa.ipc.open_stream(body).read_all()


def outcomes_table(outcomes: list[Any]) -> pa.Table:
    """Return a table with the schema OUTCOMES; each outcome is a float32 array, or the error message of its sequence."""
    good = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    lengths = np.array([0 if isinstance(outcome, str) else len(outcome) for outcome in outcomes], np.int64)
    offsets = np.zeros(len(outcomes) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    values = pa.array(np.concatenate(good) if good else np.zeros(0, np.float32), pa.float32())
    mask = pa.array([isinstance(outcome, str) for outcome in outcomes], pa.bool_())
    return pa.table(
        [
            pa.ListArray.from_arrays(pa.array(offsets), values, mask=mask),
            pa.array([outcome if isinstance(outcome, str) else None for outcome in outcomes], pa.string()),
        ],
        schema=OUTCOMES,
    )
