"""Format log records of the service and of its workers as lines for people."""

from __future__ import annotations

import logging

from reflogp.store.texts import LineFormatter

FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s"


class LogLine(LineFormatter):
    """Formats a record as a line, with the ids of the job and of the request that it is about at the end."""

    def __init__(self) -> None:
        super().__init__(FIELDS)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        for name in ("job", "request"):
            about = getattr(record, name, None)
            if about is not None:
                line += f" [{name} {about}]"
        return line
