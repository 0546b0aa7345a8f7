"""Gives stored reference log-probs to trainers: no training GPU holds a reference model.

Needs datasets, accelerate and transformers; trl where one of its trainers is asked for, so not with OpenRLHF. Never imports an
engine or a server.
"""

import importlib
from typing import Any

from reflogp_trainer.audit import ReferenceAudit, StepZero
from reflogp_trainer.cached import CachedReferenceMixin
from reflogp_trainer.errors import (
    AuditError,
    BroughtColumnsError,
    MissingLogpsError,
    RankFailedError,
    ReferenceChangedError,
    ReferenceLogpsError,
    StepZeroError,
    UnusableLogpsError,
)
from reflogp_trainer.join import JoinRecord, join_reference_logps
from reflogp_trainer.online import RemoteReference
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

#: TRL's trainers: their parents take seconds to import, and are not in every TRL, nor is TRL everywhere. Imported when they are
#: first asked for.
_LATER = {
    "CachedDPOTrainer": "reflogp_trainer.dpo",
    "CachedKTOTrainer": "reflogp_trainer.kto",
    "RemoteGRPOTrainer": "reflogp_trainer.online.grpo",
    "RemoteOnlineDPOTrainer": "reflogp_trainer.online.online_dpo",
    "RemoteRLOOTrainer": "reflogp_trainer.online.rloo",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
