"""Audit a training run: check that its reference log-probs are present, correct and used, and that the run follows the
trainer's settings."""

from reflogp.trainer.audit.callback import ReferenceAudit, watching
from reflogp.trainer.audit.step_zero import StepZero

__all__ = ["ReferenceAudit", "StepZero", "watching"]
