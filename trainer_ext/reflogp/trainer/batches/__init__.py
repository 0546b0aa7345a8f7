"""Give frameworks other than TRL the reference log-probs of the batches that they train on, from a store or a service.

A framework tokenises, truncates and collates in its own way. So the values of its tokenised datasets are looked up before
training, and in a batch each row is found by its tokens.
"""

from reflogp.trainer.batches.reference import BatchReference
from reflogp.trainer.batches.sequences import LabelledColumns, TokenDataset

__all__ = ["BatchReference", "LabelledColumns", "TokenDataset"]
