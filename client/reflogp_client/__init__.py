"""Talks to a scoring service, and holds the `reflogp` command. Needs httpx, no torch."""

from reflogp_client.client import AsyncClient, Client
from reflogp_client.errors import (
    DeadlineExceededError,
    JobFailedError,
    NotAllowedError,
    RequestRefusedError,
    SequencesRefusedError,
    ServiceBusyError,
    ServiceError,
    ServiceFailedError,
    ServiceUnreachableError,
)
from reflogp_client.jobs import Job, JobPage, JobProgress, ServicePath, ServiceUri, Uploaded, UploadInfo
from reflogp_client.scoring import Scores
from reflogp_client.wire import Lookup, ReferenceInfo

__all__ = [
    "AsyncClient",
    "Client",
    "DeadlineExceededError",
    "Job",
    "JobFailedError",
    "JobPage",
    "JobProgress",
    "Lookup",
    "NotAllowedError",
    "ReferenceInfo",
    "RequestRefusedError",
    "Scores",
    "SequencesRefusedError",
    "ServiceBusyError",
    "ServiceError",
    "ServiceFailedError",
    "ServicePath",
    "ServiceUnreachableError",
    "ServiceUri",
    "UploadInfo",
    "Uploaded",
]
