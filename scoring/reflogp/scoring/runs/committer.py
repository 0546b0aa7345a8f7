"""Commit scored sequences to a table: build rows, append them, and compact the table if it has many small shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.torch_engine.sequences import Sequence, TopLogps, Values, token_logps_of
from reflogp.scoring.tracing import span
from reflogp.store.maintenance import small_shards_allowed
from reflogp.store.schema import shard_table
from reflogp.store.top import ValuesTable

#: Maximum numbers of sequences and of seconds between two commits. A crash loses the work since the last commit.
COMMIT_SEQUENCES = 4096
COMMIT_SECONDS = 30.0
#: The first commit comes sooner, so that whoever stops a run early does not lose everything.
FIRST_COMMIT_SECONDS = 10.0


class Committer:
    def __init__(self, table: ValuesTable) -> None:
        self._table = table
        self._small_shards = small_shards_allowed()

    def commit(
        self,
        keys: pa.Array,
        sequences: list[Sequence],
        completion_lens: npt.NDArray[np.int32],
        values: list[Values],
        provenance: dict[str, Any],
    ) -> int:
        """Append values to the table and return the number of the snapshot that contains them."""
        with span("commit", sequences=len(sequences), tokens=sum(map(len, sequences))) as commit:
            rows = shard_table(
                keys,
                np.array([len(sequence.prompt_ids) for sequence in sequences], np.int32),
                completion_lens,
                pa.array(list(map(token_logps_of, values)), pa.list_(pa.float32())),
                provenance,
                _top([of for of in values if isinstance(of, TopLogps)]) if self._table.top_k else None,
            )
            snapshot = self._table.append(rows).snapshot
            commit["snapshot"] = snapshot
            self._table.compact_if_many(self._small_shards)
        return snapshot


def _top(values: list[TopLogps]) -> tuple[pa.Array, pa.Array]:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([of.ids.size for of in values], out=offsets[1:])
    ids, logps = (np.concatenate([getattr(of, name).ravel() for of in values]) for name in ("ids", "logps"))
    return pa.ListArray.from_arrays(offsets, ids), pa.ListArray.from_arrays(offsets, logps)
