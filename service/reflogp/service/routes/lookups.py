"""Serve /v1/references and /v1/lookup: list references, and look up keys in the store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, FailFast, Field

from reflogp.service.auth import requires
from reflogp.service.bodies import (
    JSON,
    PATIENCE_SECONDS,
    body_schemas,
    decoded,
    json_response,
    keys_of,
    read_body,
    read_json,
    require_type,
)
from reflogp.service.context import Context
from reflogp.service.problems import Problem, documented
from reflogp.store import Snapshot
from reflogp.store.index import MISS
from reflogp.store.keys import KEY_TYPE
from reflogp.store.schema import ARROW_STREAM, stream_messages
from reflogp.store.snapshot import Found
from reflogp.store.texts import hide_secrets

#: Maximum number of keys in one lookup.
_MAX_KEYS = 2_000_000
#: Maximum number of token values in a JSON response.
_MAX_JSON_VALUES = 250_000
#: Size in bytes of the pieces in which a batch is sent.
_PIECE_BYTES = 256 << 10
#: Arrow schema of a response, with nulls for a miss. The column `token_logps` is included only if it was requested.
_ANSWER = pa.schema([("scored_len", pa.int32()), ("logp_sum", pa.float64()), ("token_logps", pa.list_(pa.float32()))])
#: Maximum number of keys in one batch of a response, and maximum number of bytes of token values; only a batch with a single
#: key can exceed it. For each batch, the row groups that contain its keys are read. Larger batches reduce the amount read in
#: total, but need more memory.
_BATCH_KEYS, _BATCH_BYTES = 131_072, 4 << 20


class ReferenceInfo(BaseModel):
    """A reference that is named in the service's settings, or has values in the service's store."""

    name: str | None = Field(description="Name in the service's settings, or null if the reference is only in the store.")
    reference_id: str = Field(description="Id of the reference: a digest of the model's content and dtypes.")
    model: str = Field(
        description="Name of the model's folder, or the model's hub id. If the model was used under several names, the first "
        "of them."
    )
    dtype: str = Field(description="Compute dtype of the model.")
    lm_head_dtype: str = Field(description="Dtype used to compute the logits.")
    snapshot: int | None = Field(description="Number of the latest snapshot, or null if no values are stored.")
    sequences: int = Field(description="Number of sequences in the latest snapshot.")


class References(BaseModel):
    """All references in the service's settings and in its store."""

    store: str = Field(description="URI of the store.")
    references: list[ReferenceInfo] = Field(description="Sorted by id.")


class LookupRequest(BaseModel):
    """Keys to look up. JSON is meant for small, hand-written requests; programs should send an Arrow stream."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"keys": ["00" * 16], "values": True}]})
    keys: Annotated[list[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]], FailFast()] = Field(
        max_length=10_000, description="Keys as strings of 32 hex digits."
    )
    values: bool = Field(False, description="Return token_logps too.")


class LookupAnswer(BaseModel):
    """The stored values. Each list has one entry per key, in the order of the request.

    The entries of a key that is not in the snapshot are null.
    """

    reference_id: str = Field(description="Id of the reference whose values are returned.")
    snapshot: int = Field(description="Number of the snapshot that the values were read from.")
    scored_len: list[int | None] = Field(description="Number of log-probs stored for each key.")
    logp_sum: list[float | None] = Field(description="Sum of each key's log-probs, in nats.")
    token_logps: list[list[float] | None] | None = Field(
        None, description="Log-probs of each key's tokens, in nats. If `values` is false, the whole field is null."
    )


def lookups_router(context: Context) -> APIRouter:
    router = APIRouter(dependencies=[Depends(requires("read", context.settings.tokens))])
    registry = context.registry

    @router.get(
        "/v1/references",
        tags=["references"],
        summary="List references",
        response_description="All references, sorted by reference id.",
        responses=documented(401, 403, 503),
    )
    async def references() -> References:
        """List all references: those named in the settings, and any others in the store."""

        def described() -> list[ReferenceInfo]:
            return [
                ReferenceInfo(
                    name=entry.name,
                    reference_id=entry.reference.reference_id,
                    model=hide_secrets(entry.reference.name),
                    dtype=entry.reference.dtype,
                    lm_head_dtype=entry.reference.lm_head_dtype,
                    snapshot=entry.snapshot,
                    sequences=entry.rows,
                )
                for entry in registry.list()
            ]

        return References(store=hide_secrets(registry.store.uri), references=await registry.threads.run(described))

    def find(snapshot: Snapshot, keys: pa.FixedSizeBinaryArray) -> Found:
        found = snapshot.find(keys)
        missing = int((found.lengths < 0).sum())
        context.metrics.lookup_keys.labels("no").inc(missing)
        context.metrics.lookup_keys.labels("yes").inc(len(keys) - missing)
        return found

    @router.post(
        "/v1/lookup",
        tags=["lookup"],
        summary="Look keys up",
        response_model=LookupAnswer,
        response_description="One entry per key, in the order of the request.",
        responses={**documented(400, 401, 403, 404, 413, 415, 422, 503), 200: {"content": {ARROW_STREAM: {}}}},
        openapi_extra=body_schemas("/v1/lookup", LookupRequest, ARROW_STREAM),
    )
    async def lookup(
        request: Request,
        reference: Annotated[str, Query(max_length=200, description="Name or id of the reference.")],
        snapshot: Annotated[
            int | None, Query(ge=0, le=2**53, description="Number of the snapshot to read. Default: the latest.")
        ] = None,
        values: Annotated[
            bool,
            Query(
                description="Whether an Arrow response also contains token_logps. In a JSON request, set the field `values` "
                "instead."
            ),
        ] = False,
    ) -> Any:
        """Look up keys in the store.

        If the request body is an Arrow stream with the column `key`, the response is an Arrow stream with the columns
        `scored_len`, `logp_sum` and, if `values` is set, `token_logps`. The response's schema metadata contains reference_id
        and snapshot. If the request body is JSON, so is the response.
        """
        if require_type(request, JSON, ARROW_STREAM) == ARROW_STREAM:
            found_in = await registry.threads.run(registry.snapshot, reference, snapshot)
            async with context.large.turn_of(request):
                body = await read_body(request)
                keys = await decoded(lambda body: keys_of(body, _MAX_KEYS), body)
                del body
            found = await registry.threads.run(find, found_in, keys)
            tables = (_answer_table(found_in, found.slice(*part), values) for part in _batches(found, values))
            messages = stream_messages(_answer_schema(found_in, values), tables)
            answer_bytes = 4 * _value_count(found) if values else 0

            async def read(patience: float | None) -> pa.Buffer | None:
                async with context.large.turn_of(request, answer_bytes, patience):
                    return await registry.threads.run(next, messages, None)

            return await _streamed(read)
        async with context.large.turn_of(request):
            asked = await read_json(request, LookupRequest)
        found_in = await registry.threads.run(registry.snapshot, reference, snapshot)
        keys = pa.array([bytes.fromhex(key) for key in asked.keys], KEY_TYPE)
        found = await registry.threads.run(find, found_in, keys)
        if asked.values and _value_count(found) > _MAX_JSON_VALUES:
            raise Problem(
                413, f"these keys have more than {_MAX_JSON_VALUES:,} values", "look up fewer keys, or send an Arrow stream"
            )
        return await registry.threads.run(_json, found_in, found, asked.values)

    return router


def _value_count(found: Found) -> int:
    return int(found.lengths.clip(min=0).sum(dtype=np.int64))


def _json(snapshot: Snapshot, found: Found, values: bool) -> Response:
    columns = _answer_table(snapshot, found, values).to_pydict()
    return json_response(LookupAnswer(reference_id=snapshot.reference_id, snapshot=snapshot.number, **columns))


async def _streamed(read: Callable[[float | None], Awaitable[pa.Buffer | None]]) -> Response:
    """Return a response that streams the messages that `read` returns until it returns None.

    Args:
        read: waits at most the given number of seconds for a turn.

    The first batch is created before the status is sent, so that an unreadable store results in an error status rather than in
    a truncated response. Later batches are created while the response is being sent. If a later batch cannot be read, the
    response is truncated.
    """
    ready = [await read(PATIENCE_SECONDS), await read(PATIENCE_SECONDS)]  # the schema and the first batch

    async def sent() -> AsyncIterator[bytes]:
        while (message := ready.pop(0)) is not None:
            for start in range(0, len(message), _PIECE_BYTES):  # the connection of a slow reader copies only one piece
                yield bytes(message[start : start + _PIECE_BYTES])
            if not ready:
                ready.append(await read(None))  # the response has begun, and must not end in the middle

    return StreamingResponse(sent(), media_type=ARROW_STREAM)


def _answer_schema(snapshot: Snapshot, values: bool) -> pa.Schema:
    """Return the Arrow schema of a response. Its metadata contains the reference id and the snapshot's number."""
    about = {"reference_id": snapshot.reference_id, "snapshot": str(snapshot.number)}
    return pa.schema(list(_ANSWER)[: 3 if values else 2]).with_metadata(about)


def _answer_table(snapshot: Snapshot, found: Found, values: bool) -> pa.Table:
    missing = found.lengths == MISS
    columns = [
        pa.array(found.lengths, pa.int32(), mask=missing),
        pa.array(found.prefix_sums(np.maximum(found.lengths, 0).astype(np.int64)), pa.float64(), mask=missing),
    ]
    if values:
        columns.append(found.token_lists())
    return pa.table(columns, schema=_answer_schema(snapshot, values))


def _batches(found: Found, values: bool) -> Iterator[tuple[int, int]]:
    count = len(found.lengths)
    before = np.zeros(count + 1, np.int64)
    if values:
        np.cumsum(4 * np.maximum(found.lengths, 0).astype(np.int64), out=before[1:])
    start = 0
    while start < count:
        stop = int(np.searchsorted(before, before[start] + _BATCH_BYTES, "right")) - 1
        stop = min(max(stop, start + 1), start + _BATCH_KEYS, count)
        yield start, stop
        start = stop
