"""Call a scoring service over HTTP. The client needs httpx, but not torch."""

from reflogp.client.client import AsyncClient, Client
from reflogp.client.errors import (
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
from reflogp.client.models import Job, JobPage, JobProgress, JobSettings, ServicePath, ServiceUri, Uploaded, UploadInfo
from reflogp.client.protocol import Lookup, ReferenceInfo
from reflogp.client.scoring import Scores

__all__ = [
    "AsyncClient",
    "Client",
    "DeadlineExceededError",
    "Job",
    "JobFailedError",
    "JobPage",
    "JobProgress",
    "JobSettings",
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
