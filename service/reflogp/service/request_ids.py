"""The current request's id and W3C trace context (traceparent), from which the trace of a submitted job continues."""

from __future__ import annotations

import logging
from contextvars import ContextVar

_current: ContextVar[tuple[str | None, str | None]] = ContextVar("request", default=(None, None))


def request_id() -> str | None:
    return _current.get()[0]


def traceparent() -> str | None:
    return _current.get()[1]


def set_request(own: str, parent: str | None) -> None:
    """Set the id and the trace context of the request that the current task handles."""
    _current.set((own, parent))


def add_request_id(record: logging.LogRecord) -> bool:
    """Filter of log handlers that adds the id of the current request to a record, as the attribute `request`."""
    own = request_id()
    if own is not None and not hasattr(record, "request"):
        record.request = own
    return True
