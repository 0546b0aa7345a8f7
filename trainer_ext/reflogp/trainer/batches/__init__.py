"""Supply frameworks other than TRL with reference log-probs from a store or a service for their training batches.

Frameworks differ in how they tokenize, truncate and collate. Therefore, each framework's own code tokenizes the datasets.
Before training starts, the reference log-probs of all tokenized rows are looked up. During training, the tokens of each row in
a batch identify the row's log-probs.
"""

from reflogp.trainer.batches.reference import BatchReference
from reflogp.trainer.batches.sequences import LabelledColumns, TokenDataset

__all__ = ["BatchReference", "LabelledColumns", "TokenDataset"]
