"""Train with TRL's DPO and KTO trainers on stored reference log-probs instead of a reference model.

TRL's constructor tokenizes and filters the datasets. The mixin then adds columns with the reference log-probs, which TRL's
collators and losses read. It overrides TRL's hook `_precompute_ref_logps`, so TRL's `evaluate` adds them to new datasets. The
rest of TRL runs unchanged.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
import trl
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from datasets.fingerprint import Hasher
from packaging.version import Version
from trl import DPOTrainer, KTOTrainer

from reflogp.store import UsageError
from reflogp.store.joins import KTO_COLUMNS, PAIR_COLUMNS, Join
from reflogp.store.windows import TrainerSettings
from reflogp.trainer.errors import ReferenceLogpsError
from reflogp.trainer.gate import GateMixin, computes_in, warn_of_other_dtype
from reflogp.trainer.join import (
    JoinRecord,
    Misses,
    join_stream,
    look_up,
    misses_of,
    missing_error,
    reference_columns,
    with_columns,
)
from reflogp.trainer.ranks import on_all_ranks
from reflogp.trainer.reference import Reference, Values
from reflogp.trainer.vision import CollatorWithReference, token_rows

if Version(trl.__version__) < Version("1.8.0.dev0"):
    raise ImportError(f"reflogp's trainers need TRL 1.8 or newer, but {trl.__version__} is installed: pip install -U trl")


class NoReferenceModel:
    """Takes the place of TRL's reference model. If a trainer's ref_model is None, TRL's `evaluate` rejects new datasets after
    the first step, because TRL would compute the reference log-probs with the trained policy."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("this run has no reference model, because it uses stored reference log-probs")

    def __bool__(self) -> bool:
        return False


class CachedReferenceMixin(GateMixin):
    """Mixin that makes a TRL DPOTrainer or KTOTrainer (or a subclass) use stored reference log-probs.

    List the mixin before the trainer among the base classes. In addition to the trainer's arguments, the constructor takes:

    Args:
        reference: where the reference log-probs are stored: a store, a service's URL or a Parquet file from `reflogp join`; or
            a `Reference`, which also names the model, its dtype, and what to do about rows without values.
        policy_starts_at_reference: whether the policy starts from the reference's weights. If True, the policy's log-probs of
            the first batch are compared with the reference's before the first step. Pass False if the policy starts from
            different weights, for example from a later checkpoint.

    Raises:
        MissingLogpsError, UnusableLogpsError: rows of a dataset have no values, or values that are not finite. The constructor
            and `evaluate` raise these errors; for the rows of a stream, they are raised while the stream is read.
        StepZeroError: in training, before the first step, the policy's log-probs differ from the reference's by more than
            rounding.
        RankFailedError: another process of a distributed run raised one of these errors.
        UsageError: an argument is incompatible with stored reference log-probs.

    Attributes:
        joins: dict from each dataset's name ("train", "eval", …) to the JoinRecord of its join.
        step_zero: the StepZero of the comparison before the first step; None before it, and for runs without one. Both are
            also in `output_dir/reflogp.json`, which is written when training begins.

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

    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        args: Any = None,
        *more: Any,
        reference: Reference | str | None = None,
        policy_starts_at_reference: bool = True,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        if ref_model is not None:
            raise UsageError(f"{name} needs no reference model, because it reads stored log-probs: remove ref_model")
        self._read_from(Reference.of(reference, name), policy_starts_at_reference)
        args, computes = copy.copy(args), self.reference.on_miss == "compute"
        if getattr(args, "sync_ref_model", False):
            raise UsageError(
                "sync_ref_model=True changes the reference during training, so stored log-probs would be stale: set it to False"
            )
        if args is not None:
            args.precompute_ref_log_probs = computes  # TRL's constructor then calls the hook, with a model that can compute
        elif computes:
            raise UsageError(f"on_miss='compute' needs a config: pass args= to {name}")
        with nullcontext() if computes else no_reference_model(type(self), policies=int(isinstance(model, str))):
            super().__init__(model, None, args, *more, **kwargs)
        self._use_columns(joins=not computes)

    def _read_from(self, reference: Reference, policy_starts_at_reference: bool) -> None:
        self.reference = reference
        self.joins: dict[str, JoinRecord] = {}
        self.starts_at_reference = policy_starts_at_reference
        self._values: Values | None = None
        self._misses: list[Misses] = []
        self._is_built = False
        if reference.on_miss == "compute" and not policy_starts_at_reference:
            raise UsageError("on_miss='compute' computes values with the policy: it must start from the reference's weights")

    def _joined(self, dataset: Any, name: str) -> Any:
        if isinstance(dataset, dict):
            return {name: self._joined(part, name) for name, part in dataset.items()}
        if dataset is None or (self._is_built and reference_columns(dataset.column_names or ())):
            return dataset
        return self._precompute_ref_logps(dataset, name, 0)

    def _use_columns(self, joins: bool = True) -> None:
        """Join the datasets of a constructed trainer, and make TRL's loss read the reference columns. Raise one error about
        all rows without values."""
        if hasattr(self, "liger_loss"):
            raise UsageError("this version of TRL computes Liger's loss with a reference model: set use_liger_kernel to False")
        if joins:
            self.train_dataset = self._joined(self.train_dataset, "train")
            self.eval_dataset = self._joined(self.eval_dataset, "eval")
        on_all_ranks("looking up the datasets", self._require_all)
        if self._is_vision_dataset and not isinstance(self.data_collator, CollatorWithReference):
            self.data_collator = CollatorWithReference(self.data_collator)
        self.args.precompute_ref_log_probs = self.precompute_ref_logps = True
        self.ref_model: Any = NoReferenceModel()
        self._is_built = True

    def _require_all(self) -> None:
        misses, self._misses = self._misses, []
        if misses:
            assert self._values is not None
            raise missing_error(misses, self._values, self._settings(), Path(self.args.output_dir))

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Override TRL's hook: return the given dataset, which TRL has tokenized and filtered, with reference columns added."""
        if self._values is None:
            self._values = self._open()
        values, settings = self._values, self._settings()
        key = name if self._is_built or name not in self.joins else f"eval_{name}"
        rows = token_rows(dataset, self, name) if self._is_vision_dataset else dataset
        if isinstance(dataset, IterableDataset):
            if self.reference.on_miss == "compute":
                raise UsageError("on_miss='compute' reads rows twice, but a stream is read once: use 'error' or 'score'")
            self.joins[key] = JoinRecord(values.where, settings)
            return join_stream(dataset, self.reference, values, settings, name, Path(self.args.output_dir))
        self._values, join, scored = on_all_ranks(
            f"looking up {name}", lambda: look_up(rows, self.reference, values, settings, name)
        )
        computed, is_reference = 0, is_peft_model(self.model) or not self.state.global_step
        if self.reference.on_miss == "compute" and is_reference:
            computed = self._compute_missing(dataset, name, batch_size, join)
        elif join.missing.any():
            self._misses.append(misses_of(rows, name, join, with_tokens=not self._is_vision_dataset))
        if self._is_built:
            on_all_ranks(f"looking up {name}", self._require_all)
        if self._misses:
            return dataset
        self.joins[key] = JoinRecord(self._values.where, settings, len(dataset), scored, computed)
        return with_columns(dataset, join.logps)

    def _open(self) -> Values:
        policy = self.accelerator.unwrap_model(self.model)
        dtype = computes_in(policy, self.accelerator)
        values = on_all_ranks("opening the reference", lambda: self.reference.open(checkpoint_of(policy), dtype))
        there = values.where.reference_dtype
        if there != dtype and not self._is_built:
            warn_of_other_dtype(there, dtype, values.command("DATA", self._settings(), dtype))
        return values

    def _compute_missing(self, dataset: Dataset, name: str, batch_size: int, join: Join) -> int:
        """Have TRL compute the values that a join did not find, on all processes together, and write them into the join."""
        missing = np.flatnonzero(join.missing)
        if not len(missing):
            return 0
        policy = self.accelerator.unwrap_model(self.model)
        rows = dataset.select(missing)
        # TRL names its cache file by this fingerprint, which may not depend on the settings (with keep_end, for example).
        rows._fingerprint = Hasher.hash((rows._fingerprint, self._settings(), computes_in(policy, self.accelerator)))
        stand_in: Any = self.ref_model
        if self._is_built:
            self.ref_model = None  # TRL then turns the adapter off
        computed = super()._precompute_ref_logps(rows, name, batch_size).with_format("numpy")
        self.ref_model = stand_in
        for column, values in join.logps.items():
            values[missing] = computed[column][:]
        return len(missing)

    def _settings(self) -> TrainerSettings:
        """Return the settings in the run's config that affect the reference's sums."""
        args = self.args
        return TrainerSettings(args.max_length, getattr(args, "truncation_mode", "keep_start"), getattr(args, "ld_alpha", None))

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self._is_vision_dataset and self._signature_columns is not None:
            self._signature_columns = list(dict.fromkeys([*self._signature_columns, *PAIR_COLUMNS.values()]))

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Keep the reference columns in float32.

        Under DeepSpeed, transformers casts every floating-point input to the model's dtype. In bfloat16, a sum of -72.31 would
        become -72.5.
        """
        columns = {name: inputs[name] for name in reference_columns(inputs)}
        prepared = super()._prepare_inputs({name: value for name, value in inputs.items() if name not in columns})
        return {**prepared, **{name: values.to(self.args.device) for name, values in columns.items()}}

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Before the first step, check the first batch, and write `reflogp.json`."""
        if not reference_columns(inputs):
            raise ReferenceLogpsError(
                f"the batch has no reference columns, but only {', '.join(inputs)}: {type(self.data_collator).__name__} "
                "dropped the columns that were joined to the dataset"
            )
        self.check_first_batch(lambda: self._sums(model, self._prepare_inputs(inputs)))
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    def _sums(self, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the sums of the policy's log-probs (with any adapter turned off), the joined sums, and the numbers of tokens,
        each of shape (sequences,)."""
        stand_in: Any = self.ref_model
        was_training = model.training
        self.ref_model = None  # with a PEFT model, TRL then turns the adapter off, or uses the one named "ref"
        model.eval()
        if getattr(self.accelerator, "is_fsdp2", False) and is_peft_model(self.accelerator.unwrap_model(model)):
            # FSDP2 notes the dtype of trainable parameters at its first pass. While an adapter is off, PEFT trains none.
            with torch.no_grad():
                model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        try:
            takes_model = "model" in inspect.signature(self.compute_ref_log_probs).parameters  # since TRL 1.9
            computed = self.compute_ref_log_probs(*([model] if takes_model else []), batch)
        finally:
            model.train(was_training)
            self.ref_model = stand_in
        columns = (PAIR_COLUMNS if "ref_chosen_logps" in batch else KTO_COLUMNS).values()
        masks = [batch[name] for name in ("completion_mask", "KL_completion_mask") if name in batch]
        return (
            torch.cat([values for values in computed if values is not None]),
            torch.cat([batch[name] for name in columns if name in batch]),
            torch.cat([mask[:, 1:].sum(1) for mask in masks]),
        )

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Join the given dataset with its stored values, then evaluate on it as TRL does."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            self._values = None  # read the latest snapshot
            if self._is_vision_dataset:  # for which TRL does not call the hook
                eval_dataset = self._joined(eval_dataset, "eval")
        return super().evaluate(eval_dataset, *args, **kwargs)


class CachedDPOTrainer(CachedReferenceMixin, DPOTrainer):
    """TRL's DPO trainer without a reference model: the reference log-probs come from a store, a service or a file.

    The constructor takes the arguments of `CachedReferenceMixin` and of TRL's trainer.

    Examples:
        >>> from datasets import load_dataset
        >>> from trl import DPOConfig
        >>> from reflogp.trainer import CachedDPOTrainer
        >>> trainer = CachedDPOTrainer(
        ...     "./sft-model",
        ...     args=DPOConfig(output_dir="run", max_length=1024, beta=0.1),
        ...     train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
        ...     reference="./logps",
        ... )
        >>> trainer.train()
        TrainOutput(global_step=...)
        >>> trainer.step_zero.passed
        True
    """


class CachedKTOTrainer(CachedReferenceMixin, KTOTrainer):
    """TRL's KTO trainer without a reference model, constructed like `CachedDPOTrainer`."""


def patch(trainer: Any, reference: Reference | str, policy_starts_at_reference: bool = True) -> Any:
    """Make a DPO or KTO trainer that something else constructed use stored reference log-probs.

    Any reference model that the trainer holds is dropped. Call this function before training.

    Args:
        trainer: an instance of TRL's DPOTrainer or KTOTrainer, or of a subclass.
        reference: where the reference log-probs are stored; see `CachedReferenceMixin`. on_miss="compute" is not supported.
        policy_starts_at_reference: see `CachedReferenceMixin`.

    Returns:
        The same object, whose class is now a subclass of `CachedReferenceMixin`.

    Raises the errors of `CachedReferenceMixin`; the trainer then has its own class again.

    Examples:
        >>> from datasets import load_dataset
        >>> from trl import DPOConfig, DPOTrainer
        >>> from reflogp.trainer import patch
        >>> pairs = load_dataset("json", data_files="pairs.jsonl", split="train")
        >>> trainer = DPOTrainer("./sft-model", args=DPOConfig(output_dir="run", max_length=1024), train_dataset=pairs)
        >>> trainer = patch(trainer, reference="./logps")
        >>> trainer.train()
        TrainOutput(global_step=...)
    """
    source, kind = Reference.of(reference, "patch"), type(trainer)
    if not hasattr(trainer, "_precompute_ref_logps"):
        raise UsageError(f"{kind.__name__} is not a DPO or KTO trainer of TRL 1.8 or newer")
    if source.on_miss == "compute":
        raise UsageError("on_miss='compute' needs a trainer that reflogp constructs: use CachedReferenceMixin")
    trainer.__class__ = type(f"Cached{kind.__name__}", (CachedReferenceMixin, kind), {})
    try:
        trainer._read_from(source, policy_starts_at_reference)
        trainer._use_columns()
    except BaseException:
        trainer.__class__ = kind
        raise
    return trainer


@contextmanager
def no_reference_model(trainer_class: type, policies: int) -> Iterator[None]:
    """Within the block, TRL loads the policy if it is given as a path (`policies` is 1), and no reference model."""
    loads_left = policies

    def policy_only(create: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal loads_left
        loads_left -= 1
        return create(*args, **kwargs) if loads_left >= 0 else None

    with ExitStack() as patches:
        for module in {sys.modules[parent.__module__] for parent in trainer_class.__mro__ if _is_of_trl(parent)}:
            if hasattr(module, "create_model_from_path"):
                replacement = functools.partial(policy_only, module.create_model_from_path)
                patches.enter_context(mock.patch.object(module, "create_model_from_path", replacement))
        yield


def checkpoint_of(policy: Any) -> str | None:
    """Return the folder or hub id of the checkpoint that a policy was loaded from, as TRL does for its reference model."""
    base = policy.get_base_model() if is_peft_model(policy) else policy
    return getattr(base.config, "_name_or_path", None) or None


def _is_of_trl(trainer_class: type) -> bool:
    """Return True for TRL's classes, and for unsloth's copies of them. unsloth writes each trainer to a module of its own:
    UnslothDPOTrainer has the class _UnslothDPOTrainer and its subclass UnslothDPOTrainer, which takes the place of TRL's class
    in TRL's modules."""
    module = trainer_class.__module__
    return module.startswith("trl.") or (module.startswith("Unsloth") and module == trainer_class.__name__.removeprefix("_"))
