"""TRL's RLOOTrainer with its reference model in a service."""

from __future__ import annotations

from trl import RLOOTrainer

from reflogp.trainer.online.per_token import PerTokenMixin


class RemoteRLOOTrainer(PerTokenMixin, RLOOTrainer):
    """RLOO without a local reference model. Takes the arguments of `RemoteReferenceMixin` and of TRL's trainer.

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
