"""Get reference log-probs for newly generated text over HTTP, from a service that runs the reference model."""

from reflogp.trainer.remote import RemoteReference

__all__ = ["RemoteReference"]
