"""Gives stored reference log-probs to trainers: no training GPU holds a reference model.

Needs trl, datasets and accelerate. Never imports an engine or a server.
"""

from reflogp_trainer.audit import ReferenceAudit, StepZero
from reflogp_trainer.cached import CachedReferenceMixin
from reflogp_trainer.dpo import CachedDPOTrainer
from reflogp_trainer.errors import (
    AuditError,
    BroughtColumnsError,
    MissingLogpsError,
    RankFailedError,
    ReferenceLogpsError,
    StepZeroError,
    UnusableLogpsError,
)
from reflogp_trainer.join import JoinRecord, join_reference_logps
from reflogp_trainer.kto import CachedKTOTrainer
from reflogp_trainer.source import ReferenceSource

__all__ = [
    "AuditError",
    "BroughtColumnsError",
    "CachedDPOTrainer",
    "CachedKTOTrainer",
    "CachedReferenceMixin",
    "JoinRecord",
    "MissingLogpsError",
    "RankFailedError",
    "ReferenceAudit",
    "ReferenceLogpsError",
    "ReferenceSource",
    "StepZero",
    "StepZeroError",
    "UnusableLogpsError",
    "join_reference_logps",
]
