"""Make rows of invented sequences, for tables without a model."""

import numpy as np
import pyarrow as pa

from reflogp.store import Reference, sequence_keys
from reflogp.store.schema import shard_table

REFERENCE = Reference("ab" * 16, "model", "float32", "float32", ("00" * 32,), {"hidden_size": 8})


def some_rows(first: int, count: int, values: int = 5, seed: int = 0, completion: int = 10):
    """Return (keys, shard rows) of `count` sequences from number `first` on, with `values` values for `completion` tokens."""
    prompts = [[i, 1, 2] for i in range(first, first + count)]
    completions = [[i + t for t in range(completion)] for i in range(first, first + count)]
    keys = sequence_keys(prompts, completions)
    random = np.random.default_rng(seed)
    logps = pa.array(list(-random.random((count, values), np.float32)), pa.list_(pa.float32()))
    lens = np.full(count, completion, np.int32)
    return keys, shard_table(keys, np.full(count, 3, np.int32), lens, logps, {"engine": "test"})
