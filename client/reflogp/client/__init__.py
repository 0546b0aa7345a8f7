"""Call a scoring service over HTTP. The client needs httpx, but not torch."""

from reflogp.client.client import Client
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
from reflogp.client.models import (
    Job,
    JobPage,
    JobProgress,
    Lookup,
    ReferenceInfo,
    Scores,
    ServicePath,
    ServiceUri,
    Uploaded,
    UploadInfo,
)

__all__ = [
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
