"""Gives stored reference log-probs to trainers: no training GPU holds a reference model.

Needs datasets, accelerate and transformers; trl is imported with the first trainer of TRL's that is asked for, so that an
OpenRLHF environment needs none. Never imports an engine or a server.
"""

from typing import TYPE_CHECKING, Any

from reflogp_trainer.audit import ReferenceAudit, StepZero
from reflogp_trainer.cached import CachedReferenceMixin
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
from reflogp_trainer.source import ReferenceSource

if TYPE_CHECKING:
    from reflogp_trainer.dpo import CachedDPOTrainer
    from reflogp_trainer.kto import CachedKTOTrainer

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


def __getattr__(name: str) -> Any:
    if name == "CachedDPOTrainer":
        from reflogp_trainer.dpo import CachedDPOTrainer

        return CachedDPOTrainer
    if name == "CachedKTOTrainer":
        from reflogp_trainer.kto import CachedKTOTrainer

        return CachedKTOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
