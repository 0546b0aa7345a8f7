"""Run models with torch, and compute the log-probs of completion tokens as float32 numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reflogp.scoring.torch_engine.sequences import Logps, Outcome, Sequence

if TYPE_CHECKING:
    from reflogp.scoring.torch_engine.engine import TorchEngine

__all__ = ["Logps", "Outcome", "Sequence", "TorchEngine"]


def __getattr__(name: str) -> Any:
    """Import TorchEngine only when it is first used, because its module imports torch and transformers."""
    if name == "TorchEngine":
        from reflogp.scoring.torch_engine.engine import TorchEngine

        return TorchEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
