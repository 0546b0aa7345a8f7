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


def pairs_of(count: int, completion: int = 10) -> tuple[pa.Table, pa.Table]:
    """Return (tokenized pairs, the shard rows of their sequences); all values differ."""
    prompts = [[i, 1, 2] for i in range(count)]
    sides = {
        side: [[i + t + start for t in range(completion)] for i in range(count)]
        for side, start in (("chosen_ids", 0), ("rejected_ids", 5))
    }
    keys = sequence_keys(prompts * 2, sides["chosen_ids"] + sides["rejected_ids"])
    logps = pa.array(list(-np.random.default_rng(5).random((2 * count, completion), np.float32)), pa.list_(pa.float32()))
    rows = shard_table(
        keys, np.full(2 * count, 3, np.int32), np.full(2 * count, completion, np.int32), logps, {"engine": "test"}
    )
    return pa.table({"prompt_ids": prompts, **sides}), rows
