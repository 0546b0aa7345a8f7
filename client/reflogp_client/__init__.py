"""Talks to a scoring service, and holds the `reflogp` command. Needs httpx, no torch."""

from reflogp_client.client import AsyncClient, Client
from reflogp_client.errors import (
    NotAllowedError,
    RequestRefusedError,
    ServiceBusyError,
    ServiceError,
    ServiceFailedError,
    ServiceUnreachableError,
)
from reflogp_client.wire import Lookup, ReferenceInfo

__all__ = [
    "AsyncClient",
    "Client",
    "Lookup",
    "NotAllowedError",
    "ReferenceInfo",
    "RequestRefusedError",
    "ServiceBusyError",
    "ServiceError",
    "ServiceFailedError",
    "ServiceUnreachableError",
]
