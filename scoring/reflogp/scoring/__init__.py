"""Score datasets with a reference model, add the log-probs to the datasets, and write reports about scored datasets."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reflogp.scoring.api import join, report, score
    from reflogp.scoring.engines import EngineChoice
    from reflogp.scoring.torch_engine import Sequence, TorchEngine

#: Dict from each public name to the module that defines it. Modules are imported on first access, so a service's
#: main process does not have to load torch.
_MODULES = {
    "EngineChoice": "reflogp.scoring.engines",
    "Sequence": "reflogp.scoring.torch_engine",
    "TorchEngine": "reflogp.scoring.torch_engine",
    "join": "reflogp.scoring.api",
    "report": "reflogp.scoring.api",
    "score": "reflogp.scoring.api",
}

__all__ = ["EngineChoice", "Sequence", "TorchEngine", "join", "report", "score"]


def __getattr__(name: str) -> Any:
    """Return the object with this public name; the module that defines it is imported on first access."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
