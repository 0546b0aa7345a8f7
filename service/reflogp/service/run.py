"""Set up logging and run a service with uvicorn until SIGTERM or Ctrl-C.

The log has lines for people, or one JSON object per line for programs. Records about a job carry the job's id.

At the end event streams close at once, so that they do not delay the shutdown. Requests get time to finish. Then jobs commit
their computed values and workers end.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

import uvicorn
from pythonjsonlogger.json import JsonFormatter

from reflogp.service.app import create_app
from reflogp.service.connections import ConnectionConfig, waiting_connections
from reflogp.service.log_lines import FIELDS, LogLine
from reflogp.service.request_ids import add_request_id
from reflogp.service.request_memory import give_memory_back
from reflogp.service.settings import ServerSettings
from reflogp.store.texts import hide_secrets


class _ForPrograms(JsonFormatter):
    """Formats a record as a JSON object in ASCII, so that no text can end the object or control a terminal."""

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        super().add_fields(log_data, record, message_dict)
        log_data.update({name: hide_secrets(value) for name, value in log_data.items() if isinstance(value, str)})


def install_logging(form: Literal["text", "json"]) -> None:
    """Send this process's log to stderr in the given format."""
    handler = logging.StreamHandler(sys.stderr)
    renamed = {"asctime": "time", "levelname": "level", "name": "logger"}
    handler.setFormatter(_ForPrograms(FIELDS, rename_fields=renamed) if form == "json" else LogLine())
    handler.addFilter(add_request_id)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)  # warnings may quote secrets too, which the formatters hide


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
