"""TRL's DPOTrainer on stored reference log-probs."""

from __future__ import annotations

from trl import DPOTrainer

from reflogp.trainer.cached import CachedReferenceMixin


class CachedDPOTrainer(CachedReferenceMixin, DPOTrainer):
    """DPO without a reference model: its log-probs come from a store.

    Takes the arguments of `CachedReferenceMixin` and of TRL's trainer.

    Examples:
        >>> from datasets import load_dataset
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from trl import DPOConfig
        >>> from reflogp.trainer import CachedDPOTrainer, ReferenceSource
        >>> trainer = CachedDPOTrainer(
        ...     AutoModelForCausalLM.from_pretrained("./sft-model"),
        ...     args=DPOConfig(output_dir="run", max_length=1024, beta=0.1),
        ...     train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
        ...     processing_class=AutoTokenizer.from_pretrained("./sft-model"),
        ...     reference=ReferenceSource("./logps", model="./sft-model", dtype="bfloat16"),
        ... )
        >>> trainer.joins["train"]
        JoinRecord(
            32 rows, 100% with values
            reference ... in bfloat16, snapshot ... of .../logps
            max_length 1024, truncation_mode keep_start
        )
        >>> trainer.train()
        TrainOutput(global_step=...)
        >>> trainer.audit.step_zero.passed
        True
    """
