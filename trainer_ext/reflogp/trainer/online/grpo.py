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
    """
