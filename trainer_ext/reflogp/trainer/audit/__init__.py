"""Watches a training run: are the reference log-probs there, right, and used, and does the run do what its settings say."""

from reflogp.trainer.audit.callback import ReferenceAudit, watching
from reflogp.trainer.audit.step_zero import StepZero

__all__ = ["ReferenceAudit", "StepZero", "watching"]
