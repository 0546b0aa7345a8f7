"""Give every request an id, chosen by its caller or here, which its response and the log lines about it have: X-Request-Id."""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
#: What a caller may choose; anything else could not be searched for in a log.
_CHOSEN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_current: ContextVar[str | None] = ContextVar("request_id", default=None)


def request_id() -> str | None:
    """Return the id of the request that is handled here; None outside of a request."""
    return _current.get()


class RequestIds:
    """ASGI middleware that sets the request's id and adds it to the response, including errors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        chosen = Headers(scope=scope).get(HEADER, "")
        own = chosen if _CHOSEN.fullmatch(chosen) else uuid.uuid4().hex

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = own
            await send(message)

        token = _current.set(own)
        try:
            await self._app(scope, receive, with_id)
        finally:
            _current.reset(token)


def add_request_id(record: logging.LogRecord) -> bool:
    """Add the id of the current request to a log record as `request`; a filter for log handlers that keeps every record."""
    own = request_id()
    if own is not None and not hasattr(record, "request"):
        record.request = own
    return True
