"""Requests and answers of a service, without sending them: what both clients share.

Knows routes, bodies, typed results and which failure is worth another try. Called by `client`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp_client.errors import (
    NotAllowedError,
    RequestRefusedError,
    ServiceBusyError,
    ServiceError,
    ServiceFailedError,
    ServiceUnreachableError,
)
from reflogp_store.keys import KEY_TYPE
from reflogp_store.lookup import ARROW_STREAM, QUESTION

#: Tries of a request that is safe to send twice, and the longest pause between two, in seconds.
TRIES, LONGEST_PAUSE = 5, 10.0
_BUSY = (429, 503)


@dataclass(frozen=True)
class ReferenceInfo:
    """A reference that a service knows; `name` is None for one that only its store knows."""

    name: str | None
    reference_id: str
    model: str
    dtype: str
    lm_head_dtype: str
    snapshot: int | None
    sequences: int


@dataclass(frozen=True)
class Lookup:
    """What a store has for n keys.

    Attributes:
        lengths: stored values of each key, int32 (n,); -1 for a miss.
        sums: their sums in nats, float64 (n,); NaN for a miss.
        token_logps: float32 arrays, None for a miss; None altogether where they were not asked for.
        reference_id, snapshot: where it was looked up.
    """

    lengths: npt.NDArray[np.int32]
    sums: npt.NDArray[np.float64]
    token_logps: list[npt.NDArray[np.float32] | None] | None
    reference_id: str
    snapshot: int


@dataclass(frozen=True)
class Call:
    """One request. `repeatable`: sending it twice does no harm."""

    method: str
    path: str
    params: dict[str, Any] = field(default_factory=dict)
    content: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    repeatable: bool = True


def references_call() -> Call:
    return Call("GET", "/v1/references")


def references_of(response: httpx.Response) -> list[ReferenceInfo]:
    return [ReferenceInfo(**entry) for entry in _json(response)["references"]]


def lookup_call(reference: str, keys: pa.Array | Sequence[bytes], values: bool, snapshot: int | None) -> Call:
    column = keys.cast(KEY_TYPE) if isinstance(keys, pa.Array | pa.ChunkedArray) else pa.array(list(keys), KEY_TYPE)
    table = pa.table([column], schema=QUESTION)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    params: dict[str, Any] = {"reference": reference, "values": str(values).lower()}
    if snapshot is not None:
        params["snapshot"] = snapshot
    return Call("POST", "/v1/lookup", params, sink.getvalue().to_pybytes(), {"content-type": ARROW_STREAM})


def lookup_of(response: httpx.Response) -> Lookup:
    try:
        table = pa.ipc.open_stream(response.content).read_all().combine_chunks()
        about = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
        lengths = table["scored_len"].fill_null(-1).to_numpy()
        sums = table["logp_sum"].to_numpy()
        values = None
        if "token_logps" in table.column_names:
            column = table["token_logps"]
            values = [entry.values.to_numpy() if entry.is_valid else None for entry in column]
        return Lookup(lengths, sums, values, about["reference_id"], int(about["snapshot"]))
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise ServiceFailedError(f"the service's answer cannot be read: {error}") from error


def error_of(response: httpx.Response) -> ServiceError:
    """The error that an answer with a status from 400 on stands for."""
    try:
        problem = response.json()
        detail, next_step = str(problem["detail"]), str(problem.get("next_step", ""))
    except (ValueError, KeyError, TypeError):
        detail, next_step = f"{response.status_code} {response.reason_phrase}", ""
    status = response.status_code
    kind: type[ServiceError] = ServiceFailedError if status >= 500 else RequestRefusedError
    if status in (401, 403):
        kind = NotAllowedError
    if status in _BUSY:
        kind = ServiceBusyError
    return kind(detail, status, next_step)


def arguments(call: Call) -> dict[str, Any]:
    """What httpx' `request` takes for a call."""
    names = ("method", "params", "content", "headers")
    return {"url": call.path} | {name: getattr(call, name) for name in names}


def pause_after(answer: httpx.Response | httpx.TransportError, call: Call, attempt: int, url: str) -> float | None:
    """Seconds to wait before the next try; None when the answer is good.

    Raises the error that the answer stands for where another try (after number `attempt`, from 1) is not worth it.
    """
    if isinstance(answer, httpx.Response) and answer.status_code < 400:
        return None
    again = not isinstance(answer, httpx.Response) or answer.status_code in _BUSY
    if not again or not call.repeatable or attempt >= TRIES:
        if isinstance(answer, httpx.TransportError):
            raise ServiceUnreachableError(f"{url} gives no answer ({type(answer).__name__}: {answer})") from answer
        raise error_of(answer)
    asked = answer.headers.get("retry-after", "") if isinstance(answer, httpx.Response) else ""
    if asked.isdigit():
        return min(LONGEST_PAUSE, float(asked))
    return random.uniform(0, min(LONGEST_PAUSE, 0.1 * 2**attempt))


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise ServiceFailedError(f"the service's answer is not JSON: {error}") from error
