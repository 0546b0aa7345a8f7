"""Train with TRL's RLOOTrainer and GRPOTrainer while the reference model runs in a service.

In each generation step, TRL calls `_get_per_token_logps_and_entropies` for the reference. RLOO always calls this method for the
policy first. GRPO does so only in the cases that `RemoteGRPOTrainer` describes. The arguments and return values of this method
differ between TRL versions.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from trl import GRPOTrainer, RLOOTrainer

from reflogp.store import UsageError
from reflogp.trainer.online.mixin import RemoteReferenceMixin
from reflogp.trainer.padded import PaddedBatch

_HOOK = "_get_per_token_logps_and_entropies"


class PerTokenMixin(RemoteReferenceMixin):
    """Mixin for RLOO and GRPO, which compare the policy's log-probs with the reference's for each token, at the sampling
    temperature."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        if not hasattr(super(), _HOOK):
            raise ImportError(f"{type(self).__name__} needs TRL 0.22 or newer: the installed version lacks {_HOOK}")
        super().__init__(*positional, **named)
        if hasattr(self, "liger_grpo_loss"):
            raise UsageError(
                "TRL's Liger loss would ignore the service's values: set use_liger_kernel=False, or use TRL 1.14 or newer, "
                "where use_liger_kernel does not change the loss"
            )
        if self.args.n_gpu > 1:
            raise UsageError(
                f"{type(self).__name__} sees {self.args.n_gpu} GPUs in one process, so the model is wrapped in DataParallel, "
                "which is not supported: start one process per GPU (accelerate launch, torchrun), or set CUDA_VISIBLE_DEVICES "
                "to a single GPU"
            )

    def _without_reference(self, args: Any) -> Any:
        if not args.beta:
            raise UsageError(f"beta={args.beta} makes TRL ignore the reference: set beta above 0, or use TRL's own trainer")
        args.beta = 0.0
        return args

    def _with_reference(self, args: Any) -> None:
        self.args.beta = self.beta = args.beta

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, *more: Any, **named: Any
    ) -> Any:
        own = super()._get_per_token_logps_and_entropies
        is_reference = model is self.ref_model
        if torch.is_grad_enabled() and not is_reference:  # TRL is computing the loss, long after it called the reference
            return own(model, input_ids, attention_mask, logits_to_keep, *more, **named)
        if named.get("pixel_values") is not None:
            raise UsageError(
                "the service can score only text, but this batch has images; use TRL's own trainer for data with images"
            )
        batch = PaddedBatch.of(input_ids, attention_mask, logits_to_keep, temperature=self.temperature)
        if not is_reference:
            self.ref_model.begin(batch)
            return own(model, input_ids, attention_mask, logits_to_keep, *more, **named)
        values = self._reference_values(
            batch, lambda: own(self.model, input_ids, attention_mask, logits_to_keep, *more, **named)[0]
        )
        has_aux_loss = "compute_aux_loss" in inspect.signature(own).parameters  # since TRL 1.7
        return (values, None, None) if has_aux_loss else (values, None)


class RemoteGRPOTrainer(PerTokenMixin, GRPOTrainer):
    """TRL's GRPO trainer without a local reference model.

    The constructor takes the arguments of `RemoteReferenceMixin` and of TRL's trainer; beta must be above 0.

    TRL runs the policy before it needs the reference's values if gradient_accumulation_steps is not a multiple of
    steps_per_generation * num_iterations, or if TRL uses vLLM with importance sampling. In all other cases, including TRL's
    defaults, the trainer waits for the full duration of each request.

    Examples:
        >>> from datasets import Dataset
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from trl import GRPOConfig
        >>> from reflogp.trainer import ReferenceSource, RemoteGRPOTrainer
        >>> trainer = RemoteGRPOTrainer(
        ...     AutoModelForCausalLM.from_pretrained("./sft-model", dtype="bfloat16"),
        ...     reward_funcs=lambda completions, **kwargs: [-float(len(text)) for text in completions],
        ...     args=GRPOConfig(output_dir="run-grpo", beta=0.05, num_generations=2, per_device_train_batch_size=4),
        ...     train_dataset=Dataset.from_dict({"prompt": ["The sky is", "Two and two are"]}),
        ...     processing_class=AutoTokenizer.from_pretrained("./sft-model"),
        ...     reference=ReferenceSource("http://127.0.0.1:8311", reference="sft"),
        ... )
        >>> trainer.train()
        TrainOutput(global_step=...)
    """


class RemoteRLOOTrainer(PerTokenMixin, RLOOTrainer):
    """TRL's RLOO trainer without a local reference model.

    The constructor takes the arguments of `RemoteReferenceMixin` and of TRL's trainer; beta must be above 0.

    Examples:
        >>> from datasets import Dataset
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from trl import RLOOConfig
        >>> from reflogp.trainer import ReferenceSource, RemoteRLOOTrainer
        >>> trainer = RemoteRLOOTrainer(
        ...     AutoModelForCausalLM.from_pretrained("./sft-model", dtype="bfloat16"),
        ...     reward_funcs=lambda completions, **kwargs: [-float(len(text)) for text in completions],
        ...     args=RLOOConfig(output_dir="run-rloo", beta=0.05, num_generations=2, per_device_train_batch_size=4),
        ...     train_dataset=Dataset.from_dict({"prompt": ["The sky is", "Two and two are"]}),
        ...     processing_class=AutoTokenizer.from_pretrained("./sft-model"),
        ...     reference=ReferenceSource("http://127.0.0.1:8311", reference="sft"),
        ... )
        >>> trainer.train()
        TrainOutput(global_step=...)
    """
