"""Define the object through which routes access the components of a running service."""

from __future__ import annotations

from dataclasses import dataclass

from reflogp.service.bodies import LargeRequests
from reflogp.service.dataset_files import Uploads
from reflogp.service.ledger import Ledger
from reflogp.service.metrics import Metrics
from reflogp.service.online import OnlineScoring
from reflogp.service.pool import Pool
from reflogp.service.precompute import Precompute
from reflogp.service.registry import ReferenceRegistry
from reflogp.service.scheduling import JobScheduler
from reflogp.service.settings import ServerSettings


@dataclass(frozen=True)
class Context:
    """The components of a running service."""

    settings: ServerSettings
    registry: ReferenceRegistry
    ledger: Ledger
    precompute: Precompute
    scheduler: JobScheduler
    online: OnlineScoring
    pool: Pool
    uploads: Uploads
    metrics: Metrics
    large: LargeRequests
