"""Supply frameworks other than TRL with reference log-probs for their training batches, from a store or a service.

Frameworks differ in how they tokenize, truncate and collate. Therefore, the framework tokenizes its own datasets,
and the values of all rows are then looked up before training starts. During training, the tokens of each row in a batch
identify the row's values.
"""

from reflogp.trainer.batches.reference import BatchReference
from reflogp.trainer.batches.sequences import LabelledColumns, TokenDataset

__all__ = ["BatchReference", "LabelledColumns", "TokenDataset"]
