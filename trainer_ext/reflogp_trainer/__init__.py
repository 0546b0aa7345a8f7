"""Gives stored reference log-probs to trainers: no training GPU holds a reference model.

Needs trl, datasets and accelerate. Never imports an engine or a server.
"""

from reflogp_trainer.dpo import CachedDPOTrainer
from reflogp_trainer.errors import MissingLogpsError, ReferenceLogpsError, StepZeroError, UnusableLogpsError
from reflogp_trainer.join import join_reference_logps
from reflogp_trainer.source import ReferenceSource

__all__ = [
    "CachedDPOTrainer",
    "MissingLogpsError",
    "ReferenceLogpsError",
    "ReferenceSource",
    "StepZeroError",
    "UnusableLogpsError",
    "join_reference_logps",
]
