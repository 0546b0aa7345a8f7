"""TRL's RLOOTrainer with its reference model in a service."""

from __future__ import annotations

from trl import RLOOTrainer

from reflogp.trainer.online.per_token import PerTokenMixin


class RemoteRLOOTrainer(PerTokenMixin, RLOOTrainer):
    """RLOO without a local reference model. Takes the arguments of `RemoteReferenceMixin` and of TRL's trainer."""
