"""Everything that a store holds of a reference, read past the store, and compared."""

import numpy as np
import pyarrow.dataset as ds

from reflogp.store import Store


def rows_of(store, reference_id):
    """key -> (prompt_len, completion_len, values) of everything that a store holds."""
    table = Store(store)[reference_id]
    rows = ds.dataset([f"{table.uri}/{shard.path}" for shard in table.shards()]).to_table()
    assert len(rows) == table.totals()[1]
    columns = (rows[name].to_pylist() for name in ("key", "prompt_len", "completion_len", "token_logps"))
    return {key: (p, c, np.array(values)) for key, p, c, values in zip(*columns, strict=True)}


def same_rows(left, right):
    assert left.keys() == right.keys()
    for key, (prompt_len, completion_len, values) in left.items():
        assert (prompt_len, completion_len) == right[key][:2]
        assert np.abs(values - right[key][2]).max() <= 1e-5
