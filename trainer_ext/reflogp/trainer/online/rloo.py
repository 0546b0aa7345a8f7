"""RemoteRLOOTrainer: TRL's RLOOTrainer, its reference model in a service."""

from __future__ import annotations

from trl import RLOOTrainer

from reflogp.trainer.online.per_token import PerTokenMixin


class RemoteRLOOTrainer(PerTokenMixin, RLOOTrainer):
    """RLOO without a reference model of its own. Arguments are `RemoteReferenceMixin`'s and TRL's."""
