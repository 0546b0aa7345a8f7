"""Provide the mixin that makes TRL's DPO and KTO trainers use stored reference log-probs.

TRL calls its hook `_precompute_ref_logps` with each dataset, after tokenizing and filtering the dataset. The mixin overrides
the hook to add columns with the reference log-probs. The loss reads these columns, and TRL does not remove them when it removes
unused columns. For streams, pairs with images, and trainers without the hook (DPO in TRL 0.28 and older), the columns are added
after the trainer is constructed. The rest of TRL's training code runs unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import IterableDataset

from reflogp.store import UsageError
from reflogp.store.joins import PAIR_COLUMNS, Join
from reflogp.store.windows import TrainerSettings
from reflogp.trainer.audit import ReferenceAudit, watching
from reflogp.trainer.audit.metrics import begin_report
from reflogp.trainer.construction import NoReferenceModel, no_reference_model, refuse_reference_model, unchanged_by_failure
from reflogp.trainer.distributed_join import (
    NothingScored,
    agree_on_dtype,
    agree_on_snapshot,
    all_missing,
    join_on_all_ranks,
    raise_missing,
)
from reflogp.trainer.join import JoinRecord, Misses, join_stream, with_columns
from reflogp.trainer.layouts import Columns, layout_of, reference_columns
from reflogp.trainer.own_model import fill_in
from reflogp.trainer.policy_weights import weights_of
from reflogp.trainer.ranks import on_all_ranks
from reflogp.trainer.source import ReferenceSource
from reflogp.trainer.tolerances import computes_in
from reflogp.trainer.trl_versions import (
    HOOK,
    TESTED,
    default_config,
    is_of_trl,
    refuse_late_unsloth,
    refuse_liger_loss,
    require_hook,
    trl_version,
    with_own_tag,
)
from reflogp.trainer.values import Where
from reflogp.trainer.vision import CollatorWithReference, has_images, may_take_images, refuse_media, require_vision, token_rows

#: Base class of the mixin: `object` at run time, or any trainer for type checkers.
_AnyTrainer: Any = object


class CachedReferenceMixin(_AnyTrainer):
    """Mixin that makes a TRL DPOTrainer or KTOTrainer (or a subclass) use stored reference log-probs.

    List the mixin before the trainer among the base classes. In addition to the trainer's arguments, the constructor takes:

    Args:
        reference: where the reference log-probs are stored.
        policy_starts_at_reference: whether the policy starts from the reference's weights. If True, the policy's log-probs of
            the first batch are compared with the reference's before the first step. Pass False if the policy starts from
            different weights, for example from a later checkpoint.
        step_zero_tolerance: maximum of |policy - reference| / √tokens for each completion, where policy and reference are the
            sums of the completion's log-probs in nats. If None, the tolerance depends on the dtypes and on whether the model is
            a mixture of experts (see reflogp.trainer.tolerances), and the policy and the reference must have the same dtype. If
            a `ReferenceAudit` with a tolerance is passed as `audit`, the tolerance of the `ReferenceAudit` is used instead.
        audit: a `ReferenceAudit`, or False for no audit. If None, a `ReferenceAudit` is created with `step_zero_tolerance` and
            otherwise default settings.

    Raises:
        MissingLogpsError, UnusableLogpsError, BroughtColumnsError: see `join_reference_logps`. These errors are raised before
            training begins or, for the rows of a stream, while the stream is read.
        StoreNotFoundError, ReferenceNotFoundError: the store does not exist, or has no values of the reference model at all.
        StepZeroError, AuditError: raised during training; see ReferenceAudit.
        RankFailedError: another process of a distributed run raised one of these errors.
        UsageError: an argument is incompatible with stored reference log-probs.
        ImportError: the installed version of TRL is not supported, or unsloth was imported too late.

    Attributes:
        joins: dict from each dataset's name ("train", "eval", …) to the JoinRecord of its join. If the run has an audit, the
            records are also in `output_dir/reflogp_audit.json`.
        audit: the audit of the run, or None if there is no audit. Its attribute `step_zero` is the result of the comparison
            before the first step.

    Examples:
        >>> from trl import DPOTrainer
        >>> from reflogp.trainer import CachedReferenceMixin
        >>> class MyDPOTrainer(DPOTrainer): ...  # yours
        >>> class MyCachedTrainer(CachedReferenceMixin, MyDPOTrainer): ...
    """

    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    _signature_columns: list[str] | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._tag_names = with_own_tag(cls)

    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        args: Any = None,
        *more: Any,
        reference: ReferenceSource | None = None,
        policy_starts_at_reference: bool = True,
        step_zero_tolerance: float | None = None,
        audit: ReferenceAudit | bool | None = None,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        if not isinstance(reference, ReferenceSource):
            raise UsageError(
                f'{name} needs to know where the reference log-probs are: pass reference=ReferenceSource("./logps", '
                'model="./sft-model") with the store and the model that were passed to `reflogp score`'
            )
        refuse_reference_model(name, ref_model)
        refuse_late_unsloth(type(self))
        require_hook(type(self))
        args = default_config(type(self), model) if args is None else args
        if getattr(args, "sync_ref_model", False):
            raise UsageError(
                "sync_ref_model=True changes the reference during training, so stored log-probs would be stale: set it to False"
            )
        refuse_liger_loss(args)
        self.reference = reference
        self.policy_starts_at_reference = policy_starts_at_reference
        self.step_zero_tolerance = step_zero_tolerance
        self.joins: dict[str, JoinRecord] = {}
        self._misses: list[Misses] = []
        # Names of the datasets that a call of `evaluate` has yet to join. None while the constructor runs, because the
        # constructor does not know the names of the datasets that it will join.
        self._joins_to_come: set[str] | None = None
        self._is_audited = audit is not False
        datasets = [*more, *kwargs.values()]
        streams = any(isinstance(dataset, IterableDataset) for given in datasets for dataset in _each(given))
        named = list(_named_datasets(more, kwargs))
        takes_images = may_take_images(model, kwargs.get("processing_class"))
        trained_on = [dataset for dataset, called in named if called == "train"] or [dataset for dataset, _ in named]
        # TRL looks for images in the same datasets.
        self._has_images = takes_images and any(has_images(dataset) for dataset in trained_on)
        if self._has_images:
            require_vision(type(self), [dataset for dataset, _ in named], reference)
        for dataset, called in named:
            refuse_media(dataset, called, raw=True, images=self._has_images)
        joins_later = streams or self._is_legacy or self._has_images
        begin_report(args.output_dir, args.process_index)
        args = copy.copy(args)
        if isinstance(getattr(args, "gradient_checkpointing_kwargs", None), dict):
            args.gradient_checkpointing_kwargs = dict(args.gradient_checkpointing_kwargs)  # TRL changes this dict
        # With this setting, TRL reads the reference columns and keeps no reference model. TRL rejects the setting for streams
        # and for images.
        args.precompute_ref_log_probs = not streams and not self._has_images
        with unchanged_by_failure(model, *datasets):
            with no_reference_model(type(self), policy_is_path=isinstance(model, str)):
                super().__init__(model, None, args, *more, **kwargs)
            if joins_later:
                self._join_after_construction()
            self._require_all()
            if "train" not in self.joins:
                raise ImportError(
                    f"TRL {trl_version()} has the hook `{HOOK}` but did not call it for the training dataset: {TESTED}"
                )
        self._joins_to_come = set()
        self.ref_model = NoReferenceModel()
        if self._is_audited or reference.on_miss == "compute":
            weights_of(self)
        self.audit = watching(self, audit, step_zero_tolerance)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Override TRL's hook: return the given dataset, which TRL has tokenized and filtered, with reference columns added."""
        return self._join(dataset, name)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Keep the reference columns in float32.

        Under DeepSpeed, transformers casts every floating-point input to the model's dtype. In bfloat16, a sum of -72.31 would
        become -72.5.
        """
        columns = {name: inputs[name] for name in reference_columns(inputs)}
        prepared = super()._prepare_inputs({name: value for name, value in inputs.items() if name not in columns})
        return {**prepared, **{name: values.to(self.args.device) for name, values in columns.items()}}

    def _join_after_construction(self) -> None:
        """Join all datasets after the trainer is constructed, because TRL does not call the hook: the trainer has no hook, or
        its datasets include streams or pairs with images."""
        trained_on, evaluated_on = self.train_dataset, self.eval_dataset
        self.train_dataset = self._join(trained_on, "train")
        if isinstance(evaluated_on, dict):
            self.eval_dataset = {name: self._join(dataset, name) for name, dataset in evaluated_on.items()}
        elif evaluated_on is not None:
            self.eval_dataset = self._join(evaluated_on, "eval")
        if self._has_images:
            self.data_collator = CollatorWithReference(self.data_collator)
        self.args.precompute_ref_log_probs = True
        done = ("_precomputed_train_ref_log_probs", "_precomputed_eval_ref_log_probs")
        for flag in ("precompute_ref_logps", "precompute_ref_log_probs", *done):
            if hasattr(self, flag):
                setattr(self, flag, True)

    def _join(self, dataset: Any, name: str) -> Any:
        """Return the dataset with reference columns; every process gets the same values from the same snapshot.

        If rows have no values, the dataset is returned unchanged. `_require_all` raises an error about these rows after all
        datasets have been looked up, so that a single error names the missing rows of every dataset.
        """
        refuse_media(dataset, name, raw=False, images=self._has_images)
        settings = self._reference_settings()
        policy = self.accelerator.unwrap_model(self.model)
        self.reference = agree_on_dtype(self.reference, computes_in(policy, self.accelerator))
        where = self._where = agree_on_snapshot(self.reference)
        if isinstance(dataset, IterableDataset):
            joined = self._join_stream(dataset, name, where, settings)
        elif isinstance(where, NothingScored):
            joined, rows = dataset, self._rows_to_key(dataset, name)
            misses = all_missing(rows, name, layout_of(rows.column_names, self), settings)
            if misses is None:
                raise where.error
            self._misses.append(replace(misses, has_images=self._has_images))
        else:
            joined = self._join_rows(dataset, name, where, settings)
        if self._joins_to_come is not None:
            self._joins_to_come.discard(name)
            if not self._joins_to_come:
                self._require_all()
        return joined

    def _join_rows(self, dataset: Any, name: str, where: Where, settings: TrainerSettings) -> Any:
        rows = self._rows_to_key(dataset, name)
        layout = layout_of(rows.column_names, self)
        found = join_on_all_ranks(rows, name, layout, self.reference, where, settings, self._sums_as_the_loss_reads_them)
        columns, misses = found.columns, found.misses
        if misses is not None and self.reference.on_miss == "compute":
            columns = {column: values.copy() for column, values in columns.items()}
            why = fill_in(self, dataset, misses.rows, columns, list(found.asked.needed.values()), where.reference_dtype)
            misses = replace(misses, why=why) if why else None
        if misses is not None:
            self._misses.append(replace(misses, has_images=self._has_images))
            return dataset
        tokens = list(found.asked.needed.values())
        joined, brought = on_all_ranks(f"joining {name}", lambda: with_columns(dataset, columns, tokens, where.reference_dtype))
        computed = 0 if found.misses is None else len(found.misses.rows)
        counts = {"rows": len(joined), "scored": found.scored, "computed": computed}
        self._record(name, JoinRecord(found.where, settings, brought=brought, **counts))
        return joined

    def _rows_to_key(self, dataset: Any, name: str) -> Any:
        """Return a dataset's tokenized rows. TRL has already tokenized all datasets except those with images, which are
        tokenized here."""
        return token_rows(dataset, self, name) if self._has_images else dataset

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self._has_images and self._signature_columns is not None:
            self._signature_columns = list(dict.fromkeys([*self._signature_columns, *PAIR_COLUMNS.values()]))

    def _join_stream(self, dataset: IterableDataset, name: str, where: Where | NothingScored, settings: TrainerSettings) -> Any:
        if self.reference.on_miss == "compute":
            raise UsageError("on_miss='compute' reads rows twice, but a stream can be read only once: use 'error' or 'score'")
        if isinstance(where, NothingScored):
            raise self.reference.nothing_scored(where.error, "DATA", settings, self._dtype_to_score)
        self._record(name, JoinRecord(where, settings))
        opened = on_all_ranks("opening the reference", lambda: self.reference.open(where.snapshot))
        return join_stream(dataset, self.reference, opened, settings, self, name)

    def _require_all(self) -> None:
        """Raise an error if a dataset that was looked up since the last call of this method has rows without values."""
        misses, self._misses = self._misses, []
        if misses:
            folder = Path(self.args.output_dir)
            raise_missing(misses, self.reference, self._where, self._reference_settings(), folder, self._dtype_to_score)

    @property
    def _dtype_to_score(self) -> str | None:
        """Return the dtype in which the reference log-probs must be computed: the policy's dtype, or None if any dtype is
        accepted.

        Any dtype is accepted if `step_zero_tolerance` was given or the audit is off.
        """
        if self.step_zero_tolerance is not None or not self._is_audited:
            return None
        return computes_in(self.accelerator.unwrap_model(self.model), self.accelerator)

    def _reference_settings(self) -> TrainerSettings:
        """Return the settings in the run's config that affect the reference's sums.

        ld_alpha is left out for TRL 0.28 and older, which do not apply it to the reference.
        """
        ld_alpha = None if self._is_legacy else getattr(self.args, "ld_alpha", None)
        return TrainerSettings(self.args.max_length, getattr(self.args, "truncation_mode", "keep_start"), ld_alpha)

    def _sums_as_the_loss_reads_them(self, join: Join) -> Columns:
        """Return a join's sums in the form that the trainer's loss reads.

        For the IPO loss, TRL 0.28 and older expect means over tokens, so the sums are divided by the number of tokens.
        """
        if not self._is_legacy or "ipo" not in self.args.loss_type:
            return join.logps
        return {
            column: (values / np.maximum(tokens, 1)).astype(np.float32)
            for (column, values), tokens in zip(join.logps.items(), join.tokens.values(), strict=True)
        }

    @property
    def _is_legacy(self) -> bool:
        """Return True if TRL is older than 0.29. These versions have no hook and do not apply ld_alpha to the reference."""
        return not hasattr(super(), HOOK)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Join the given dataset with its stored values, then evaluate on it as TRL does.

        TRL 1.6 and older do not tokenize a dataset that is passed to `evaluate`. With these versions, this method tokenizes the
        dataset before the join.
        """
        given = eval_dataset is not None and not isinstance(eval_dataset, str)
        self._joins_to_come = set(eval_dataset) if isinstance(eval_dataset, dict) else {"eval"} if given else set()
        try:
            return self._evaluate_joined(eval_dataset, given, *args, **kwargs)
        finally:
            self._joins_to_come, self._misses = set(), []

    def _evaluate_joined(self, eval_dataset: Any, given: bool, *args: Any, **kwargs: Any) -> Any:
        prepare = getattr(self, "_prepare_dataset", None)
        if given and self._has_images:
            many = isinstance(eval_dataset, dict)
            each = eval_dataset if many else {"eval": eval_dataset}
            joined = {name: self._join(dataset, name) for name, dataset in each.items()}
            eval_dataset = joined if many else joined["eval"]
        elif given and prepare is not None and not self._trl_prepares_for_evaluate():
            if isinstance(eval_dataset, dict):
                eval_dataset = {
                    name: self._join(prepare(dataset, self.processing_class, self.args, name), name)
                    for name, dataset in eval_dataset.items()
                }
            elif "prompt_ids" not in eval_dataset.column_names and "prompt_input_ids" not in eval_dataset.column_names:
                eval_dataset = self._join(prepare(eval_dataset, self.processing_class, self.args, "eval"), "eval")
        return super().evaluate(eval_dataset, *args, **kwargs)

    @classmethod
    def _trl_prepares_for_evaluate(cls) -> bool:
        return any("evaluate" in parent.__dict__ for parent in cls.__mro__ if is_of_trl(parent))

    def _record(self, name: str, record: JoinRecord) -> None:
        self.joins[name] = record
        audit: ReferenceAudit | None = getattr(self, "audit", None)
        if audit is not None:
            audit.write()


def _named_datasets(more: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield each argument of a trainer, even if it is not a dataset, with the name that messages use for it. If an argument is
    a dictionary, yield each of its values with the value's key."""
    for name, given in (*(("given", value) for value in more), *kwargs.items()):
        name = name.removesuffix("_dataset")
        if isinstance(given, dict):
            yield from ((dataset, key) for key, dataset in given.items())
        else:
            yield given, name


def _each(datasets: Any) -> list[Any]:
    return list(datasets.values()) if isinstance(datasets, dict) else [datasets]
