"""The part that RLOO and GRPO share: TRL calls `_get_per_token_logps_and_entropies` for the policy and for the reference.

TRL calls it in each generation step; its arguments and return values differ between versions.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from reflogp.store import UsageError
from reflogp.trainer.online.mixin import RemoteReferenceMixin
from reflogp.trainer.padded import PaddedBatch

_HOOK = "_get_per_token_logps_and_entropies"


class PerTokenMixin(RemoteReferenceMixin):
    """Mixin for RLOO and GRPO, which compare log-probs token by token at their sampling temperature."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        if not hasattr(super(), _HOOK):
            raise ImportError(f"{type(self).__name__} needs a TRL whose trainer has {_HOOK} (0.22 or newer)")
        super().__init__(*positional, **named)
        if hasattr(self, "liger_grpo_loss"):
            raise UsageError("use_liger_loss makes a loss of its own in the constructor, without a reference: leave it off")
        if self.args.n_gpu > 1:
            raise UsageError(
                f"{type(self).__name__} sees {self.args.n_gpu} GPUs in one process, which wraps the model in DataParallel: "
                "start one process for each GPU (accelerate launch, torchrun), or name one in CUDA_VISIBLE_DEVICES"
            )

    def _without_reference(self, args: Any) -> Any:
        if not args.beta:
            raise UsageError(f"beta={args.beta} uses no reference: set beta, or use TRL's trainer")
        args.beta = 0.0
        return args

    def _with_reference(self, args: Any) -> None:
        self.args.beta = self.beta = args.beta

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, *more: Any, **named: Any
    ) -> Any:
        own = super()._get_per_token_logps_and_entropies
        is_reference = model is self.ref_model
        if torch.is_grad_enabled() and not is_reference:  # in the loss, long after the reference's call
            return own(model, input_ids, attention_mask, logits_to_keep, *more, **named)
        if named.get("pixel_values") is not None:
            raise UsageError("a service scores text, and this batch has images")
        batch = PaddedBatch.of(input_ids, attention_mask, logits_to_keep, temperature=self.temperature)
        if not is_reference:
            self.ref_model.begin(batch)
            return own(model, input_ids, attention_mask, logits_to_keep, *more, **named)
        values = self._reference_values(
            batch, lambda: own(self.model, input_ids, attention_mask, logits_to_keep, *more, **named)[0]
        )
        has_aux_loss = "compute_aux_loss" in inspect.signature(own).parameters  # since TRL 1.7
        return (values, None, None) if has_aux_loss else (values, None)
