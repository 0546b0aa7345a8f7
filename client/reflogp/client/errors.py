"""The exception classes of the client. All are subclasses of the store's ReflogpError.

For an invalid argument, the client raises the store's UsageError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflogp.store import ReflogpError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from reflogp.client.models import Job

#: Maximum number of sequences whose problems an error message quotes. Any further sequences are only counted.
_TOLD = 3


class ServiceError(ReflogpError):
    """A service could not do what was requested.

    Attributes:
        status: HTTP status of the service's error response, or None if there was no such response.
        next_step: what the service tells the user to do next, or "".
    """

    def __init__(self, message: str, status: int | None = None, next_step: str = "") -> None:
        super().__init__(f"{message}. {next_step[:1].upper()}{next_step[1:]}" if next_step else message)
        self.status = status
        self.next_step = next_step


class ServiceUnreachableError(ServiceError):
    """The connection to the service failed or was lost, or there was no response in time."""


class DeadlineExceededError(ServiceError):
    """The caller's deadline or timeout, or the service's (five minutes), passed before the request or job was completed."""


class ServiceBusyError(ServiceError):
    """At every attempt, the service was too busy or temporarily unable to process the request (status 429 or 503)."""


class NotAllowedError(ServiceError):
    """The token is missing or invalid (status 401), or its scopes or the service's settings forbid the request (403)."""


class RequestRefusedError(ServiceError):
    """The service refused the request as invalid, or because it names an unknown job (any 4xx except 401, 403 and 429)."""


class ServiceFailedError(ServiceError):
    """The service failed (any 5xx status except 503 and 504), its response cannot be read, or an upload arrived damaged."""


class SequencesRefusedError(ServiceError):
    """Some sequences of a request could not be scored; the error contains the values of all the others.

    Attributes:
        problems: dict from the index of each sequence that could not be scored to the reason.
        results: list with one entry per sequence, in the order of the request: the sequence's values as a float32 array, or
            None if the sequence is in `problems`.
    """

    def __init__(self, problems: dict[int, str], results: list[npt.NDArray[np.float32] | None]) -> None:
        told = "; ".join(f"index {position}: {problem}" for position, problem in list(problems.items())[:_TOLD])
        more = f"; and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
        super().__init__(f"{len(problems)} of {len(results)} sequences could not be scored ({told}{more})")
        self.problems = problems
        self.results = results


class JobFailedError(ServiceError):
    """A job failed or was cancelled. `job` is the last known state of the job."""

    def __init__(self, job: Job) -> None:
        reason = f": {job.error}" if job.error else ""
        super().__init__(f"job {job.id} {'was cancelled' if job.state == 'cancelled' else f'failed{reason}'}")
        self.job = job
