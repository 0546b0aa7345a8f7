"""TRL's DPOTrainer on stored reference log-probs."""

from __future__ import annotations

from trl import DPOTrainer

from reflogp.trainer.cached import CachedReferenceMixin


class CachedDPOTrainer(CachedReferenceMixin, DPOTrainer):
    """DPO without a reference model: its log-probs come from a store.

    Takes the arguments of `CachedReferenceMixin` and of TRL's trainer.
    """
