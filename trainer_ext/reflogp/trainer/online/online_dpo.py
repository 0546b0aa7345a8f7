"""Train with TRL's OnlineDPOTrainer while the reference model runs in a service.

TRL's trainer calls `_forward` first for the policy and then for the reference. If padded rows are longer than max_length, the
trainer truncates them on the left.
"""

from __future__ import annotations

from typing import Any

import torch
from trl.experimental.online_dpo import OnlineDPOTrainer

from reflogp.store import UsageError
from reflogp.trainer.online.mixin import RemoteReferenceMixin
from reflogp.trainer.padded import PaddedBatch
from reflogp.trainer.ranks import gather


class RemoteOnlineDPOTrainer(RemoteReferenceMixin, OnlineDPOTrainer):
    """TRL's Online DPO trainer without a local reference model. The constructor takes the arguments of `RemoteReferenceMixin`
    and of TRL's trainer.

    Some of TRL's metrics (objective/kl, objective/non_score_reward and objective/rlhf_reward) also include log-probs of the
    padding after a completion, so these log-probs are requested too. The loss and the metrics rewards/* do not include them.

    Examples:
        >>> from datasets import Dataset
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from trl.experimental.online_dpo import OnlineDPOConfig
        >>> from reflogp.trainer import ReferenceSource, RemoteOnlineDPOTrainer
        >>> trainer = RemoteOnlineDPOTrainer(
        ...     AutoModelForCausalLM.from_pretrained("./sft-model", dtype="bfloat16"),
        ...     reward_funcs=lambda completions, **kwargs: [-float(len(text)) for text in completions],
        ...     args=OnlineDPOConfig(output_dir="run-online-dpo", max_length=96, per_device_train_batch_size=2),
        ...     train_dataset=Dataset.from_dict({"prompt": ["The sky is", "Two and two are"]}),
        ...     processing_class=AutoTokenizer.from_pretrained("./sft-model"),
        ...     reference=ReferenceSource("http://127.0.0.1:8311", reference="sft"),
        ... )
        >>> trainer.train()
        TrainOutput(global_step=...)
    """

    def _forward(
        self,
        model: Any,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
        vision_inputs: Any = None,
    ) -> torch.Tensor:
        own = super()._forward
        given = (prompt_ids, prompt_mask, completion_ids, completion_mask)
        if vision_inputs is not None:
            raise UsageError(
                "the service can score only text, but this batch has images; use TRL's own trainer for data with images"
            )
        cut = max(prompt_ids.size(1) + completion_ids.size(1) - self.max_length, 0)
        if cut >= prompt_ids.size(1):
            raise UsageError(
                f"max_length={self.max_length} leaves no prompt token before {completion_ids.size(1)} completion tokens, so "
                "the first completion token would have no context; increase max_length or decrease max_new_tokens"
            )
        batch = PaddedBatch.of(
            torch.cat((prompt_ids[:, cut:], completion_ids), dim=1),
            torch.cat((prompt_mask[:, cut:], completion_mask), dim=1),
            completion_ids.size(1),
            at_padding=True,
        )
        if model is not self.ref_model:
            self.ref_model.begin(batch)
            self._policy = model
            values: torch.Tensor = own(model, *given)
            return values
        return self._reference_values(batch, lambda: own(self._policy, *given))

    def log(self, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """Log as TRL does, but average val/contain_eos_token over all processes, because in TRL, each process logs only its own
        value."""
        name = "val/contain_eos_token"
        if name in logs:
            everyone = gather(logs[name])
            logs[name] = sum(everyone) / len(everyone)
        super().log(logs, *more, **named)
