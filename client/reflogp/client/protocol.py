"""The requests that a client sends, and the rules by which it sends them again.

`models.py` and `tables.py` know what is in the bodies.
"""

from __future__ import annotations

import math
import random
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, TypeAlias, TypeVar

import httpx

from reflogp.client.errors import (
    DeadlineExceededError,
    NotAllowedError,
    RequestRefusedError,
    ServiceBusyError,
    ServiceError,
    ServiceFailedError,
    ServiceUnreachableError,
)
from reflogp.client.files import LocalFile
from reflogp.store.texts import hide_secrets, visible

T = TypeVar("T")

#: Maximum number of seconds to connect, and to wait for the next bytes of a response.
CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 60.0
#: Maximum number of attempts for a request without a deadline, and the longest pause between two attempts, in seconds.
TRIES, LONGEST_PAUSE = 5, 10.0
#: Seconds to wait beyond a deadline, so that the service itself can report that the deadline has passed.
_GRACE = 0.5
#: The longest deadline that a service accepts, in milliseconds.
_LONGEST_DEADLINE_MS = 3_600_000
_BUSY = (429, 503)
#: The errors for statuses that have their own. Any other 4xx is a RequestRefusedError, and any other 5xx a ServiceFailedError.
_ERRORS: dict[int, type[ServiceError]] = {
    401: NotAllowedError,
    403: NotAllowedError,
    429: ServiceBusyError,
    503: ServiceBusyError,
    504: DeadlineExceededError,
}

#: NOT_SENT contains the failures that prove that the service has not seen the request. DROPPED adds lost connections, after
#: which the service may have seen the request. ANY_LOSS adds timeouts, after which the service may still be processing the
#: request.
NOT_SENT: tuple[type[httpx.TransportError], ...] = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
)
DROPPED = (*NOT_SENT, httpx.NetworkError, httpx.RemoteProtocolError)
ANY_LOSS = (*DROPPED, httpx.TimeoutException)


@dataclass(frozen=True)
class Call:
    """A request to a service. If an attempt fails, the request may be sent again.

    Attributes:
        content: body of the request; a file is streamed.
        again: types of connection errors after which the request is sent again. Every request is also sent again after a
            busy response (429 or 503).
        wait: seconds to wait for the next bytes of the response, or None for the client's timeout or, if `until` is set, for
            no other limit.
        tries: maximum number of attempts.
        until: deadline for all attempts, as a value of time.monotonic(), or None.
        polls: whether the request asks for news of work that continues without it. Then the service is not told how much time
            is left, and any 5xx is the response of a service that is being restarted.
        into: file for the body of a successful response, or None to keep the body in memory.
    """

    method: str
    path: str
    params: dict[str, Any] = field(default_factory=dict)
    content: bytes | LocalFile | None = None
    headers: dict[str, str] = field(default_factory=dict)
    again: tuple[type[httpx.TransportError], ...] = ANY_LOSS
    wait: float | None = None
    tries: float = TRIES
    until: float | None = None
    polls: bool = False
    into: IO[bytes] | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)


#: The outcome of one attempt: a response with any status, or a connection error or timeout.
Outcome: TypeAlias = httpx.Response | httpx.TransportError


def parsed(response: httpx.Response, read: Callable[[Any], T]) -> T:
    """Return `read(body)` for a response's JSON body. Raises ServiceFailedError if the body cannot be read."""
    try:
        return read(response.json())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServiceFailedError(f"the service's response cannot be read ({type(error).__name__}: {error})") from error


def error_of(response: httpx.Response) -> ServiceError:
    try:
        problem = response.json()
        detail, next_step = visible(str(problem["detail"])), visible(str(problem.get("next_step", "")))
    except (ValueError, KeyError, TypeError):
        detail, next_step = visible(f"{response.status_code} {response.reason_phrase}"), ""
    status = response.status_code
    if status == 401:
        next_step = "pass a valid token (--token on the command line, token= in Python), or set REFLOGP_TOKEN"
    if status >= 500 and "x-request-id" in response.headers:  # identifies the request in the service's log
        detail += f" (request {visible(response.headers['x-request-id'])})"
    kind = _ERRORS.get(status, ServiceFailedError if status >= 500 else RequestRefusedError)
    return kind(detail, status, next_step)


def arguments(call: Call) -> dict[str, Any]:
    """Return the arguments for httpx's `stream`, except the body, for an attempt that starts now."""
    headers = {"x-request-id": call.request_id, **_trace_context(), **call.headers}
    found: dict[str, Any] = {"method": call.method, "url": call.path, "params": call.params, "headers": headers}
    seconds = call.wait
    if call.until is not None:
        left = max(call.until - time.monotonic(), 0.001)
        seconds = min(left + _GRACE, math.inf if call.wait is None else call.wait)
        if not call.polls:
            found["params"] = call.params | {"deadline_ms": min(math.ceil(1000 * left), _LONGEST_DEADLINE_MS)}
    if seconds is not None:
        found["timeout"] = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
    return found


def _trace_context() -> dict[str, str]:
    """Return the headers that let a service continue the caller's OpenTelemetry trace."""
    headers: dict[str, str] = {}
    # without opentelemetry imported, there is no active span
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(headers)
    return headers


def pause_after(answer: Outcome, call: Call, attempt: int, url: str) -> float | None:
    """Return the seconds to wait after attempt number `attempt` (from 1), or None if its outcome is a success.

    Raises the error for that outcome if no further attempt is allowed.
    """
    if isinstance(answer, httpx.Response) and answer.status_code < 400:
        return None
    pause, now = pause_seconds(answer, attempt), time.monotonic()
    in_time = attempt < call.tries and (call.until is None or now + pause < call.until)
    if in_time and (_may_pass(answer, call) or isinstance(answer, call.again)):
        return pause
    if call.until is not None and not call.polls and isinstance(answer, httpx.TimeoutException) and now >= call.until:
        raise DeadlineExceededError(f"{hide_secrets(url)} did not respond within the deadline") from answer
    if isinstance(answer, httpx.Response):
        raise error_of(answer)
    shown = hide_secrets(url)
    said = f"{type(answer).__name__}: {answer}"
    raise ServiceUnreachableError(
        f"the request to {shown} failed ({said}); run `reflogp doctor --url {shown}` to see why"
    ) from answer


def _may_pass(answer: Outcome, call: Call) -> bool:
    if not isinstance(answer, httpx.Response):
        return False
    return answer.status_code in _BUSY or (call.polls and answer.status_code >= 500)


def pause_seconds(answer: Outcome, attempt: int) -> float:
    """Return the seconds to wait before the next attempt: Retry-After, or a random number whose maximum doubles each time."""
    asked = answer.headers.get("retry-after", "") if isinstance(answer, httpx.Response) else ""
    if asked.isdigit():
        return min(LONGEST_PAUSE, float(asked) + random.uniform(0, 0.1))
    return random.uniform(0, min(LONGEST_PAUSE, 0.1 * 2 ** min(attempt, 10)))
