"""Errors of the trainer extension, below the store's ReflogpError.

ReflogpError (reflogp_store.errors)
└── ReferenceLogpsError          a training run cannot trust its reference log-probs
    ├── MissingLogpsError        rows whose sequences were never scored
    ├── UnusableLogpsError      rows whose stored values are damaged or not finite
    └── StepZeroError            the policy does not begin where the joined reference says it does
"""

from __future__ import annotations

from reflogp_store import ReflogpError


class ReferenceLogpsError(ReflogpError):
    """A training run cannot trust its reference log-probs."""


class MissingLogpsError(ReferenceLogpsError):
    """Rows whose sequences the store lacks.

    Attributes:
        rows: their numbers in the trainer's tokenised dataset.
        command: the command line that scores them.
    """

    def __init__(self, message: str, rows: list[int], command: str) -> None:
        super().__init__(message)
        self.rows = rows
        self.command = command


class UnusableLogpsError(ReferenceLogpsError):
    """Rows whose stored values are damaged or not finite.

    Attributes:
        rows: their numbers in the trainer's tokenised dataset.
    """

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class StepZeroError(ReferenceLogpsError):
    """The first batch's policy log-probs differ from the joined reference's by more than the tolerance."""
