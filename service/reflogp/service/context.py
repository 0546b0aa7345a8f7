"""Hold the parts of a running service that routes need, in one object."""

from __future__ import annotations

from dataclasses import dataclass

from reflogp.service.ledger import Ledger
from reflogp.service.metrics import Metrics
from reflogp.service.online import OnlineScoring
from reflogp.service.precompute import Precompute
from reflogp.service.registry import ReferenceRegistry
from reflogp.service.request_memory import RequestMemory
from reflogp.service.settings import ServerSettings
from reflogp.service.uploads import UploadFolder


@dataclass(frozen=True)
class Context:
    """The parts of a running service.

    Attributes:
        settings: as given at the start.
        registry: references and their snapshots.
        ledger: jobs.
        precompute: submits, cancels, retries and watches jobs.
        online: scores sequences at once.
        uploads: dataset files that were uploaded.
        metrics: counters and gauges.
        request_memory: memory of all requests under way.
    """

    settings: ServerSettings
    registry: ReferenceRegistry
    ledger: Ledger
    precompute: Precompute
    online: OnlineScoring
    uploads: UploadFolder
    metrics: Metrics
    request_memory: RequestMemory
