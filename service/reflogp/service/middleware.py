"""Count and time every request, and refuse requests with a long head."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reflogp.service.metrics import Metrics
from reflogp.service.problems import Problem


class Timed:
    """Middleware that counts and times requests by route and status, from the end of the head to the response's last byte."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, status).observe(time.perf_counter() - start)


class HeadLimit:
    """Middleware that refuses requests with a long target or long headers.

    The server's own limit applies only to heads that arrive in several pieces.

    Args:
        max_bytes: maximum size of all headers together, and of the target.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refused = None
            if len(scope["raw_path"]) + len(scope["query_string"]) > self._max_bytes:
                refused = Problem(414, f"the target is longer than {self._max_bytes:,} bytes", "send what is long in a body")
            elif sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_bytes:
                refused = Problem(431, f"the headers are longer than {self._max_bytes:,} bytes", "send fewer")
            if refused is not None:
                await refused.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
