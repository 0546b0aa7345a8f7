"""Give every request an id, and add the id to the response (X-Request-Id) and to log lines about the request.

A caller may choose the id by sending the same header. This module also stores the W3C trace context (traceparent) of each
request, so that the trace of a submitted job continues the caller's trace.
"""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
#: Pattern of ids that a caller may choose. It allows only characters that are easy to search for in a log.
_CHOSEN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: Pattern of a traceparent header. It matches version 00, and later versions that only add fields at the end.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,200})?")
_current: ContextVar[str | None] = ContextVar("request_id", default=None)
_traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)


def request_id() -> str | None:
    return _current.get()


def traceparent() -> str | None:
    return _traceparent.get()


class RequestIds:
    """ASGI middleware that sets each request's id and trace context, and adds the id to all responses, also error responses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        chosen, parent = headers.get(HEADER, ""), headers.get("traceparent", "")
        own = chosen if _CHOSEN.fullmatch(chosen) else uuid.uuid4().hex

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = own
            await send(message)

        tokens = _current.set(own), _traceparent.set(parent if _TRACEPARENT.fullmatch(parent) else None)
        try:
            await self._app(scope, receive, with_id)
        finally:
            _current.reset(tokens[0])
            _traceparent.reset(tokens[1])


def add_request_id(record: logging.LogRecord) -> bool:
    """Filter of log handlers that adds the id of the current request to a record, as the attribute `request`."""
    own = request_id()
    if own is not None and not hasattr(record, "request"):
        record.request = own
    return True
