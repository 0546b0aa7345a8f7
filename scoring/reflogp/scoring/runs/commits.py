"""One commit of scored sequences: rows, an append, and a compaction now and then.

Knows what a row is made of. Does not know who computed the values. Called by every scorer and by a service's late writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.torch_engine.sequences import Logps, Sequence
from reflogp.store import LogprobTable
from reflogp.store.compaction import compact_if_many, small_shards_allowed
from reflogp.store.schema import shard_table

#: A commit at least this often, in sequences and in seconds: what a crash can lose.
COMMIT_SEQUENCES = 4096
COMMIT_SECONDS = 30.0


class Commits:
    """Commits into one table.

    Args:
        table: where to.
    """

    def __init__(self, table: LogprobTable) -> None:
        self._table = table
        self._small_shards = small_shards_allowed()

    def commit(
        self,
        keys: pa.Array,
        sequences: list[Sequence],
        completion_lens: npt.NDArray[np.int32],
        logps: list[Logps],
        provenance: dict[str, Any],
    ) -> int:
        """Append values; the snapshot that has them.

        Args:
            keys: of the whole sequences, binary.
            sequences: as they were scored.
            completion_lens: tokens of each whole completion, shape (n,).
            logps: token_logps of each sequence, float32.
            provenance: how the values were made.

        Raises what LogprobTable.append raises.
        """
        rows = shard_table(
            keys,
            np.array([len(sequence.prompt_ids) for sequence in sequences], np.int32),
            completion_lens,
            pa.array(logps, pa.list_(pa.float32())),
            provenance,
        )
        snapshot = self._table.append(rows).snapshot
        compact_if_many(self._table, self._small_shards)
        return snapshot
