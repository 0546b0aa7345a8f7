"""What the remote trainers share: no reference model is made, a service is asked instead, and the run is watched.

Knows what TRL's online trainers have in common. Does not know where each of them runs its reference; that is one hook, in the
trainer's own file.
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
from reflogp.trainer.audit.report import begin_report
from reflogp.trainer.audit.step_zero import differences
from reflogp.trainer.construction import unchanged_by_failure
from reflogp.trainer.no_reference import no_reference_model, refuse_reference_model
from reflogp.trainer.padded import PaddedBatch, has_absolute_positions
from reflogp.trainer.remote import RemoteReference
from reflogp.trainer.source import ReferenceSource
from reflogp.trainer.tolerances import computes_in
from reflogp.trainer.trl_versions import default_config, with_own_tag

#: The trainer that this goes before: at run time nothing, for a type checker any trainer.
_AnyTrainer: Any = object


class RemoteReferenceMixin(_AnyTrainer):
    """Before one of TRL's online trainers: its reference log-probs come from a service.

    The request leaves while the policy's own forward runs on the same tokens, and is awaited where the reference would have
    run. Takes what the trainer takes, and

    Args:
        reference: the service, and which reference model of it.
        reference_deadline: seconds that the values of one batch may take; so long a slow or restarting service pauses the step.
        policy_starts_at_reference: True (default) when the policy begins as the reference model: the first batch's values are
            then compared with the policy's own before the first step.
        step_zero_tolerance: allowed |policy - reference| of a completion's sum, in nats per root token; None picks one for the
            dtype, and refuses a service that computes in another one.
        audit: what watches the run; None for a `ReferenceAudit` with its defaults, False for none.

    Raises:
        UsageError: arguments that leave nothing for a reference to do, or that the service cannot agree to.
        ReferenceNotFoundError, ServiceError: no such reference, or no service; while training, no answer before the deadline.
        ReferenceChangedError: the service's reference model is not the one any more that the run began with.
        UnusableLogpsError: sequences that the reference cannot score.
        StepZeroError, AuditError: while it trains, see ReferenceAudit.
        RankFailedError: another process of a distributed run has raised one of these.

    Attributes:
        ref_model: the RemoteReference; `ref_model.traffic` says what was asked, and how long the trainer waited.
        audit: what watches the run.
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
            raise UsageError("sync_ref_model moves the reference while training, and a service's stays: leave it False")
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
        """The config, a copy, as one under which TRL's constructor makes no reference model."""
        return args

    def _with_reference(self, args: Any) -> None:
        """Undo, in the trainer that is made, what `_without_reference` changed."""

    def _reference_values(self, batch: PaddedBatch, policy: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The service's values of a batch, float32 (rows, completion) on this process' device.

        Args:
            policy: computes the policy's own values of the same batch, for the first one's comparison.
        """
        values = self.ref_model.collect(batch)
        if self.audit is not None and self.audit.wants_first_batch:
            seen = batch.attention_mask[:, -batch.completion :] != 0
            reference = values.astype(np.float64)
            self.audit.check_first_batch(lambda: _apart(reference, _evaluated(self.model, policy), seen))
        return torch.from_numpy(values).to(self.accelerator.device)


def _evaluated(model: Any, policy: Callable[[], torch.Tensor]) -> Any:
    """The policy's values without dropout, (rows, completion)."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return policy().double().cpu().numpy()
    finally:
        model.train(was_training)


def _apart(reference: Any, policy: Any, seen: Any) -> list[float]:
    """`step_zero.differences` of the rows that have something to compare."""
    rows = seen.any(1)
    policy_sums, sums = (torch.from_numpy(np.where(seen, values, 0.0).sum(1)[rows]) for values in (policy, reference))
    return differences(policy_sums, sums, torch.from_numpy(seen.sum(1)[rows]))
