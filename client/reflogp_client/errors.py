"""Errors of the client, below the store's ReflogpError.

ReflogpError (reflogp_store.errors)
└── ServiceError              a service did not do what was asked
    ├── ServiceUnreachableError   no connection, or no answer in time
    ├── ServiceBusyError          429 or 503, after the retries
    ├── NotAllowedError           401 or 403
    ├── RequestRefusedError       another 4xx: the request is wrong
    └── ServiceFailedError        another 5xx, or an answer that is none
"""

from __future__ import annotations

from reflogp_store import ReflogpError


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


class ServiceBusyError(ServiceError):
    """The service cannot answer now (429, 503), also after the retries."""


class NotAllowedError(ServiceError):
    """No valid token, or one without the scope (401, 403)."""


class RequestRefusedError(ServiceError):
    """The request is wrong (another 4xx)."""


class ServiceFailedError(ServiceError):
    """The service failed (another 5xx), or gave an answer that cannot be read."""
