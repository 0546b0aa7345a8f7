"""Train with a TRL online trainer whose reference model runs in a service: the code that all such trainers share.

Each trainer's own module overrides the function in which that trainer runs its reference model.
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

#: Base class of the mixin: `object` at run time, any trainer for a type checker.
_AnyTrainer: Any = object


class RemoteReferenceMixin(_AnyTrainer):
    """Mixin to put before a TRL online trainer: its reference log-probs come from a service.

    The request is sent while the policy's own forward pass runs on the same tokens. The trainer waits for the response at the
    point where the reference model would have run. The constructor takes the trainer's own arguments, and in addition:

    Args:
        reference: the service, and the name of one of its reference models.
        reference_deadline: maximum seconds to wait for the values of one batch; a slow or restarting service pauses the step
            for that time.
        policy_starts_at_reference: whether the policy begins as the reference model; if so, the first batch's values are
            compared with the policy's own before the first step.
        step_zero_tolerance: allowed |policy - reference| of a completion's sum, in nats/√tokens; if it is None, it depends on
            the dtype, and a service that computes in another dtype than the policy is refused.
        audit: the audit of the run, or None for a `ReferenceAudit` with its defaults, or False for no audit.

    Raises:
        UsageError: arguments with which TRL uses no reference, or arguments that do not match the service's reference.
        ReferenceNotFoundError, ServiceError: the service has no such reference or is unreachable, or during training does not
            respond before the deadline.
        ReferenceChangedError: the service's reference model is no longer the model with which the run began.
        UnusableLogpsError: the reference cannot score some sequences.
        StepZeroError, AuditError: raised during training; see ReferenceAudit.
        RankFailedError: another process of a distributed run has raised one of these.

    Attributes:
        ref_model: the RemoteReference, whose attribute `traffic` has the number of requests and the time that the trainer
            waited.
        audit: the audit of the run.
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
                f'{name} needs to know which service has the reference model: reference=ReferenceSource("http://scorer:8311", '
                'reference="sft"), the name that `reflogp serve --model sft=…` gives it'
            )
        given = inspect.signature(super().__init__).bind(*positional, **named)
        args = given.arguments.get("args")
        if args is None:
            args = default_config(type(self), given.arguments.get("model"))
        refuse_reference_model(name, given.arguments.get("ref_model"))
        if getattr(args, "sync_ref_model", False):
            raise UsageError(
                "sync_ref_model changes the reference during training, and the service would keep the old model: leave it False"
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
        """Return the config, which is a copy, changed so that TRL's constructor makes no reference model."""
        return args

    def _with_reference(self, args: Any) -> None:
        """Undo the changes of `_without_reference` in the constructed trainer."""

    def _reference_values(self, batch: PaddedBatch, policy: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the service's values of a batch, float32 (rows, completion) on this process' device.

        Args:
            batch: the batch.
            policy: function that computes the policy's own values of the same batch, to compare them on the first batch.
        """
        values = self.ref_model.collect(batch)
        if self.audit is not None and self.audit.wants_first_batch:
            seen = batch.attention_mask[:, -batch.completion :] != 0
            reference = values.astype(np.float64)
            self.audit.check_first_batch(lambda: _apart(reference, _evaluated(self.model, policy), seen))
        return torch.from_numpy(values).to(self.accelerator.device)


def _evaluated(model: Any, policy: Callable[[], torch.Tensor]) -> Any:
    """Return the policy's values without dropout, (rows, completion)."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return policy().double().cpu().numpy()
    finally:
        model.train(was_training)


def _apart(reference: Any, policy: Any, seen: Any) -> list[float]:
    """Return `step_zero.differences` of the rows that have tokens to compare."""
    rows = seen.any(1)
    policy_sums, sums = (torch.from_numpy(np.where(seen, values, 0.0).sum(1)[rows]) for values in (policy, reference))
    return differences(policy_sums, sums, torch.from_numpy(seen.sum(1)[rows]))
