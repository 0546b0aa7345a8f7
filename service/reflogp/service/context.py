"""Define the object through which routes access the components of a running service."""

from __future__ import annotations

from dataclasses import dataclass

from reflogp.service.large_requests import LargeRequests
from reflogp.service.ledger import Ledger
from reflogp.service.metrics import Metrics
from reflogp.service.online import OnlineScoring
from reflogp.service.precompute import Precompute
from reflogp.service.registry import ReferenceRegistry
from reflogp.service.settings import ServerSettings
from reflogp.service.uploads import Uploads


@dataclass(frozen=True)
class Context:
    """The components of a running service.

    Attributes:
        settings: settings that the service was started with.
        registry: references and their snapshots.
        ledger: records of all jobs and uploads.
        precompute: submits, cancels and retries jobs, assigns them to workers, and follows their progress.
        online: scores sequences while the caller waits.
        uploads: uploaded dataset files.
        metrics: counters, gauges and histograms.
        large: limits how many large requests are processed at the same time.
    """

    settings: ServerSettings
    registry: ReferenceRegistry
    ledger: Ledger
    precompute: Precompute
    online: OnlineScoring
    uploads: Uploads
    metrics: Metrics
    large: LargeRequests
