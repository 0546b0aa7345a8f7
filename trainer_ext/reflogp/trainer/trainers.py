"""Train with TRL's DPOTrainer and KTOTrainer, using stored reference log-probs.

TRL's KTOTrainer estimates a KL term. For this estimate, it combines each prompt with the completion of another row. Which rows
are combined depends on the batch size and the row order. The combined sequences need reference values too. Because TRL creates
them when it prepares the dataset, reflogp joins values to the prepared rows.
"""

from __future__ import annotations

from typing import Any

from trl import DPOTrainer, KTOTrainer

from reflogp.trainer.cached import CachedReferenceMixin
from reflogp.trainer.trl_versions import HOOK, TESTED, trl_version


class CachedDPOTrainer(CachedReferenceMixin, DPOTrainer):
    """TRL's DPO trainer without a reference model: the reference log-probs come from a store, a service or a file.

    The constructor takes the arguments of `CachedReferenceMixin` and of TRL's trainer.

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


def _kto_trainer() -> Any:
    """Return the class that defines TRL's hook `_precompute_ref_logps` (KTOTrainer or one of its parents), or None if there is
    no such class.

    In TRL 1.8 and newer, `trl.KTOTrainer` itself defines the hook. In TRL 1.2 to 1.7, one of its parents does, and
    `trl.KTOTrainer` only adds a warning that TRL will move the trainer.
    """
    return next((parent for parent in KTOTrainer.__mro__ if HOOK in vars(parent)), None)


_found = _kto_trainer()
_Trainer: Any = _found or object


class CachedKTOTrainer(CachedReferenceMixin, _Trainer):
    """TRL's KTO trainer without a reference model: the reference log-probs come from a store, a service or a file.

    The constructor takes the arguments of `CachedReferenceMixin` and of TRL's trainer.

    Raises:
        ImportError: TRL's KTOTrainer does not have the hook `_precompute_ref_logps`. TRL versions before 1.2 lack it.

    Examples:
        >>> from datasets import load_dataset
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from trl import KTOConfig
        >>> from reflogp.trainer import CachedKTOTrainer, ReferenceSource
        >>> trainer = CachedKTOTrainer(
        ...     AutoModelForCausalLM.from_pretrained("./sft-model"),
        ...     args=KTOConfig(output_dir="run-kto", loss_type="apo_zero_unpaired"),
        ...     train_dataset=load_dataset("json", data_files="feedback.jsonl", split="train"),
        ...     processing_class=AutoTokenizer.from_pretrained("./sft-model"),
        ...     reference=ReferenceSource("./logps", model="./sft-model", dtype="bfloat16"),
        ... )
        >>> trainer.train()
        TrainOutput(global_step=...)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _found is None:
            raise ImportError(
                f"CachedKTOTrainer needs TRL 1.2 or newer: it overrides KTOTrainer's method `{HOOK}`, which "
                f"TRL {trl_version()} lacks; {TESTED}"
            )
        super().__init__(*args, **kwargs)
