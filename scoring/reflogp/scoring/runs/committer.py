"""Commit scored sequences to a table: build rows, append them, and compact the table if it has many small shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.torch_engine.sequences import Logps, Sequence
from reflogp.scoring.tracing import span
from reflogp.store import LogprobTable
from reflogp.store.maintenance import small_shards_allowed
from reflogp.store.schema import shard_table

#: Maximum numbers of sequences and of seconds between two commits. A crash loses the work since the last commit.
COMMIT_SEQUENCES = 4096
COMMIT_SECONDS = 30.0
#: The first commit comes sooner, so that whoever stops a run early does not lose everything.
FIRST_COMMIT_SECONDS = 10.0


class Committer:
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
        """Append values to the table and return the number of the snapshot that contains them.

        Args:
            keys: keys of the sequences, a binary array. With keep_start, keys are computed from the whole completions.
            sequences: the sequences as they were scored; their completions may be truncated.
            completion_lens: number of tokens in each completion, int32 (n,). With keep_start, this includes tokens that are cut
                off.

        Raises the same errors as LogprobTable.append.
        """
        with span("commit", sequences=len(sequences), tokens=sum(map(len, sequences))) as commit:
            rows = shard_table(
                keys,
                np.array([len(sequence.prompt_ids) for sequence in sequences], np.int32),
                completion_lens,
                pa.array(logps, pa.list_(pa.float32())),
                provenance,
            )
            snapshot = self._table.append(rows).snapshot
            commit["snapshot"] = snapshot
            self._table.compact_if_many(self._small_shards)
        return snapshot
