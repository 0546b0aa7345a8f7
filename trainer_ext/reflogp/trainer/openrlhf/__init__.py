"""Provide stored reference log-probs to OpenRLHF's DPO training, so that no GPU holds a reference model.

`python -m reflogp.trainer.openrlhf.train_dpo` replaces `python -m openrlhf.cli.train_dpo`. Custom scripts can pass
`CachedReference` as DPOTrainer's ref_model, or use `CachedReferenceDPOTrainer` from this package's module `trainer`. That
module can be imported only if openrlhf is installed.
"""

from reflogp.trainer.openrlhf.reference import CachedReference

__all__ = ["CachedReference"]
