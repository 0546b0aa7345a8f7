"""Define the errors of the trainer extension, which are all subclasses of the store's ReflogpError.

ReflogpError (reflogp.store.errors)
└── ReferenceLogpsError          a training run's reference log-probs cannot be trusted
    ├── MissingLogpsError        rows whose sequences were never scored
    ├── UnusableLogpsError       rows whose values are damaged or not finite
    ├── BroughtColumnsError      a dataset's existing reference columns differ from the reference's values
    ├── ReferenceChangedError    a service no longer serves the run's reference model
    ├── RankFailedError          another process of a distributed run failed
    └── AuditError               the audit found wrong, missing or recomputed reference values
        └── StepZeroError        before the first step, the policy's log-probs differ from the reference's
"""

from __future__ import annotations

from reflogp.store import ReflogpError


class ReferenceLogpsError(ReflogpError):
    """A training run's reference log-probs cannot be trusted."""


class MissingLogpsError(ReferenceLogpsError):
    """Some rows have sequences that were never scored.

    Attributes:
        rows: indices of these rows in the trainer's tokenized dataset. If several datasets have such rows, `rows` lists only
            those of the first one.
        command: command that scores the missing rows of all datasets; empty if the values come from a file.
        datasets: indices of these rows in each dataset, by dataset name ("train", "eval", or the key in a dictionary of
            evaluation datasets).
    """

    def __init__(self, message: str, rows: list[int], command: str, datasets: dict[str, list[int]] | None = None) -> None:
        super().__init__(message)
        self.rows = rows
        self.command = command
        self.datasets = datasets or {}


class UnusableLogpsError(ReferenceLogpsError):
    """Some rows have values that are damaged or not finite.

    Attributes:
        rows: indices of these rows in the trainer's tokenized dataset.
    """

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class BroughtColumnsError(ReferenceLogpsError):
    """A dataset already has reference columns whose values are NaN or differ from the reference's.

    Attributes:
        rows: indices of the rows whose values differ, in the trainer's tokenized dataset.
    """

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class ReferenceChangedError(ReferenceLogpsError):
    """A service no longer serves the reference model that the run started with."""


class RankFailedError(ReferenceLogpsError):
    """Another process of a distributed run failed; the error on that process gives the reason."""


class AuditError(ReferenceLogpsError):
    """The audit of a run found reference values that are wrong, missing or recomputed.

    Attributes:
        check: name of the check that failed.
    """

    def __init__(self, message: str, check: str = "") -> None:
        super().__init__(message)
        self.check = check


class StepZeroError(AuditError):
    """Before the first step, the policy's log-probs differ from the joined reference log-probs by more than the tolerance."""
