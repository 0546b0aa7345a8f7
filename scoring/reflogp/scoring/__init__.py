"""Score datasets with a reference model, join its log-probs into them, and report on them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reflogp.scoring.api import join, report, score
    from reflogp.scoring.engines import EngineChoice
    from reflogp.scoring.torch_engine import Sequence, TorchEngine

#: Where a public name is defined: a service's process imports this package, and does without torch.
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
    """Import what a name is defined in when it is first asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
