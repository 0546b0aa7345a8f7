"""The HTTP app: routes over the shelf of references.

Knows HTTP. What is looked up, and how, is the store's. Made by `reflogp serve` and by tests.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Annotated, Any

import pyarrow as pa
from anyio import to_thread
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reflogp_service.server import problems
from reflogp_service.server.auth import requires
from reflogp_service.server.bodies import arrow_response, keys_of, read_body
from reflogp_service.server.problems import Problem, documented
from reflogp_service.server.settings import ServerSettings
from reflogp_service.server.shelf import Shelf
from reflogp_store import ReflogpError
from reflogp_store.keys import KEY_TYPE
from reflogp_store.lookup import ARROW_STREAM, answer_table

_TITLE = "reflogp"


class ReferenceInfo(BaseModel):
    """A reference that the service knows."""

    name: str | None = Field(description="Its name here; None for one that only the store knows.")
    reference_id: str
    model: str = Field(description="What it was called when it was described.")
    dtype: str
    lm_head_dtype: str
    snapshot: int | None = Field(description="Number of the latest snapshot; None where nothing was scored.")
    sequences: int = Field(description="Rows of that snapshot.")


class References(BaseModel):
    """All references of the service and its store."""

    store: str
    references: list[ReferenceInfo]


class LookupRequest(BaseModel):
    """Keys to look up, for people and small numbers; programs send an Arrow stream."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"keys": ["00" * 16], "values": True}]})
    keys: list[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]] = Field(max_length=10_000, description="Each 32 hex digits.")
    values: bool = Field(False, description="Give token_logps too.")


class LookupAnswer(BaseModel):
    """One entry per key, in order; null for a key that the snapshot has not."""

    reference_id: str
    snapshot: int
    scored_len: list[int | None] = Field(description="Values that are stored.")
    logp_sum: list[float | None] = Field(description="Their sum, nats.")
    token_logps: list[list[float] | None] | None = Field(None, description="The values, where they were asked for.")


class Health(BaseModel):
    status: str
    version: str


def create_app(settings: ServerSettings) -> FastAPI:
    """The app for these settings.

    Raises what Shelf raises: a service that cannot answer for its references does not start.
    """
    app = FastAPI(title=_TITLE, version=version("reflogp"), description="Reference log-probs, looked up and scored.")
    problems.install(app)
    shelf = Shelf(settings)
    registry = CollectorRegistry()
    asked = Counter("reflogp_lookup_keys", "Keys looked up.", ["found"], registry=registry)
    seconds = Histogram("reflogp_request_seconds", "Time to answer.", ["route", "status"], registry=registry)
    reader = Depends(requires("read", settings.tokens))

    @app.middleware("http")
    async def _timed(request: Request, call_next: Any) -> Response:
        start = time.perf_counter()
        response: Response = await call_next(request)
        route = getattr(request.scope.get("route"), "path", "other")
        seconds.labels(route, response.status_code).observe(time.perf_counter() - start)
        return response

    @app.get("/healthz", tags=["health"])
    async def healthz() -> Health:
        """The process answers."""
        return Health(status="ok", version=version("reflogp"))

    @app.get("/readyz", tags=["health"], responses=documented(503))
    async def readyz() -> Health:
        """The store can be read."""
        try:
            await to_thread.run_sync(shelf.list)
        except ReflogpError as error:
            raise Problem(503, str(error), "an administrator checks the store") from error
        return Health(status="ready", version=version("reflogp"))

    @app.get(
        "/metrics", tags=["health"], dependencies=[reader], response_class=PlainTextResponse, responses=documented(401, 403)
    )
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/references", tags=["references"], dependencies=[reader], responses=documented(401, 403, 503))
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
        asked.labels("no").inc(table["scored_len"].null_count)
        asked.labels("yes").inc(len(table) - table["scored_len"].null_count)
        return table

    @app.post(
        "/v1/lookup",
        tags=["lookup"],
        dependencies=[reader],
        response_model=LookupAnswer,
        responses={**documented(400, 401, 403, 404, 408, 413, 415, 422, 503), 200: {"content": {ARROW_STREAM: {}}}},
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {"schema": LookupRequest.model_json_schema()},
                    ARROW_STREAM: {"schema": {"type": "string", "format": "binary"}},
                },
            }
        },
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
        kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if kind == ARROW_STREAM:
            keys = await to_thread.run_sync(keys_of, body, settings.max_lookup_keys)
            return arrow_response(await to_thread.run_sync(answer, reference, snapshot, keys, values))
        if kind != "application/json":
            raise Problem(415, f"content type {kind!r}", f"send application/json or {ARROW_STREAM}")
        try:
            asked_for = LookupRequest.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise Problem(422, f"{where}: {first['msg']}", "see /docs for what the route takes") from error
        keys = pa.array([bytes.fromhex(key) for key in asked_for.keys], KEY_TYPE)
        table = await to_thread.run_sync(answer, reference, snapshot, keys, asked_for.values)
        about = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
        return LookupAnswer(reference_id=about["reference_id"], snapshot=int(about["snapshot"]), **table.to_pydict())

    return app
