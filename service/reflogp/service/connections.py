"""Add deadlines to uvicorn's connections, to disconnect clients that send no request or do not read their response.

The head of a request (request line and headers) must arrive within `head_seconds`, even on a keep-alive connection. A client
that reads a response must not pause for longer than `answer_idle_seconds`. A client that does not pause, but reads so slowly
that a full write buffer does not drain within this time, is disconnected too. At most `max_waiting` connections may wait for
the head of a request. If another connection begins to wait, the connection that has waited longest is closed. Clients that send
the head of a request one byte at a time therefore cannot keep the service from serving other clients.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from reflogp.service.problems import Problem

logger = logging.getLogger(__name__)

#: Number of open files (shards, pipes, the ledger) that the process needs in addition to its connections.
_OTHER_FILES = 512
_LEAST_WAITING = 32


class ConnectionConfig(uvicorn.Config):
    """A uvicorn configuration with the limits that BoundedProtocol enforces.

    Args:
        app: the application to serve.
        head_seconds: maximum time in seconds for the head of a request to arrive.
        answer_idle_seconds: maximum time in seconds that a client may pause while it reads a response.
        max_waiting: maximum number of connections that may wait for the head of a request.
        options: other arguments of uvicorn.Config.
    """

    def __init__(self, app: ASGIApp, head_seconds: float, answer_idle_seconds: float, max_waiting: int, **options: Any) -> None:
        super().__init__(app, http=BoundedProtocol, ws="none", **options)
        self.head_seconds = head_seconds
        self.answer_idle_seconds = answer_idle_seconds
        self.max_waiting = max_waiting
        #: Connections that are waiting for the head of a request, in order of waiting time, longest first.
        self.waiting: dict[BoundedProtocol, None] = {}


class BoundedProtocol(H11Protocol):
    """An HTTP/1.1 connection that is closed if the client sends the head of a request too late or stops reading a response."""

    config: ConnectionConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._head_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        # This sets a deadline even if part of the request's body has not arrived. After the response, nothing reads the body,
        # so the time limits on request bodies no longer apply.
        self._wait_for_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answer_timer is None:
            self._answer_timer = self.loop.call_later(self.config.answer_idle_seconds, self._answer_not_read)

    def resume_writing(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None
        super().resume_writing()

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._head_timer = self.loop.call_later(self.config.head_seconds, self._head_not_sent)
        waiting = self.config.waiting
        waiting[self] = None
        if len(waiting) > self.config.max_waiting:
            next(iter(waiting))._head_not_sent()

    def _stop_waiting(self) -> None:
        self.config.waiting.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_not_sent(self) -> None:
        self._stop_waiting()
        if self.transport.is_closing():
            self.transport.abort()
            return
        began = self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        elif began:
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()
        else:
            self.transport.close()

    def _answer_not_read(self) -> None:
        self._answer_timer = None
        logger.info(
            "closing a connection: the client has read too little of its response in the last %.0f seconds",
            self.config.answer_idle_seconds,
        )
        self.transport.abort()


class HeadLimit:
    """Middleware that refuses requests whose target or headers are too long.

    uvicorn's own limit is not enough, because it applies only to requests whose headers arrive in several pieces.

    Args:
        max_bytes: limit that applies separately to the length of the request target and to the total size of the headers.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refused = None
            if len(scope["raw_path"]) + len(scope["query_string"]) > self._max_bytes:
                refused = Problem(414, f"the URL is longer than {self._max_bytes:,} bytes", "send long values in the body")
            elif sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_bytes:
                refused = Problem(
                    431, f"the headers are longer than {self._max_bytes:,} bytes", "send fewer or shorter headers"
                )
            if refused is not None:
                await refused.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ActiveRequests:
    """Middleware that responds with status 503 to any further request while `most` requests are being processed.

    Idle connections do not count toward `most`.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._active >= self._most:
            problem = Problem(
                503, f"{self._most:,} other requests are being processed", "try again later", {"Retry-After": "1"}
            )
            await problem.response()(scope, receive, send)
            return
        self._active += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._active -= 1


def waiting_connections(max_connections: int) -> int:
    """Return the maximum number of connections that may wait for the head of a request.

    This number does not include the connections with a request in progress, of which there are at most `max_connections`. If
    the process's soft limit on open files is too low for the waiting and the active connections together, first raise the soft
    limit as far as necessary, but not above the hard limit. The result is `max_connections`, or less if the limit on open files
    is still too low, but at least _LEAST_WAITING.
    """
    wanted = 2 * max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    room = wanted if soft == resource.RLIM_INFINITY else soft
    return max(_LEAST_WAITING, min(max_connections, room - max_connections - _OTHER_FILES))
