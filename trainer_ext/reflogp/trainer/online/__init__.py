"""Get reference log-probs of newly generated text from a service that has the reference model, over HTTP."""

from reflogp.trainer.remote import RemoteReference

__all__ = ["RemoteReference"]
