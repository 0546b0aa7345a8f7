"""Where a trainer's reference values come from: a store, a service or a file, and which reference model of it.

Knows reference ids and what a user writes. Loads no model. Used by every trainer and by `join_reference_logps`.
"""

from __future__ import annotations

import os
from typing import Literal, get_args

from reflogp_store import ReferenceNotFoundError, UsageError, describe_reference
from reflogp_store.commands import score_command
from reflogp_trainer.values import FileValues, ServiceValues, StoreValues, Values

OnMiss = Literal["error", "score", "compute"]


class ReferenceSource:
    """Reference log-probs for trainers.

    Args:
        location: a store (a folder, or s3://…, gs://…, az://…), a running service (http://…), or a file of `reflogp join`
            (….parquet).
        model: the reference model: a folder or hub id. Only its files' digests are needed, which are remembered; weights are
            never loaded. Leave it out where `reference_id` or `reference` is given, or the source is a file.
        dtype: the dtype that it was scored in. Part of the reference id.
        reference_id: names the reference directly, as `reflogp score` and `reflogp store ls` print it.
        snapshot: number of a snapshot; None for the latest when the join begins.
        on_miss: what becomes of rows without values. "error": the run stops before it trains, with the command that scores
            them. "score": the service scores them, into its store, before training begins. "compute": this trainer's own
            model computes them, where it still is the reference: before the first step, or by switching its adapter off.
        lm_head_dtype: "float32" where it was scored with `--lm-head-dtype float32`.
        reference: a service's name for the reference model, instead of `model` or `reference_id`.
        token: a service's bearer token. Default: $REFLOGP_TOKEN.
        score_timeout: seconds that on_miss="score" may take. None: as long as the service needs, unless it is away for ten
            minutes.

    Raises:
        UsageError: arguments that name no reference, or contradict each other.

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
        on_miss: OnMiss = "error",
        *,
        lm_head_dtype: str | None = None,
        reference: str | None = None,
        token: str | None = None,
        score_timeout: float | None = None,
    ) -> None:
        self.location = os.fspath(location)
        self.is_service = self.location.startswith(("http://", "https://"))
        self.is_file = not self.is_service and self.location.endswith(".parquet")
        if on_miss not in get_args(OnMiss):
            raise UsageError(f"on_miss={on_miss!r}: use error, score or compute")
        if on_miss == "score" and not self.is_service:
            raise UsageError(f"on_miss='score' asks a running service, and {self.location} is none: give its http:// address")
        if reference is not None and not self.is_service:
            raise UsageError("reference= is a name that a service knows; for a store give model= or reference_id=")
        if not self.is_file and model is None and reference_id is None and reference is None:
            raise UsageError("ReferenceSource needs model= (a folder or hub id) or reference_id=")
        self.model = model
        self.described = describe_reference(model, dtype, lm_head_dtype=lm_head_dtype) if model is not None else None
        if self.described is not None and reference_id not in (None, self.described.reference_id):
            raise UsageError(f"{model} in {dtype} is reference {self.described.reference_id}, not {reference_id}")
        self.reference_id = self.described.reference_id if self.described is not None else reference_id
        self.reference_name = reference
        self.snapshot = snapshot
        self.on_miss = on_miss
        self.score_timeout = score_timeout
        self.token = token

    def open(self, snapshot: int | None = None) -> Values:
        """The values, as they are now or at a snapshot.

        Args:
            snapshot: number; None for the source's own, else the latest.

        Raises:
            ReferenceNotFoundError: nothing was ever scored with this reference.
            SnapshotNotFoundError, UsageError, StoreError, ServiceError: it cannot be opened.
        """
        number = self.snapshot if snapshot is None else snapshot
        if self.is_service:
            return ServiceValues.open(
                self.location, self.token, self.reference_name or self.reference_id, number, self.described
            )
        if self.is_file:
            return FileValues.open(self.location, self.reference_id, number)
        try:
            return StoreValues.open(self.location, self.described or str(self.reference_id), number)
        except ReferenceNotFoundError as error:
            if self.described is None:
                raise
            command = score_command(str(self.model), "DATA", self.location, self.described.dtype)
            raise ReferenceNotFoundError(f"{error}. Score the data: {command}") from error
