"""Format the log records of the service and its workers as human-readable lines."""

from __future__ import annotations

import logging

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
