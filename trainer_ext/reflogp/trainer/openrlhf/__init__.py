"""Gives stored reference log-probs to OpenRLHF's DPO training: no GPU holds a reference model.

`python -m reflogp.trainer.openrlhf.train_dpo` stands for `python -m openrlhf.cli.train_dpo`. For a script of one's own there
are `CachedReference` here, which goes where DPOTrainer takes its ref_model, and `trainer.CachedReferenceDPOTrainer`, which
needs openrlhf.
"""

from reflogp.trainer.openrlhf.reference import CachedReference

__all__ = ["CachedReference"]
