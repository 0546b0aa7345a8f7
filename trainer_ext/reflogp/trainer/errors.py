"""The errors of the trainer extension."""

from __future__ import annotations

from reflogp.store import ReflogpError


class ReferenceLogpsError(ReflogpError):
    """A training run's reference log-probs are missing or cannot be trusted."""


class MissingLogpsError(ReferenceLogpsError):
    """Some rows have sequences without stored values.

    Attributes:
        datasets: dict from the name of each dataset with such rows ("train", "eval", the key in a dictionary of evaluation
            datasets) to the rows' indices in the tokenized dataset.
        command: command that scores the missing rows of all datasets; empty if the values come from a file.
    """

    def __init__(self, message: str, datasets: dict[str, list[int]], command: str) -> None:
        super().__init__(message)
        self.datasets = datasets
        self.command = command

    @property
    def rows(self) -> list[int]:
        """Return the indices of the first dataset's rows without values."""
        return next(iter(self.datasets.values()), [])


class UnusableLogpsError(ReferenceLogpsError):
    """Some rows have damaged or non-finite values, or cannot be scored by a service during training.

    Attributes:
        rows: indices of these rows in the tokenized dataset or, if a service scores batches during training, in the batch.
    """

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class StepZeroError(ReferenceLogpsError):
    """Before the first step, the policy's log-probs differ from the reference log-probs by more than rounding."""


class ReferenceChangedError(ReferenceLogpsError):
    """A service no longer serves the reference model that the run started with."""


class RankFailedError(ReferenceLogpsError):
    """Another process of a distributed run failed; the error on that process gives the reason."""
