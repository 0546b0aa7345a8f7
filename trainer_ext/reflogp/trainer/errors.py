"""Define the errors of the trainer extension, which are all subclasses of the store's ReflogpError.

ReflogpError (reflogp.store.errors)
└── ReferenceLogpsError          a training run's reference log-probs are missing or cannot be trusted
    ├── MissingLogpsError        rows have sequences without stored values
    ├── UnusableLogpsError       rows have values that are damaged or not finite
    ├── BroughtColumnsError      a dataset's existing reference columns differ from the reference's values
    ├── ReferenceChangedError    a service no longer serves the run's reference model
    ├── RankFailedError          another process of a distributed run failed
    └── AuditError               reference values are wrong, missing in a batch, or computed again in training
        └── StepZeroError        before the first step, the policy's log-probs differ from the reference's
"""

from __future__ import annotations

from reflogp.store import ReflogpError


class ReferenceLogpsError(ReflogpError):
    """A training run's reference log-probs are missing or cannot be trusted."""


class MissingLogpsError(ReferenceLogpsError):
    """Some rows have sequences without stored values.

    With a framework other than TRL, this error is also raised if a batch contains a row that is in none of the datasets whose
    values were looked up. In this case, `rows` contains the row's index in the batch, and `command` is empty.

    Attributes:
        rows: indices (in the tokenized dataset) of the rows without stored values. If several datasets have such rows, `rows`
            contains only the indices in the first of these datasets.
        command: command that scores the missing rows of all datasets; empty if the values come from a file.
        datasets: dict from each dataset's name to the indices of its rows without stored values. The name is "train", "eval",
            the key in a dictionary of evaluation datasets, or "the dataset" (if `join_reference_logps` raises the error). The
            dict is empty for frameworks other than TRL.
    """

    def __init__(self, message: str, rows: list[int], command: str, datasets: dict[str, list[int]] | None = None) -> None:
        super().__init__(message)
        self.rows = rows
        self.command = command
        self.datasets = datasets or {}


class UnusableLogpsError(ReferenceLogpsError):
    """Some rows have damaged or non-finite values, or cannot be scored by a service during training.

    Attributes:
        rows: indices of these rows in the tokenized dataset or, if a service scores batches during training, in the batch.
    """

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class BroughtColumnsError(ReferenceLogpsError):
    """A dataset already has reference columns whose values are NaN or differ from the reference's.

    Attributes:
        rows: indices (in the tokenized dataset) of the rows whose values differ or are NaN.
    """

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class ReferenceChangedError(ReferenceLogpsError):
    """A service no longer serves the reference model that the run started with."""


class RankFailedError(ReferenceLogpsError):
    """Another process of a distributed run failed; the error on that process gives the reason."""


class AuditError(ReferenceLogpsError):
    """The audit of a run found that reference values are wrong, missing in a batch, or computed again during training.

    Attributes:
        check: name of the check that failed.
    """

    def __init__(self, message: str, check: str = "") -> None:
        super().__init__(message)
        self.check = check


class StepZeroError(AuditError):
    """Before the first step, the policy's log-probs differ from the reference log-probs by more than the tolerance.

    If no tolerance is set, this error is also raised if the policy and the reference compute in different dtypes. The check
    `spot_check` raises this error too. If the spot check uses a service, it compares the service's log-probs, instead of the
    policy's, with the reference log-probs.
    """
