"""Errors of the trainer extension; all are subclasses of the store's ReflogpError.

ReflogpError (reflogp.store.errors)
└── ReferenceLogpsError          a training run cannot trust its reference log-probs
    ├── MissingLogpsError        rows whose sequences were never scored
    ├── UnusableLogpsError       rows whose values are damaged or not finite
    ├── BroughtColumnsError      a dataset's own reference columns differ from the reference's values
    ├── ReferenceChangedError    a service no longer has the run's reference model
    ├── RankFailedError          another process of a distributed run failed
    └── AuditError               the audit found wrong, missing or recomputed reference values
        └── StepZeroError        the policy does not start at the joined reference
"""

from __future__ import annotations

from reflogp.store import ReflogpError


class ReferenceLogpsError(ReflogpError):
    """A training run cannot trust its reference log-probs."""


class MissingLogpsError(ReferenceLogpsError):
    """Rows whose sequences were never scored.

    Attributes:
        rows: the row numbers in the trainer's tokenised dataset; if several datasets have such rows, the row numbers in the
            first.
        command: the command line that scores the rows of all datasets; empty if the values come from a file.
        datasets: name of each dataset with such rows ("train", "eval", or a key of the evaluation sets) -> the row numbers.
    """

    def __init__(self, message: str, rows: list[int], command: str, datasets: dict[str, list[int]] | None = None) -> None:
        super().__init__(message)
        self.rows = rows
        self.command = command
        self.datasets = datasets or {}


class UnusableLogpsError(ReferenceLogpsError):
    """Rows whose values are damaged or not finite.

    Attributes:
        rows: the row numbers in the trainer's tokenised dataset.
    """

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class BroughtColumnsError(ReferenceLogpsError):
    """A dataset's own reference columns differ from the reference's values, or cannot be verified.

    Attributes:
        rows: numbers of the rows that differ, in the trainer's tokenised dataset.
    """

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class ReferenceChangedError(ReferenceLogpsError):
    """A service no longer has the reference model with which a run began."""


class RankFailedError(ReferenceLogpsError):
    """Another process of a distributed run failed; the error of the other process says why."""


class AuditError(ReferenceLogpsError):
    """The audit of a run found reference values that are wrong, missing or computed again.

    Attributes:
        check: name of the check that found the values.
    """

    def __init__(self, message: str, check: str = "") -> None:
        super().__init__(message)
        self.check = check


class StepZeroError(AuditError):
    """The policy's log-probs differ from the joined reference's by more than the tolerance before the first step."""
