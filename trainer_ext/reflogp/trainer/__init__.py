"""Supply trainers with reference log-probs from a store, a service or a file, so that no training GPU has to hold a reference
model.

This package requires torch, transformers, datasets and accelerate. The trainers derived from TRL's require trl; the launchers
for other frameworks do not. This package never imports `reflogp.scoring` or `reflogp.service`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from reflogp.trainer.errors import MissingLogpsError, StepZeroError
from reflogp.trainer.reference import Reference

if TYPE_CHECKING:
    from reflogp.trainer.cached import CachedDPOTrainer, CachedKTOTrainer, CachedReferenceMixin, patch
    from reflogp.trainer.online import RemoteGRPOTrainer, RemoteOnlineDPOTrainer, RemoteRLOOTrainer

__all__ = [
    "CachedDPOTrainer",
    "CachedKTOTrainer",
    "CachedReferenceMixin",
    "MissingLogpsError",
    "Reference",
    "RemoteGRPOTrainer",
    "RemoteOnlineDPOTrainer",
    "RemoteRLOOTrainer",
    "StepZeroError",
    "patch",
]


def __getattr__(name: str) -> Any:
    """Import TRL's trainers on first access, because they take seconds to import, and because TRL may not be installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        importlib.import_module("reflogp.trainer.online" if name.startswith("Remote") else "reflogp.trainer.cached"), name
    )
