"""What every route needs, in one object: the parts of a running service.

Knows which parts there are, not what they do. Made once by the app, handed to each group of routes.
"""

from __future__ import annotations

from dataclasses import dataclass

from reflogp_service.server.ledger import Ledger
from reflogp_service.server.metrics import Metrics
from reflogp_service.server.online import OnlineScoring
from reflogp_service.server.precompute import Precompute
from reflogp_service.server.request_memory import RequestMemory
from reflogp_service.server.settings import ServerSettings
from reflogp_service.server.shelf import Shelf
from reflogp_service.server.uploads import UploadFolder


@dataclass(frozen=True)
class Context:
    """The parts of a running service.

    Attributes:
        settings: as given at the start.
        shelf: references and their snapshots.
        ledger: jobs.
        precompute: submits, cancels, retries and watches jobs.
        online: scores sequences at once.
        uploads: dataset files that were sent.
        metrics: counters and gauges.
        request_memory: of all requests under way.
    """

    settings: ServerSettings
    shelf: Shelf
    ledger: Ledger
    precompute: Precompute
    online: OnlineScoring
    uploads: UploadFolder
    metrics: Metrics
    request_memory: RequestMemory
