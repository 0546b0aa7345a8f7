"""Provide the code shared by all TRL online trainers whose reference model runs in a service.

Subclasses of `RemoteReferenceMixin` in the other modules of this package override the TRL method that runs the reference model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from reflogp.store import UsageError
from reflogp.trainer.audit import ReferenceAudit, watching
from reflogp.trainer.audit.metrics import begin_report
from reflogp.trainer.audit.step_zero import differences
from reflogp.trainer.construction import no_reference_model, refuse_reference_model, unchanged_by_failure
from reflogp.trainer.padded import PaddedBatch, has_absolute_positions
from reflogp.trainer.remote import RemoteReference
from reflogp.trainer.source import ReferenceSource
from reflogp.trainer.tolerances import computes_in
from reflogp.trainer.trl_versions import default_config, with_own_tag

#: Base class of the mixin: `object`, annotated as Any so that type checkers accept every attribute of a trainer.
_AnyTrainer: Any = object


class RemoteReferenceMixin(_AnyTrainer):
    """Mixin that makes a TRL online trainer get its reference log-probs from a service.

    If TRL runs the policy on a batch before it needs the reference's log-probs, the trainer requests these log-probs just
    before the policy's forward pass. The trainer waits for the service's response only at the point where TRL would run the
    reference model. List the mixin before the trainer among the base classes. The constructor takes the arguments of TRL's
    trainer and these:

    Args:
        reference: the service, and the name of one of its reference models.
        reference_deadline: maximum number of seconds to wait for the values of one batch. The training step waits this long for
            a slow or restarting service before an error is raised.
        policy_starts_at_reference: whether the policy starts from the reference's weights. If True, the policy's log-probs of
            the first batch are compared with those from the service. This happens before the first step.
        step_zero_tolerance: maximum |policy - reference| for the sum of a completion's log-probs, in nats/√tokens. If None, the
            policy and the service's reference model must compute in the same dtype, and the tolerance depends on this dtype and
            on the type of model.
        audit: the audit of the run, None for a `ReferenceAudit` with default settings, or False for no audit.

    Raises:
        UsageError: `reference` is missing, is not a service, or specifies a different model than the service has under the same
            name; or an argument does not work with a reference model in a service (such as `ref_model`, or beta=0 in the
            config). Also raised if the service and the policy compute in different dtypes and `step_zero_tolerance` is None,
            and, during training, if a batch contains images.
        ReferenceNotFoundError: the service does not have the reference.
        ServiceError: the service is unreachable, or does not respond in time during training.
        ReferenceChangedError: the service's reference model is no longer the model that the run started with.
        UnusableLogpsError: the service cannot score some sequences, or their log-probs are not finite.
        StepZeroError, AuditError: raised during training; see ReferenceAudit.
        RankFailedError: another process of a distributed run raised one of these errors.

    Attributes:
        ref_model: the RemoteReference; its attribute `traffic` says how much was requested and how long the trainer waited.
        audit: the ReferenceAudit of the run, or None if the run has no audit.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._tag_names = with_own_tag(cls)

    def __init__(
        self,
        *positional: Any,
        reference: ReferenceSource | None = None,
        reference_deadline: float = 600.0,
        policy_starts_at_reference: bool = True,
        step_zero_tolerance: float | None = None,
        audit: ReferenceAudit | bool | None = None,
        **named: Any,
    ) -> None:
        name = type(self).__name__
        if not isinstance(reference, ReferenceSource):
            raise UsageError(
                f"{name} needs to know which service runs the reference model: pass reference=ReferenceSource("
                '"http://scorer:8311", reference="sft") with the model\'s name from `reflogp serve --model sft=…`'
            )
        given = inspect.signature(super().__init__).bind(*positional, **named)
        args = given.arguments.get("args")
        if args is None:
            args = default_config(type(self), given.arguments.get("model"))
        refuse_reference_model(name, given.arguments.get("ref_model"))
        if getattr(args, "sync_ref_model", False):
            raise UsageError(
                "sync_ref_model=True changes the reference during training, but the service would keep the old model: "
                "set sync_ref_model=False"
            )
        given.arguments["args"] = self._without_reference(copy.copy(args))
        begin_report(args.output_dir, args.process_index)
        remote = RemoteReference(reference, reference_deadline)
        self.policy_starts_at_reference = policy_starts_at_reference
        model = given.arguments.get("model")
        with (
            unchanged_by_failure(model, given.arguments.get("processing_class")),
            no_reference_model(type(self), policy_is_path=isinstance(model, str)),
        ):
            super().__init__(*given.args, **given.kwargs)
        self._with_reference(args)
        policy = self.accelerator.unwrap_model(self.model)
        remote.absolute_positions = has_absolute_positions(policy)
        if step_zero_tolerance is None:
            remote.require_numerics(computes_in(policy, self.accelerator), bool(getattr(args, "cast_lm_head_to_fp32", False)))
        self.ref_model = remote
        self.audit = watching(self, audit, step_zero_tolerance)

    def _without_reference(self, args: Any) -> Any:
        """Return the config, changed so that TRL's constructor creates no reference model. `args` is a copy and may be
        modified."""
        return args

    def _with_reference(self, args: Any) -> None:
        """Undo the changes of `_without_reference` in the constructed trainer."""

    def _reference_values(self, batch: PaddedBatch, policy: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the service's values for a batch, float32 of shape (rows, completion tokens), on this process's device.

        Args:
            batch: the tokens of the batch, and which log-probs are needed.
            policy: function that computes the policy's log-probs of the batch. It is called only for the first batch, whose
                policy log-probs are compared with the service's values.
        """
        values = self.ref_model.collect(batch)
        if self.audit is not None and self.audit.wants_first_batch:
            seen = batch.attention_mask[:, -batch.completion :] != 0
            reference = values.astype(np.float64)
            self.audit.check_first_batch(lambda: _apart(reference, _evaluated(self.model, policy), seen))
        return torch.from_numpy(values).to(self.accelerator.device)


def _evaluated(model: Any, policy: Callable[[], torch.Tensor]) -> Any:
    """Call `policy` with dropout and gradients turned off, and return the result as an array of shape (rows, completion
    tokens)."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return policy().double().cpu().numpy()
    finally:
        model.train(was_training)


def _apart(reference: Any, policy: Any, seen: Any) -> list[float]:
    """Sum the log-probs of each row, and call `step_zero.differences` to compare the policy's sums with the reference's. Rows
    without tokens to compare are omitted."""
    rows = seen.any(1)
    policy_sums, sums = (torch.from_numpy(np.where(seen, values, 0.0).sum(1)[rows]) for values in (policy, reference))
    return differences(policy_sums, sums, torch.from_numpy(seen.sum(1)[rows]))
