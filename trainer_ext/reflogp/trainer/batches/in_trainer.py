"""Provide the code shared by adapters for frameworks whose trainers are subclasses of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from reflogp.store import UsageError
from reflogp.trainer.audit import ReferenceAudit
from reflogp.trainer.audit.metrics import begin_report
from reflogp.trainer.audit.step_zero import differences
from reflogp.trainer.batches.reference import BatchReference
from reflogp.trainer.batches.sequences import TokenDataset
from reflogp.trainer.distributed_join import agree_on_dtype
from reflogp.trainer.ranks import on_all_ranks
from reflogp.trainer.source import ReferenceSource
from reflogp.trainer.tolerances import computes_in

#: Base class of the mixin: `object` at run time, or any trainer for type checkers.
_AnyTrainer: Any = object


@dataclass(frozen=True)
class StoredReference:
    """reflogp's settings for one training run that uses stored values. The framework's own settings are not included.

    Attributes:
        source: where the values are stored.
        run_command: whether to score rows without stored values on this machine, by running `reflogp score` in a separate
            process.
        policy_starts_at_reference: whether the policy starts from the reference's weights. If True, the policy's log-probs of
            the first batch are compared with the stored values.
        step_zero_tolerance: maximum of |policy - reference| / √tokens for each completion, where policy and reference are the
            sums of the completion's log-probs in nats. If None, the tolerance depends on the dtypes and on whether the model is
            a mixture of experts, and the policy and the reference must have the same dtype.
        on_finding: "fail" stops the run if the audit finds wrong reference values or an unexpected forward pass; "warn" only
            logs a warning.
    """

    source: ReferenceSource
    run_command: bool = False
    policy_starts_at_reference: bool = True
    step_zero_tolerance: float | None = None
    on_finding: Literal["fail", "warn"] = "fail"


class BatchReferenceMixin(_AnyTrainer):
    """Mixin that makes a framework's subclass of transformers' Trainer use stored reference log-probs.

    The adapter for a framework defines a trainer class with this mixin and the framework's trainer as base classes, in this
    order. The class calls `use_stored_reference` at the end of its constructor, and overrides the method in which the framework
    runs its reference model.

    Attributes:
        ref_model: the BatchReference that supplies the stored values.
        joins: dict from each dataset's name to a JoinRecord, which says where the dataset's values come from. The records are
            also in `output_dir/reflogp_audit.json`.
        audit: the audit of the run.
    """

    ref_model: Any

    def use_stored_reference(self, stored: StoredReference, rows_of: Callable[[Any], TokenDataset]) -> None:
        """Look up the values for all datasets, and attach an audit to this trainer.

        Args:
            stored: where the values are stored, and what to check.
            rows_of: function that converts one of the framework's datasets to a TokenDataset.

        Raises:
            UsageError: the source cannot be used, or a dataset is a stream. (A stream's rows cannot all be looked up before
                training.)
            MissingLogpsError, UnusableLogpsError, ReferenceLogpsError, RankFailedError: see BatchReference.
        """
        begin_report(self.args.output_dir, self.args.process_index)
        policy = self.accelerator.unwrap_model(self.model)
        self.reference = agree_on_dtype(stored.source, computes_in(policy, self.accelerator))
        datasets = on_all_ranks(
            "opening the datasets",
            lambda: {name: rows_of(_whole(dataset, name)) for name, dataset in self._datasets().items()},
        )
        self.ref_model = BatchReference(self.reference, datasets, Path(self.args.output_dir), stored.run_command)
        self.joins = self.ref_model.joins
        self.policy_starts_at_reference = stored.policy_starts_at_reference
        self.audit = ReferenceAudit(stored.on_finding, step_zero_tolerance=stored.step_zero_tolerance).attach(self)

    def compare_first_batch(self, policy: Callable[[], torch.Tensor], reference: torch.Tensor, tokens: torch.Tensor) -> None:
        """Run the `step_zero` check on the run's first batch.

        Subclasses call this method for every batch. It does nothing if the check has already run or does not apply, for example
        because the policy does not start from the reference's weights.

        Args:
            policy: function that computes the policy's summed log-probs of each sequence in the batch, shape (n,), without
                gradients or dropout.
            reference: sums of the stored log-probs of the same sequences, shape (n,).
            tokens: number of tokens in each sum, shape (n,).
        """
        if self.audit.wants_first_batch:
            used = tokens > 0

            def seen() -> list[float]:
                return differences(policy()[used], reference[used], tokens[used])

            self.audit.check_first_batch(seen)

    @contextmanager
    def policy_as_reference(self, model: Any) -> Iterator[None]:
        """Within the block, replace the reference model with the policy (`model`), and turn off dropout and gradients. The
        framework's code for the reference model then computes the policy's log-probs."""
        stored, was_training = self.ref_model, model.training
        self.ref_model = model
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            model.train(was_training)
            self.ref_model = stored

    def _datasets(self) -> dict[str, Any]:
        """Return the trainer's datasets by name."""
        found = {} if self.train_dataset is None else {"train": self.train_dataset}
        evaluated = self.eval_dataset
        if isinstance(evaluated, dict):
            return found | {f"eval_{name}": dataset for name, dataset in evaluated.items()}
        return found if evaluated is None else found | {"eval": evaluated}


def _whole(dataset: Any, name: str) -> Any:
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            f"the {name} dataset is a stream, but all rows must be looked up before training: load it without streaming"
        )
    return dataset
