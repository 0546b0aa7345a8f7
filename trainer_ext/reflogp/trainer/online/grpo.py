"""TRL's GRPOTrainer with its reference model in a service."""

from __future__ import annotations

from trl import GRPOTrainer

from reflogp.trainer.online.per_token import PerTokenMixin


class RemoteGRPOTrainer(PerTokenMixin, GRPOTrainer):
    """GRPO without a local reference model.

    Takes the arguments of `RemoteReferenceMixin` and of TRL's trainer; beta must be above 0.

    If generation and optimizer steps are aligned (num_iterations=1, and steps_per_generation divides
    gradient_accumulation_steps), TRL runs no policy forward pass before the reference's, so the request's latency is not
    hidden.

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
