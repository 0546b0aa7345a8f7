"""Supply trainers with reference log-probs from a store, a service or a file, so that no training GPU has to hold a reference
model.

This package requires torch, transformers, datasets and accelerate. Only trainers that are derived from TRL's trainers require
trl; OpenRLHF's trainers do not. This package never imports `reflogp.scoring` or `reflogp.service`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from reflogp.trainer.audit import ReferenceAudit, StepZero
from reflogp.trainer.cached import CachedReferenceMixin
from reflogp.trainer.errors import (
    AuditError,
    BroughtColumnsError,
    MissingLogpsError,
    RankFailedError,
    ReferenceChangedError,
    ReferenceLogpsError,
    StepZeroError,
    UnusableLogpsError,
)
from reflogp.trainer.join import JoinRecord, join_reference_logps
from reflogp.trainer.remote import RemoteReference
from reflogp.trainer.source import ReferenceSource

if TYPE_CHECKING:
    from reflogp.trainer.online.online_dpo import RemoteOnlineDPOTrainer
    from reflogp.trainer.online.per_token import RemoteGRPOTrainer, RemoteRLOOTrainer
    from reflogp.trainer.trainers import CachedDPOTrainer, CachedKTOTrainer

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
    "ReferenceChangedError",
    "ReferenceLogpsError",
    "ReferenceSource",
    "RemoteGRPOTrainer",
    "RemoteOnlineDPOTrainer",
    "RemoteRLOOTrainer",
    "RemoteReference",
    "StepZero",
    "StepZeroError",
    "UnusableLogpsError",
    "join_reference_logps",
]

#: Trainers that are imported on first access, because their parent classes take seconds to import and do not exist in every
#: version of TRL, and because TRL may not be installed.
_LATER = {
    "CachedDPOTrainer": "reflogp.trainer.trainers",
    "CachedKTOTrainer": "reflogp.trainer.trainers",
    "RemoteGRPOTrainer": "reflogp.trainer.online.per_token",
    "RemoteOnlineDPOTrainer": "reflogp.trainer.online.online_dpo",
    "RemoteRLOOTrainer": "reflogp.trainer.online.per_token",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
