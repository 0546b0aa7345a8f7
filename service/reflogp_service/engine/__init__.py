"""Engines: token sequences in, float32 log-probs per completion token out. They know nothing of text or stores."""

from reflogp_service.engine.sequences import Sequence
from reflogp_service.engine.torch_engine import TorchEngine

__all__ = ["Sequence", "TorchEngine"]
