"""Where a trainer's reference values come from: a store, and which reference model and snapshot of it.

Knows stores and reference ids. Loads no model. Used by every trainer and by `join_reference_logps`.
"""

from __future__ import annotations

import os
from typing import Literal

from reflogp_store import (
    LogprobStore,
    LogprobTable,
    ReferenceNotFoundError,
    Snapshot,
    UsageError,
    describe_reference,
)
from reflogp_store.commands import score_command


class ReferenceSource:
    """Reference log-probs for trainers.

    Args:
        location: a store: a folder, or s3://…, gs://…, az://….
        model: the reference model: a folder or hub id. Only its files' digests are needed, which are remembered; weights are
            never loaded. Leave it out where `reference_id` is given.
        dtype: the dtype that it was scored in. Part of the reference id.
        reference_id: names the reference directly, as `reflogp score` and `reflogp store ls` print it.
        snapshot: number of a snapshot; None for the latest when the join begins.
        lm_head_dtype: "float32" where it was scored with `--lm-head-dtype float32`.
        on_miss: "error" is the only way: a row without values stops the run before it trains.

    Raises:
        UsageError: neither model nor reference_id, or both and they disagree.

    Example:
        source = ReferenceSource("./logps", model="./sft-model", dtype="bfloat16")
        trainer = CachedDPOTrainer(model, args=DPOConfig(...), train_dataset=..., processing_class=..., reference=source)
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        model: str | None = None,
        dtype: str = "bfloat16",
        reference_id: str | None = None,
        snapshot: int | None = None,
        lm_head_dtype: str | None = None,
        on_miss: Literal["error"] = "error",
    ) -> None:
        if on_miss != "error":
            raise UsageError(f"on_miss={on_miss!r}: only 'error' is known; a missing value is never filled in")
        if os.fspath(location).startswith(("http://", "https://")) or os.fspath(location).endswith(".parquet"):
            raise UsageError(f"{location}: this version reads stores; give the store's folder or s3://, gs://, az:// URI")
        if model is None and reference_id is None:
            raise UsageError("ReferenceSource needs model= (a folder or hub id) or reference_id=")
        self.store = LogprobStore(location)
        self.model = model
        self._described = describe_reference(model, dtype, lm_head_dtype=lm_head_dtype) if model is not None else None
        if self._described is not None and reference_id not in (None, self._described.reference_id):
            raise UsageError(f"{model} in {dtype} is reference {self._described.reference_id}, not {reference_id}")
        self.reference_id = self._described.reference_id if self._described is not None else str(reference_id)
        self.snapshot_number = snapshot
        self._table: LogprobTable | None = None

    @property
    def table(self) -> LogprobTable:
        """The reference's table; opened at first use.

        Raises ReferenceNotFoundError when nothing was ever scored with this reference.
        """
        if self._table is None:
            if self._described is not None:
                try:
                    self._table = self.store.table_of(self._described)
                except ReferenceNotFoundError as error:
                    raise ReferenceNotFoundError(f"{error}. Score the data: {self.score_command('DATA')}") from error
            else:
                self._table = self.store.table(self.reference_id)
        return self._table

    def snapshot(self) -> Snapshot:
        """The snapshot to join from: the one asked for, else the latest."""
        return self.table.snapshot(self.snapshot_number)

    def scored_dtype(self) -> str:
        """The dtype that the values were computed in, from the store."""
        return self.table.reference.dtype

    def score_command(self, data: str, max_length: int | None = None, truncation_mode: str = "keep_start") -> str:
        """The command line that scores `data` into this source's table."""
        reference = self._described or self.table.reference
        scored_apart = truncation_mode != "keep_start" and max_length is not None  # keep_start is served by whole sequences
        return score_command(
            self.model or reference.name,
            data,
            self.store.uri,
            reference.dtype,
            lm_head_dtype=reference.lm_head_dtype if reference.lm_head_dtype != reference.dtype else None,
            max_length=max_length if scored_apart else None,
            truncation_mode=truncation_mode if scored_apart else "keep_start",
        )
