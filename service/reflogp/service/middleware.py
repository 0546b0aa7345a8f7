"""What happens to every request: it gets an id, is refused if a page of another site made it, and is counted and timed.

Requests that are refused with 401 or 403 are logged, with the token's name if it is known.

The id is in the response (X-Request-Id) and in log lines about the request. A caller may choose it by sending the same header.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reflogp.service.metrics import Metrics
from reflogp.service.request_ids import set_request
from reflogp.service.sites import HEADERS, SiteCheck
from reflogp.store.texts import shortened

logger = logging.getLogger(__name__)

_REQUEST_ID = "X-Request-Id"
#: Pattern of ids that a caller may choose. It allows only characters that are easy to search for in a log.
_CHOSEN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: Pattern of a traceparent header. It matches version 00, and later versions that only add fields at the end.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,200})?")


class EveryRequest:
    """ASGI middleware around all others, so that responses to errors have the id and the HEADERS of `sites`, too."""

    def __init__(self, app: ASGIApp, sites: SiteCheck, metrics: Metrics) -> None:
        self._app = app
        self._sites = sites
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, start, status = Headers(scope=scope), time.perf_counter(), 500
        chosen, parent = headers.get(_REQUEST_ID, ""), headers.get("traceparent", "")
        own = chosen if _CHOSEN.fullmatch(chosen) else uuid.uuid4().hex

        async def with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered[_REQUEST_ID] = own
                for name, value in HEADERS.items():
                    answered.setdefault(name, value)
            await send(message)

        set_request(own, parent if _TRACEPARENT.fullmatch(parent) else None)
        problem = self._sites.problem_of(scope["method"], headers)
        try:
            await (self._app if problem is None else problem.response())(scope, receive, with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, status).observe(time.perf_counter() - start)
            if status in (401, 403):
                name = scope.get("state", {}).get("token")
                why = problem.detail if problem is not None else f"token {name}" if name else "no known token"
                logger.info("%s %s refused with status %d: %s", scope["method"], shortened(scope["path"]), status, why)
