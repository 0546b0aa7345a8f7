"""RemoteGRPOTrainer: TRL's GRPOTrainer, its reference model in a service."""

from __future__ import annotations

from trl import GRPOTrainer

from reflogp.trainer.online.per_token import PerTokenMixin


class RemoteGRPOTrainer(PerTokenMixin, GRPOTrainer):
    """GRPO without a reference model of its own. Arguments are `RemoteReferenceMixin`'s and TRL's; beta must be above 0.

    Where generation and optimizer steps are aligned (num_iterations=1, and steps_per_generation divides
    gradient_accumulation_steps), TRL runs no policy forward before the reference's, so none hides the request.
    """
