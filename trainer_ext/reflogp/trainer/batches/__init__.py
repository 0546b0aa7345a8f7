"""Supply frameworks other than TRL with reference log-probs for their training batches, from a store or a service.

Frameworks differ in how they tokenize, truncate and collate. Therefore, the values are looked up for datasets that the
framework itself has tokenized, before training starts. During training, the tokens of each row in a batch identify the row's
values.
"""

from reflogp.trainer.batches.reference import BatchReference
from reflogp.trainer.batches.sequences import LabelledColumns, TokenDataset

__all__ = ["BatchReference", "LabelledColumns", "TokenDataset"]
