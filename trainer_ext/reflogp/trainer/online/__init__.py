"""Reference log-probs of text that was generated a moment ago: a service has the reference model, and answers over HTTP."""

from reflogp.trainer.remote import RemoteReference

__all__ = ["RemoteReference"]
