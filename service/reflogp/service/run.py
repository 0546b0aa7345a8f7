"""Set up logging and run a service with uvicorn until SIGTERM or Ctrl-C.

The log consists of lines of text or, with the setting `log_format = "json"`, of one JSON object per line. Records about a job
include the job's id, and records about a request include the request's id.

When the service stops, requests that wait for a job's next change are answered at once. Other requests have _GRACE_SECONDS
seconds to finish. After that, running jobs commit the values that they have computed so far, and the workers
exit.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import socket
import sys
from types import FrameType
from typing import Any, Literal

import pyarrow as pa
import uvicorn
from pythonjsonlogger.json import JsonFormatter

from reflogp.service.app import create_app
from reflogp.service.context import Context
from reflogp.service.log_lines import FIELDS, LogLine
from reflogp.service.request_ids import add_request_id
from reflogp.service.settings import ServerSettings, unknown_variables
from reflogp.store.texts import hide_secrets

logger = logging.getLogger(__name__)


class _ForPrograms(JsonFormatter):
    """A log formatter that writes each record as a JSON object in ASCII.

    Because control characters and non-ASCII characters are escaped, nothing in a record can end the JSON object or send control
    codes to a terminal. Secrets in a record's texts are hidden.
    """

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        super().add_fields(log_data, record, message_dict)
        log_data.update({name: hide_secrets(value) for name, value in log_data.items() if isinstance(value, str)})


def install_logging(form: Literal["text", "json"]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    renamed = {"asctime": "time", "levelname": "level", "name": "logger"}
    handler.setFormatter(_ForPrograms(FIELDS, rename_fields=renamed) if form == "json" else LogLine())
    handler.addFilter(add_request_id)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)  # warnings may contain secrets, which the formatters remove


#: How many seconds open requests are given to finish when the service stops.
_GRACE_SECONDS = 20
_OPEN_FILES = 65_536
#: Number of the mallopt parameter (malloc.h) for the size of blocks that are returned when they are freed, and this size.
_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 512 << 10


#: A peer that has vanished is noticed after about two minutes, so that it does not hold a turn or space for an upload.
_KEEP_ALIVE = [
    (level, number, value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 60),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 15),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
    )
    if (number := getattr(socket, name, None)) is not None
]


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, context: Context) -> None:
        super().__init__(config)
        self._context = context

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in (listener for server in self.servers for listener in server.sockets):
            for level, option, value in _KEEP_ALIVE:  # connections inherit it
                listener.setsockopt(level, option, value)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._context.scheduler.drain()
        super().handle_exit(sig, frame)


def _allow_connections() -> None:
    """Raise the soft limit on open files, which many systems set to 1,024, so that thousands of trainers can stay connected."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _give_memory_back() -> None:
    """Make glibc return blocks of at least _MMAP_BYTES to the operating system as soon as they are freed, and Arrow use glibc.

    By itself, glibc raises this size up to 32 MiB whenever a larger block is freed. Other C libraries have no such setting.
    Arrow's own pool keeps what was allocated in one thread and freed in another until the first thread allocates again.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


def run(settings: ServerSettings) -> None:
    """Run the service, and return when it has stopped.

    Raise the same errors as `create_app`.
    """
    app = create_app(settings)
    install_logging(settings.log_format)
    if unknown := unknown_variables():
        logger.warning("ignored these environment variables, which name no setting: %s", ", ".join(unknown))
    _allow_connections()
    _give_memory_back()
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http="h11",  # which limits the length of a request's head
        ws="none",
        timeout_graceful_shutdown=_GRACE_SECONDS,
        log_config=None,
        server_header=False,
        access_log=False,  # a proxy has one, and /metrics counts and times requests
    )
    _Server(config, app.state.context).run()
