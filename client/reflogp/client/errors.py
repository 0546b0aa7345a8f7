"""Errors of the client, below the store's ReflogpError.

ReflogpError (reflogp.store.errors)
├── RowsWithoutValuesError    an export needs a value for every row, and some have none
└── ServiceError              a service did not do what was asked
    ├── ServiceUnreachableError   no connection, or no answer in time
    ├── DeadlineExceededError     not done within the time that the caller gave
    ├── ServiceBusyError          429 or 503, after the retries
    ├── NotAllowedError           401 or 403
    ├── RequestRefusedError       another 4xx: the request is wrong
    ├── ServiceFailedError        another 5xx, or an answer that is none
    ├── SequencesRefusedError     some sequences could not be scored; has the others' values
    └── JobFailedError            a job failed or was cancelled
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from reflogp.store import ReflogpError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from reflogp.client.models import Job

#: Sequences whose problem an error's message tells; the rest is counted.
_TOLD = 3
#: Rows that an error's message names; the rest is counted.
_NAMED = 10


class RowsWithoutValuesError(ReflogpError):
    """Rows of a dataset have no values, and the format needs all.

    Attributes:
        reasons: row number -> why it has none, "" where the file does not say, in order.
        rows: rows of the dataset.
    """

    def __init__(self, file: str, reasons: dict[int, str], rows: int) -> None:
        super().__init__(
            f"{len(reasons)} of {rows} rows have no values in {file}: {named_rows(reasons, reasons)}. An export needs "
            "every row of the dataset: score what is missing, or take the rows out of the dataset, and write the file again"
        )
        self.reasons = dict(sorted(reasons.items()))
        self.rows = rows


def named_rows(rows: Iterable[int], reasons: Mapping[int, str] | None = None) -> str:
    """The first few rows by number, with what is said of each."""
    numbers = sorted(map(int, rows))
    told = [f"{row} ({reasons[row]})" if reasons and reasons.get(row) else str(row) for row in numbers[:_NAMED]]
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{'row' if len(numbers) == 1 else 'rows'} {', '.join(told)}{more}"


class ServiceError(ReflogpError):
    """A service did not do what was asked.

    Attributes:
        status: HTTP status; None where there was no answer.
        next_step: what the service says can be done.
    """

    def __init__(self, message: str, status: int | None = None, next_step: str = "") -> None:
        super().__init__(f"{message}. {next_step[:1].upper()}{next_step[1:]}" if next_step else message)
        self.status = status
        self.next_step = next_step


class ServiceUnreachableError(ServiceError):
    """No connection, or no answer in time."""


class DeadlineExceededError(ServiceError):
    """Not done within the time that the caller gave: its `deadline` or `timeout` (504 where the service says so)."""


class ServiceBusyError(ServiceError):
    """The service cannot answer now (429, 503), also after the retries."""


class NotAllowedError(ServiceError):
    """No valid token, or one without the scope (401, 403)."""


class RequestRefusedError(ServiceError):
    """The request is wrong (another 4xx)."""


class ServiceFailedError(ServiceError):
    """The service failed (another 5xx), or gave an answer that cannot be read."""


class SequencesRefusedError(ServiceError):
    """Some sequences could not be scored; the others were.

    Attributes:
        problems: position of a sequence -> why it has no values.
        results: float32 arrays in the order of the request; None where there is a problem.
    """

    def __init__(self, problems: dict[int, str], results: list[npt.NDArray[np.float32] | None]) -> None:
        told = "; ".join(f"{position}: {problem}" for position, problem in list(problems.items())[:_TOLD])
        more = f"; and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
        super().__init__(f"{len(problems)} of {len(results)} sequences have no values ({told}{more})")
        self.problems = problems
        self.results = results


class JobFailedError(ServiceError):
    """A job failed or was cancelled. `job` is its last state."""

    def __init__(self, job: Job) -> None:
        super().__init__(f"job {job.id} {'was cancelled' if job.state == 'cancelled' else f'failed: {job.error}'}")
        self.job = job
