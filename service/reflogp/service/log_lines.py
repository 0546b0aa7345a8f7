"""Format the log records of the service, its workers and runners as human-readable lines."""

from __future__ import annotations

import logging
import os
import signal
import sys

from reflogp.scoring.machine import quiet_libraries
from reflogp.store.texts import LineFormatter

FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s"


class LogLine(LineFormatter):
    """A log formatter that appends the record's job id and request id, if any, to the line."""

    def __init__(self) -> None:
        super().__init__(FIELDS)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        for name in ("job", "request"):
            about = getattr(record, name, None)
            if about is not None:
                line += f" [{name} {about}]"
        return line


def set_up_process() -> None:
    """Let a process that the service has started write to the service's log, and ignore Ctrl-C."""
    # Ctrl-C reaches the whole process group, but the service decides when its processes end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what libraries print goes to the log
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLine())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    quiet_libraries()
