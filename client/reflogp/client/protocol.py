"""Build requests to a service and read its responses, without sending anything.

This module contains what Client and AsyncClient share: the request type, the retry rules, and the requests for references and
lookups.
"""

from __future__ import annotations

import math
import random
import sys
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, fields
from typing import IO, Any, TypeAlias, TypeVar

import httpx
import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
from reflogp.store import UsageError
from reflogp.store.keys import KEY_TYPE
from reflogp.store.schema import ARROW_STREAM, QUESTION, stream_bytes
from reflogp.store.texts import counted, hide_secrets, short_repr, visible

T = TypeVar("T")

#: Maximum number of seconds to connect, and to wait for the next bytes of a response.
CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 60.0
#: Maximum number of attempts for a request without a deadline, and the longest pause between two attempts, in seconds.
TRIES, LONGEST_PAUSE = 5, 10.0
#: Maximum number of keys in a lookup request without token values (16 MB of keys) and with token values (500 MB of values at
#: 2,000 tokens per key). If a service with lower limits responds with 413, smaller requests are sent.
_KEYS_AT_ONCE, _VALUE_KEYS_AT_ONCE = 1_000_000, 65_536
#: Seconds to wait beyond a deadline, so that the service itself can report that the deadline has passed.
_GRACE = 0.5
#: The longest deadline that a service accepts, in milliseconds.
_LONGEST_DEADLINE_MS = 3_600_000
_BUSY = (429, 503)

#: The errors that Python raises when code reads JSON of an unexpected shape.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)

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
class ReferenceInfo:
    """A reference model that is named in a service's settings, or has values in the service's store.

    Attributes:
        name: name of the reference in the service's settings, or None if only the service's store contains the reference.
        reference_id: id of the reference, 32 hex digits.
        model: name of the model's folder, or the model's hub id.
        dtype: dtype in which the model computes.
        lm_head_dtype: dtype of the model's logits.
        snapshot: number of the latest snapshot, or None if nothing is stored.
        sequences: number of stored sequences.

    Examples:
        >>> from reflogp.client import Client
        >>> with Client("http://127.0.0.1:8311") as client:
        ...     [reference] = client.references()
        >>> reference
        ReferenceInfo(sft: sft-model in bfloat16, ... sequences in snapshot ..., reference ...)
    """

    name: str | None
    reference_id: str
    model: str
    dtype: str
    lm_head_dtype: str
    snapshot: int | None
    sequences: int

    def __repr__(self) -> str:
        name = self.name if self.name is not None else "only in the store"
        stored = f"{counted(self.sequences, 'sequence')} in snapshot {self.snapshot}" if self.sequences else "nothing stored"
        return short_repr("ReferenceInfo", f"{name}: {self.model} in {self.dtype}, {stored}, reference {self.reference_id}")


@dataclass(frozen=True)
class Lookup:
    """The values that a store has for n keys.

    Attributes:
        lengths: number of stored values for each key, int32 of shape (n,); -1 for a miss.
        sums: sum of each key's values in nats, float64 of shape (n,), or NaN for a miss.
        token_logps: list with one item for each key: a float32 array, or None for a miss. If values were not requested,
            `token_logps` itself is None.
        reference_id: id of the reference whose values were looked up.
        snapshot: number of the snapshot in which the keys were looked up.

    Examples:
        >>> from reflogp.client import Client
        >>> from reflogp.store import sequence_keys
        >>> with Client("http://127.0.0.1:8311") as client:
        ...     found = client.lookup("sft", sequence_keys([[1, 5, 9]], [[7, 2]]), values=True)
        >>> found.lengths, found.sums, found.token_logps
        (array([-1], dtype=int32), array([nan]), [None])
    """

    lengths: npt.NDArray[np.int32]
    sums: npt.NDArray[np.float64]
    token_logps: list[npt.NDArray[np.float32] | None] | None
    reference_id: str
    snapshot: int

    def __repr__(self) -> str:
        found = f"{int((self.lengths >= 0).sum()):,} of {counted(len(self.lengths), 'key')}"
        return short_repr("Lookup", f"{found} found in snapshot {self.snapshot} of reference {self.reference_id}")


@dataclass(frozen=True)
class Call:
    """A request to a service. If an attempt fails, the request may be sent again.

    Attributes:
        content: body of the request; a file is streamed.
        again: types of connection errors after which the request is sent again. Every request is also sent again after a busy
            response (429 or 503).
        wait: seconds to wait for the next bytes of the response, or None for the client's timeout. If `until` is set, `wait` is
            not used.
        until: deadline for all attempts, as a value of time.monotonic(), or None for no deadline. Each attempt tells the
            service how much time is left.
        into: file for the body of a successful response, or None to keep the body in memory.
        request_id: id that every attempt sends in the header X-Request-Id. The service logs this id.
    """

    method: str
    path: str
    params: dict[str, Any] = field(default_factory=dict)
    content: bytes | LocalFile | None = None
    headers: dict[str, str] = field(default_factory=dict)
    again: tuple[type[httpx.TransportError], ...] = ANY_LOSS
    wait: float | None = None
    until: float | None = None
    into: IO[bytes] | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)


#: A generator that yields one call at a time and returns the final result. The client that runs the plan sends each call and
#: passes the response back. If the call fails, the client raises the ServiceError at the plan's `yield`. A plan contains no
#: code that sends requests, so Client and AsyncClient can run the same plan.
Plan: TypeAlias = Generator[Call, httpx.Response, T]
#: The outcome of one attempt: a response with any status, a connection error or timeout, or None if the service closed an event
#: stream before the job had ended.
Outcome: TypeAlias = httpx.Response | httpx.TransportError | None


def references_call() -> Call:
    return Call("GET", "/v1/references")


def references_of(response: httpx.Response) -> list[ReferenceInfo]:
    return parsed(response, lambda body: [ReferenceInfo(**known(ReferenceInfo, entry)) for entry in body["references"]])


def lookup_plan(reference: str, keys: pa.Array | Sequence[bytes], values: bool, snapshot: int | None) -> Plan[Lookup]:
    """Look up keys in one snapshot, with as many requests as the service's limits require."""
    try:
        column = keys.cast(KEY_TYPE) if isinstance(keys, pa.Array | pa.ChunkedArray) else pa.array(list(keys), KEY_TYPE)
    except pa.ArrowException as error:
        raise UsageError(f"keys must be 16 bytes long, like those from sequence_keys: {str(error).splitlines()[0]}") from error
    table = pa.table([column], schema=QUESTION)
    parts: list[Lookup] = []
    at, most = 0, _VALUE_KEYS_AT_ONCE if values else _KEYS_AT_ONCE
    while at < len(table) or not parts:
        part = table.slice(at, most)
        try:
            answer = yield _lookup_call(reference, part, values, parts[0].snapshot if parts else snapshot)
        except RequestRefusedError as error:
            most = fewer(error, len(part))
            continue
        parts.append(_lookup_of(answer))
        at += len(part)
    if len(parts) == 1:
        return parts[0]
    found = [entry for part in parts for entry in part.token_logps or []] if values else None
    lengths, sums = np.concatenate([part.lengths for part in parts]), np.concatenate([part.sums for part in parts])
    return Lookup(lengths, sums, found, parts[0].reference_id, parts[0].snapshot)


def fewer(error: RequestRefusedError, count: int) -> int:
    """Return how many keys or sequences to send in the next request, after a request with `count` of them was too large (413).

    Raises `error` if its status is not 413, or if `count` is 1.
    """
    if error.status != 413 or count < 2:
        raise error
    return count // 2


def _lookup_call(reference: str, table: pa.Table, values: bool, snapshot: int | None) -> Call:
    params: dict[str, Any] = {"reference": reference, "values": str(values).lower()}
    if snapshot is not None:
        params["snapshot"] = snapshot
    return Call("POST", "/v1/lookup", params, stream_bytes(table), {"content-type": ARROW_STREAM})


def _lookup_of(response: httpx.Response) -> Lookup:
    def read(table: pa.Table, about: dict[str, str]) -> Lookup:
        values = float_lists(table["token_logps"]) if "token_logps" in table.column_names else None
        lengths, sums = table["scored_len"].fill_null(-1).to_numpy(), table["logp_sum"].to_numpy()
        return Lookup(lengths, sums, values, about["reference_id"], int(about["snapshot"]))

    return arrow_answer(response, read)


def arrow_answer(response: httpx.Response, read: Callable[[pa.Table, dict[str, str]], T]) -> T:
    """Call `read` with the Arrow table in a response and with the table's metadata, and return the result.

    Raises ServiceFailedError if the response cannot be read.
    """
    try:
        table = pa.ipc.open_stream(response.content).read_all().combine_chunks()
        return read(table, {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()})
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise ServiceFailedError(f"the service's response cannot be read: {error}") from error


def float_lists(column: pa.ChunkedArray) -> list[npt.NDArray[np.float32] | None]:
    """Return a list with one numpy array for each entry of a list<float32> column, or None for a null entry."""
    return [entry.values.to_numpy() if entry.is_valid else None for entry in column]


def parsed(response: httpx.Response, read: Callable[[Any], T]) -> T:
    """Return `read(body)` for a response's JSON body. Raises ServiceFailedError if the body is not JSON or has an unexpected
    shape."""
    try:
        return read(response.json())
    except UNREADABLE as error:
        raise ServiceFailedError(f"the service's response cannot be read ({type(error).__name__}: {error})") from error


def known(kind: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """Return those items of `entry` that are fields of the dataclass `kind`. A newer service may send other items too."""
    return {one.name: entry[one.name] for one in fields(kind) if one.name in entry}


def error_of(response: httpx.Response) -> ServiceError:
    """Return the error for a response with a status of 400 or above."""
    try:
        problem = response.json()
        detail, next_step = visible(str(problem["detail"])), visible(str(problem.get("next_step", "")))
    except (ValueError, KeyError, TypeError):
        detail, next_step = visible(f"{response.status_code} {response.reason_phrase}"), ""
    status = response.status_code
    if status >= 500 and "x-request-id" in response.headers:  # identifies the request in the service's log
        detail += f" (request {visible(response.headers['x-request-id'])})"
    kind: type[ServiceError] = ServiceFailedError if status >= 500 else RequestRefusedError
    if status in (401, 403):
        kind = NotAllowedError
    if status in _BUSY:
        kind = ServiceBusyError
    if status == 504:
        kind = DeadlineExceededError
    return kind(detail, status, next_step)


def arguments(call: Call) -> dict[str, Any]:
    """Return the keyword arguments for httpx's `stream` method, except the body, for an attempt that starts now."""
    headers = {"x-request-id": call.request_id, **_trace_context(), **call.headers}
    found: dict[str, Any] = {"method": call.method, "url": call.path, "params": call.params, "headers": headers}
    if call.wait is not None:
        found["timeout"] = httpx.Timeout(call.wait, connect=min(call.wait, CONNECT_SECONDS))
    if call.until is not None:
        left = max(call.until - time.monotonic(), 0.001)
        found["params"] = call.params | {"deadline_ms": min(math.ceil(1000 * left), _LONGEST_DEADLINE_MS)}
        found["timeout"] = httpx.Timeout(left + _GRACE, connect=min(left, CONNECT_SECONDS))
    return found


def _trace_context() -> dict[str, str]:
    """Return the headers (traceparent, tracestate) that let a service continue the caller's OpenTelemetry trace.

    There are no headers if the caller has no active span. If opentelemetry is not imported yet, there can be no active span, so
    this function does not import it.
    """
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(headers)
    return headers


def pause_after(answer: Outcome, call: Call, attempt: int, url: str) -> float | None:
    """Return the number of seconds to wait before the next attempt, or None if the response is a success.

    `attempt` counts the attempts so far, starting at 1, and `answer` is the outcome of the last attempt. Raises the error for
    that outcome if no further attempt is allowed.
    """
    if isinstance(answer, httpx.Response) and answer.status_code < 400:
        return None
    pause, now = pause_seconds(answer, attempt), time.monotonic()
    in_time = attempt < TRIES if call.until is None else now + pause < call.until
    if in_time and (is_busy(answer) or isinstance(answer, call.again)):
        return pause
    if call.until is not None and isinstance(answer, httpx.TimeoutException) and now >= call.until:
        raise DeadlineExceededError(f"{hide_secrets(url)} did not respond within the deadline") from answer
    raise failure(url, answer)


def failure(url: str, answer: Outcome) -> ServiceError:
    """Return the error for a failed attempt."""
    if isinstance(answer, httpx.Response):
        return error_of(answer)
    said = "the stream ended" if answer is None else f"{type(answer).__name__}: {answer}"
    shown = hide_secrets(url)
    error = ServiceUnreachableError(f"the request to {shown} failed ({said}); run `reflogp doctor --url {shown}` to see why")
    error.__cause__ = answer
    return error


def check_whole(response: httpx.Response, file: IO[bytes]) -> None:
    """Raise httpx.RemoteProtocolError if the body written to `file` is shorter or longer than the response's Content-Length."""
    announced = response.headers.get("content-length", "")
    if announced.isdigit() and file.tell() != int(announced):
        raise httpx.RemoteProtocolError(f"received {file.tell()} bytes, but the Content-Length is {announced}")


def is_busy(answer: Outcome) -> bool:
    return isinstance(answer, httpx.Response) and answer.status_code in _BUSY


def pause_seconds(answer: Outcome, attempt: int) -> float:
    """Return the number of seconds to wait before the next attempt, at most LONGEST_PAUSE.

    If the response has a Retry-After header, the pause is the header's value plus a small random number. Otherwise, the pause
    is a random number whose maximum doubles with every failed attempt. The random numbers keep clients from all retrying at the
    same time.
    """
    asked = answer.headers.get("retry-after", "") if isinstance(answer, httpx.Response) else ""
    if asked.isdigit():
        return min(LONGEST_PAUSE, float(asked) + random.uniform(0, 0.1))
    return random.uniform(0, min(LONGEST_PAUSE, 0.1 * 2 ** min(attempt, 10)))
