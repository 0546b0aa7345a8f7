"""Gives stored reference log-probs to trainers: no training GPU holds a reference model.

Needs datasets, accelerate and transformers; trl where one of its trainers is asked for, so not with OpenRLHF. Never imports an
engine or a server.
"""

import importlib
from typing import Any

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
    "CachedDPOTrainer": "reflogp.trainer.dpo",
    "CachedKTOTrainer": "reflogp.trainer.kto",
    "RemoteGRPOTrainer": "reflogp.trainer.online.grpo",
    "RemoteOnlineDPOTrainer": "reflogp.trainer.online.online_dpo",
    "RemoteRLOOTrainer": "reflogp.trainer.online.rloo",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
