"""Supply frameworks other than TRL with reference log-probs for their training batches, from a store or a service.

Each framework tokenises, truncates and collates in its own way. Therefore, the values are looked up before training, for the
datasets as the framework tokenised them. During training, the tokens of each row in a batch identify the row's values.
"""

from reflogp.trainer.batches.reference import BatchReference
from reflogp.trainer.batches.sequences import LabelledColumns, TokenDataset

__all__ = ["BatchReference", "LabelledColumns", "TokenDataset"]
