"""Supply frameworks other than TRL with reference log-probs for their training batches, from a store or a service.

Each framework tokenises, truncates and collates in its own way. Therefore, values are looked up before training for the
framework's own tokenised datasets, and each row of a batch is then found by its tokens.
"""

from reflogp.trainer.batches.reference import BatchReference
from reflogp.trainer.batches.sequences import LabelledColumns, TokenDataset

__all__ = ["BatchReference", "LabelledColumns", "TokenDataset"]
