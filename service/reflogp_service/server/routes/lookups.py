"""/v1/references and /v1/lookup: what the store has."""

from __future__ import annotations

from typing import Annotated, Any

import pyarrow as pa
from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from reflogp_service.server.auth import requires
from reflogp_service.server.bodies import arrow_response, body_schemas, json_model, keys_of, media_type, read_body
from reflogp_service.server.context import Context
from reflogp_service.server.problems import Problem, documented
from reflogp_store.arrow_stream import ARROW_STREAM
from reflogp_store.keys import KEY_TYPE
from reflogp_store.lookup import answer_table


class ReferenceInfo(BaseModel):
    """A reference that the service knows."""

    name: str | None = Field(description="Its name here; None for one that only the store knows.")
    reference_id: str = Field(description="Digest of the model's content and numerics.")
    model: str = Field(description="What it was called when it was described.")
    dtype: str = Field(description="What it computes in.")
    lm_head_dtype: str = Field(description="What its logits are computed in.")
    snapshot: int | None = Field(description="Number of the latest snapshot; None where nothing was scored.")
    sequences: int = Field(description="Rows of that snapshot.")


class References(BaseModel):
    """All references of the service and its store."""

    store: str = Field(description="Where the values are kept.")
    references: list[ReferenceInfo] = Field(description="By name, then those that only the store knows.")


class LookupRequest(BaseModel):
    """Keys to look up, for people and small numbers; programs send an Arrow stream."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"keys": ["00" * 16], "values": True}]})
    keys: list[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]] = Field(max_length=10_000, description="Each 32 hex digits.")
    values: bool = Field(False, description="Give token_logps too.")


class LookupAnswer(BaseModel):
    """One entry per key, in order; null for a key that the snapshot has not."""

    reference_id: str = Field(description="Whose values these are.")
    snapshot: int = Field(description="Number of the snapshot that was read.")
    scored_len: list[int | None] = Field(description="Values that are stored.")
    logp_sum: list[float | None] = Field(description="Their sum, nats.")
    token_logps: list[list[float] | None] | None = Field(None, description="The values, where they were asked for.")


def lookups_router(context: Context) -> APIRouter:
    """Routes over the shelf of references."""
    router = APIRouter(dependencies=[Depends(requires("read", context.settings.tokens))])
    settings, shelf = context.settings, context.shelf

    @router.get(
        "/v1/references",
        tags=["references"],
        summary="List references",
        response_description="References by name, then those that only the store knows.",
        responses=documented(401, 403, 503),
    )
    async def references() -> References:
        """What can be asked for: references by name, and every other one of the store."""

        def described() -> list[ReferenceInfo]:
            return [
                ReferenceInfo(
                    name=entry.name,
                    reference_id=entry.reference.reference_id,
                    model=entry.reference.name,
                    dtype=entry.reference.dtype,
                    lm_head_dtype=entry.reference.lm_head_dtype,
                    snapshot=entry.table.snapshot_number() if entry.table else None,
                    sequences=entry.table.totals()[1] if entry.table else 0,
                )
                for entry in shelf.list()
            ]

        return References(store=shelf.store.uri, references=await to_thread.run_sync(described))

    def answer(reference: str, number: int | None, keys: pa.FixedSizeBinaryArray, values: bool) -> pa.Table:
        snapshot = shelf.snapshot(reference, number)
        found = snapshot.find(keys)
        if values and 4 * int(found.lengths.clip(min=0).sum()) > settings.max_answer_bytes:
            raise Problem(
                413, f"their values are more than {settings.max_answer_bytes:,} bytes", "ask for fewer keys at a time"
            )
        table = answer_table(snapshot, found, values)
        context.metrics.lookup_keys.labels("no").inc(table["scored_len"].null_count)
        context.metrics.lookup_keys.labels("yes").inc(len(table) - table["scored_len"].null_count)
        return table

    @router.post(
        "/v1/lookup",
        tags=["lookup"],
        summary="Look keys up",
        response_model=LookupAnswer,
        response_description="One entry per key, in order.",
        responses={**documented(400, 401, 403, 404, 408, 413, 415, 422, 503), 200: {"content": {ARROW_STREAM: {}}}},
        openapi_extra=body_schemas(LookupRequest, ARROW_STREAM),
    )
    async def lookup(
        request: Request,
        reference: Annotated[str, Query(max_length=200, description="Name or id.")],
        snapshot: Annotated[int | None, Query(ge=0, le=2**53, description="Number; the latest when left out.")] = None,
        values: Annotated[bool, Query(description="Give token_logps too (Arrow requests).")] = False,
    ) -> Any:
        """What the store has for some keys.

        An Arrow stream with the column `key` is answered by one with `scored_len`, `logp_sum` and, where asked for,
        `token_logps`; its schema's metadata names reference_id and snapshot. JSON is answered by JSON.
        """
        body = await read_body(request, settings.max_body_bytes)
        if media_type(request) == ARROW_STREAM:
            keys = await to_thread.run_sync(keys_of, body, settings.max_lookup_keys)
            return arrow_response(await to_thread.run_sync(answer, reference, snapshot, keys, values))
        asked_for = json_model(request, body, LookupRequest)
        keys = pa.array([bytes.fromhex(key) for key in asked_for.keys], KEY_TYPE)
        table = await to_thread.run_sync(answer, reference, snapshot, keys, asked_for.values)
        about = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
        return LookupAnswer(reference_id=about["reference_id"], snapshot=int(about["snapshot"]), **table.to_pydict())

    return router
