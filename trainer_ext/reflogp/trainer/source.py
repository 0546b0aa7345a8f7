"""Describe where a trainer gets its reference values (from a store, a service or a file), and which reference model computed
them.

This module loads no model.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import Literal, get_args

from reflogp.store import (
    Reference,
    ReferenceNotFoundError,
    ReflogpError,
    Store,
    StoreNotFoundError,
    UsageError,
    describe_reference,
)
from reflogp.store.commands import ScoreArguments
from reflogp.store.reference import AUTO, describe_all_numerics
from reflogp.store.store import in_dtype, several_held
from reflogp.store.texts import short_repr
from reflogp.store.windows import TrainerSettings
from reflogp.trainer.values import FileValues, ServiceValues, StoreValues, Values, command_to_score

OnMiss = Literal["error", "score", "compute"]


class ReferenceSource:
    """Where trainers get reference log-probs, and which reference model computed them.

    Args:
        location: a store (a folder, or s3://…, gs://…, az://…), a running service (http://…), or a file that `reflogp join` or
            a service's job wrote (….parquet).
        model: folder or hub id of the reference model. The model is not loaded, but identified by digests of its files. The
            digests are cached. `model` can be omitted if `reference_id` or `reference` is given, or if the source is a file.
        dtype: dtype in which the reference log-probs were computed, spelled as in `reflogp score --dtype`. The reference id
            depends on the dtype. "auto" selects the dtype of `reference_id` if an id is given. Otherwise, the choice depends on
            the dtypes in which the location has log-probs of the model. If there is only one such dtype, "auto" selects it. If
            there are several, "auto" selects the run's dtype (the dtype in which the run computes), which must be one of them.
            If there are none, "auto" also selects the run's dtype. CachedDPOTrainer, CachedKTOTrainer and the trainers for
            axolotl, LLaMA-Factory and ms-swift determine the run's dtype from the policy and its mixed precision. Everything
            else that uses a source, such as `open`, assumes that the run computes in bfloat16. If `model` is omitted, `dtype`
            and `lm_head_dtype` are ignored.
        reference_id: the reference's id, as printed by `reflogp score` and `reflogp store ls`.
        snapshot: number of the snapshot to read, or None for the snapshot that is the latest when the trainer starts to look
            up its dataset's values.
        on_miss: what to do about rows without values. With "error", the run stops before training, and the error contains the
            command that scores the rows (or, for a file, says to create the file again). With "score", the service scores the
            rows and stores their values before training begins. With "compute", the trainer's own model computes the values,
            with any adapter turned off. Without the adapter, the model must have the reference model's weights. "compute" works
            only with trainers that are based on `CachedReferenceMixin`, and not with streams. For a stream, "error" and "score"
            take effect when the rows are read, during training.
        lm_head_dtype: "float32" if the reference log-probs were computed with `--lm-head-dtype float32`.
        reference: name of the reference model in a service. It can be passed instead of `model` or `reference_id`.
        token: bearer token for a service; $REFLOGP_TOKEN by default.
        score_timeout: maximum number of seconds to wait for one scoring job, or None for no limit. Either way, an error is
            raised if the service does not respond for ten minutes. With on_miss="score", at most one job is submitted for each
            dataset (for a stream, for each batch of rows).

    Raises:
        UsageError: the arguments name no reference, name a model that does not exist, or contradict each other.
        CheckpointError, FileChangedError: the reference id of `model` cannot be computed; see `describe_reference`.

    Examples:
        >>> from reflogp.trainer import ReferenceSource
        >>> ReferenceSource("./logps", model="./sft-model", dtype="bfloat16")
        ReferenceSource(sft-model in bfloat16, reference ..., ./logps)
        >>> ReferenceSource("./logps", model="./sft-model")  # in the dtype that the store has
        ReferenceSource(sft-model, ./logps)
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        model: str | None = None,
        dtype: str = AUTO,
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
            raise UsageError(f"on_miss={on_miss!r} is not allowed: use 'error', 'score' or 'compute'")
        if on_miss == "score" and not self.is_service:
            raise UsageError(
                f"on_miss='score' needs a running service, but {self.location} is not a service: pass an http:// address"
            )
        if reference is not None and not self.is_service:
            raise UsageError(
                "reference= is the name of a model in a service; for a store or a file, pass model= or reference_id= instead"
            )
        if not self.is_file and model is None and reference_id is None and reference is None:
            raise UsageError("ReferenceSource needs model= (a folder or hub id), reference_id= or, for a service, reference=")
        self.model = model
        self.lm_head_dtype = lm_head_dtype
        self.chooses_dtype = model is not None and dtype == AUTO and reference_id is None
        self.described = _described(model, dtype, lm_head_dtype, reference_id) if model is not None else None
        self.reference_id = self.described.reference_id if self.described is not None else reference_id
        self.reference_name = reference
        self.snapshot = snapshot
        self.on_miss = on_miss
        self.score_timeout = score_timeout
        self.token = token

    def __repr__(self) -> str:
        parts: list[str] = []
        if self.described is not None:
            parts.append(self.described.name + ("" if self.chooses_dtype else f" in {self.described.dtype}"))
        if (known := self.reference_id or self.reference_name) and not self.chooses_dtype:
            parts.append(f"reference {known}")
        at = f"snapshot {self.snapshot} of " if self.snapshot is not None else ""
        return short_repr("ReferenceSource", ", ".join([*parts, f"{at}{self.location}"]))

    def chosen_for(self, dtype: str) -> Reference:
        """Return the reference that a source with dtype="auto" selects for a run that computes in `dtype`.

        Raises UsageError if the location has log-probs of the model in several dtypes but `dtype` is not one of them.
        """
        assert self.model is not None
        possible = describe_all_numerics(self.model, lm_head_dtype=self.lm_head_dtype)
        if self.is_service:
            held = ServiceValues.held(self.location, self.token, self.reference_name, possible)
        elif self.is_file:
            of_file = FileValues.open(self.location, None, None).where.reference_id
            held = [reference for reference in possible if reference.reference_id == of_file]
        else:
            held = Store(self.location).held(possible)
        if len(held) == 1:
            return held[0]
        of_run = in_dtype(possible, dtype, self.lm_head_dtype)
        if held and of_run not in held:
            raise several_held(self.location, self.model, held)
        return of_run

    def of(self, reference: Reference) -> ReferenceSource:
        """Return a copy of this source that looks up the values of `reference` (the result of `chosen_for`)."""
        found = copy.copy(self)
        found.described, found.reference_id, found.chooses_dtype = reference, reference.reference_id, False
        return found

    def open(self, snapshot: int | None = None) -> Values:
        """Open the location, and return its values at one snapshot.

        Args:
            snapshot: number of the snapshot. If None, use the source's `snapshot` or, if that is None too, the latest snapshot.

        Raises:
            ReferenceNotFoundError: the store has no values of the reference, or the service does not serve the reference.
            SnapshotNotFoundError, UsageError, StoreError, ServiceError: the source cannot be opened.
        """
        if self.chooses_dtype:
            return self.of(self.chosen_for("bfloat16")).open(snapshot)
        number = self.snapshot if snapshot is None else snapshot
        if self.is_service:
            return ServiceValues.open(
                self.location, self.token, self.reference_name or self.reference_id, number, self.described
            )
        if self.is_file:
            return FileValues.open(self.location, self.reference_id, number)
        try:
            return StoreValues.open(self.location, self.described or str(self.reference_id), number)
        except (ReferenceNotFoundError, StoreNotFoundError) as error:
            if self.described is None:
                raise
            raise self.nothing_scored(error, "DATA") from error

    @property
    def is_store(self) -> bool:
        """Return True if this source is a store (a folder or s3://…), rather than a service or a Parquet file."""
        return not self.is_service and not self.is_file

    def nothing_scored(
        self, error: ReflogpError, data: str, settings: TrainerSettings | None = None, dtype: str | None = None
    ) -> ReflogpError:
        """Return an error whose message says that a store has no values of this reference.

        The message also contains the complete command that scores the data.

        Args:
            error: the error that the store or `open` raised.
            data: path of the dataset, for use in the command.
            settings: the trainer's settings, or None for the defaults.
            dtype: dtype in which the run computes, or None for the source's dtype.
        """
        assert self.described is not None
        command = self.score_command(dtype or self.described.dtype, data, settings)
        words = str(error).partition(". Score the data: ")[0]
        other = f', and pass dtype="{dtype}" to ReferenceSource, because the policy computes in this dtype'
        hint = other if dtype not in (None, self.described.dtype) else ""
        return type(error)(f"{words}. Score the data: {command}{hint}")

    def score_command(self, dtype: str, data: str = "DATA", settings: TrainerSettings | None = None) -> str:
        """Return the command that scores data in the given dtype. If this source was created without `model`, the command
        contains the placeholder MODEL."""
        if self.described is None:
            return ScoreArguments("MODEL", data, self.location, dtype).command()
        reference = replace(self.described, dtype=dtype)
        if self.described.lm_head_dtype in (self.described.dtype, dtype):
            reference = replace(reference, lm_head_dtype=dtype)
        return command_to_score(str(self.model), reference, data, self.location, settings or TrainerSettings())

    def advice_for_dtype(self, dtype: str) -> str:
        """Return advice on how to get this reference's values in the given dtype, as a sentence without a full stop."""
        if self.is_service:
            name = self.reference_name or "NAME"
            setting = f"the service's settings ([references.{name}])"
            return f'Set dtype = "{dtype}" for the reference in {setting} and score the data again'
        if self.is_file:
            command = ScoreArguments(str(self.model or "MODEL"), "DATA", "STORE", dtype).command()
            return f"Score the data in {dtype} (`{command}`) and run `reflogp join` again with --dtype {dtype}"
        named = f'dtype="{dtype}"' if self.model is not None else "the new reference_id"
        return f"Score the data in {dtype} (`{self.score_command(dtype)}`) and pass {named} to ReferenceSource"


def _described(model: str, dtype: str, lm_head_dtype: str | None, reference_id: str | None) -> Reference:
    """Return the Reference for a model that computes log-probs in `dtype`. If `dtype` is "auto", use the dtype of
    `reference_id`, or bfloat16 if no id is given."""
    if dtype == AUTO and reference_id is not None:
        possible = describe_all_numerics(model, lm_head_dtype=lm_head_dtype)
        found = next((reference for reference in possible if reference.reference_id == reference_id), None)
        if found is None:
            raise UsageError(
                f"reference_id={reference_id} is not an id of the model {model} in any dtype: omit model= or reference_id="
            )
        return found
    found = describe_reference(model, "bfloat16" if dtype == AUTO else dtype, lm_head_dtype=lm_head_dtype)
    if reference_id not in (None, found.reference_id):
        raise UsageError(
            f"the reference id of {model} in {dtype} is {found.reference_id}, but reference_id={reference_id} was passed: "
            "omit model= or reference_id="
        )
    return found
