"""Run a service with uvicorn until SIGTERM or Ctrl-C.

At the end event streams close at once, so that they do not delay the shutdown. Requests get time to finish. Then jobs commit
their computed values and workers end.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

import uvicorn

from reflogp.service.app import create_app
from reflogp.service.connections import ConnectionConfig, waiting_connections
from reflogp.service.logs import install_logging
from reflogp.service.request_memory import give_memory_back
from reflogp.service.settings import ServerSettings

#: Seconds that open requests get to finish.
_GRACE_SECONDS = 20


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_exit()
        super().handle_exit(sig, frame)


def run(settings: ServerSettings) -> None:
    """Run the service; return when it has ended. Raises what `create_app` raises."""
    give_memory_back()
    app = create_app(settings)
    install_logging(settings.log_format)
    config = ConnectionConfig(
        app,
        settings.head_seconds,
        settings.answer_idle_seconds,
        waiting_connections(settings.max_connections),
        host=settings.host,
        port=settings.port,
        h11_max_incomplete_event_size=settings.max_head_bytes,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        log_config=None,
        server_header=False,
        access_log=settings.access_log,
    )
    _Server(config, app.state.context.precompute.drain).run()
