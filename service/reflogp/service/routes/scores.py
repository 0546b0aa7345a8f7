"""Serve /v1/score, which computes log-probs of completions while the caller waits."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pyarrow as pa
from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, FailFast, Field

from reflogp.service.auth import requires
from reflogp.service.bodies import (
    JSON,
    body_schemas,
    decoded,
    json_response,
    read_body,
    read_json,
    require_type,
    sequences_of,
    too_many_tokens,
)
from reflogp.service.context import Context
from reflogp.service.online import Scored
from reflogp.service.problems import documented
from reflogp.service.worker.protocol import SEQUENCES, token_count
from reflogp.store.schema import ARROW_STREAM, stream_bytes

_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FailFast()]
#: Maximum number of sequences and of tokens in one request.
_MAX_SEQUENCES, _MAX_TOKENS = 4_096, 4 << 20
#: Maximum time in seconds that a request without deadline_ms waits for its values.
_DEADLINE_SECONDS = 300.0
#: Status that nginx logs when a caller has disconnected. Here it is used only in metrics.
_CLIENT_GONE = 499


class SequenceBody(BaseModel):
    """Token ids of a prompt and of the completion to score."""

    model_config = ConfigDict(extra="forbid")
    prompt_ids: _TokenIds = Field(description="Token ids of the prompt. No log-probs are computed for them.")
    completion_ids: _TokenIds = Field(description="Token ids of the completion. A log-prob is computed for each of them.")


class ScoreRequest(BaseModel):
    """Sequences to score. JSON is meant for small, hand-written requests; programs should send an Arrow stream."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"sequences": [{"prompt_ids": [1, 5, 9], "completion_ids": [7, 2]}]}]},
    )
    sequences: Annotated[list[SequenceBody], FailFast()] = Field(
        max_length=1_000, description="Sequences to score. The response keeps their order."
    )


class ScoreAnswer(BaseModel):
    """The computed or stored values. Each list has one entry per sequence, in the order of the request.

    If a sequence has an error, its entry in `token_logps` is null.
    """

    reference_id: str = Field(description="Id of the reference whose values are returned.")
    hits: int = Field(description="Number of sequences whose values came from the store.")
    engine_seconds: float = Field(
        description="Seconds from the start of the computation to the last value of this request. If the worker computes "
        "several requests together, the time can include work on the other requests."
    )
    queue_seconds: float = Field(description="Seconds that the request waited in the worker's queue.")
    token_logps: list[list[float] | None] = Field(description="Log-prob of each completion token, in nats.")
    errors: list[str | None] = Field(
        description="For each sequence, the reason why it has no values, or null if it has values."
    )


def scores_router(context: Context) -> APIRouter:
    router = APIRouter(dependencies=[Depends(requires("online", context.settings.tokens))])

    @router.post(
        "/v1/score",
        tags=["score"],
        summary="Score sequences now",
        response_model=ScoreAnswer,
        response_description="The values of the sequences, in the order of the request.",
        responses={
            **documented(400, 401, 403, 404, 413, 415, 422, 429, 500, 503, 504),
            200: {"content": {ARROW_STREAM: {}}},
        },
        openapi_extra=body_schemas("/v1/score", ScoreRequest, ARROW_STREAM),
    )
    async def score(
        request: Request,
        reference: Annotated[
            str, Query(max_length=200, description="Name or id of a reference that is named in the service's settings.")
        ],
        temperature: Annotated[
            float,
            Query(
                ge=0.01,
                le=100,
                description="Temperature: the logits are divided by it. Only the engine `torch` supports temperatures other "
                "than 1.",
            ),
        ] = 1.0,
        cache_read: Annotated[
            bool,
            Query(
                description="Whether to return stored values instead of computing them. With attention masks, or if "
                "temperature is not 1, all values are computed."
            ),
        ] = True,
        cache_write: Annotated[
            bool,
            Query(
                description="Whether to store computed values. With attention masks, or if temperature is not 1, no values are "
                "stored."
            ),
        ] = False,
        deadline_ms: Annotated[
            int | None,
            Query(
                ge=1,
                le=3_600_000,
                description="Maximum time to wait for the values, in milliseconds. After that, the request is rejected with "
                "504. Default: five minutes.",
            ),
        ] = None,
    ) -> Any:
        """Return log-probs of completions, given their prompts.

        If the request body is an Arrow stream with the columns `prompt_ids` and `completion_ids` (lists of integers), the
        response is an Arrow stream with the columns `token_logps` and `error`. The response's schema metadata contains
        reference_id, snapshot, hits, engine_seconds and queue_seconds.

        If there is a third column, `attention_mask` (0 or 1 for each token of the prompt and completion), each sequence is a
        row of a padded batch and may contain padding tokens. Such rows are passed to the model as they are, together with the
        mask. The model chooses the position ids. Only the engine `torch` can score such rows.

        If the request body is JSON, so is the response. If a sequence cannot be scored, its entry contains an error; the other
        sequences still get values.
        """
        as_arrow = require_type(request, JSON, ARROW_STREAM) == ARROW_STREAM
        top_k = context.registry.served(reference).settings.top_k
        most = _MAX_TOKENS // (1 + top_k // 4)  # most probable tokens take more memory than the tokens themselves
        async with context.large.turn_of(request):
            if as_arrow:
                body = await read_body(request)
                table = await decoded(lambda body: sequences_of(body, _MAX_SEQUENCES, most), body)
                del body
            else:
                asked = await read_json(request, ScoreRequest)
                table = await to_thread.run_sync(_table_of, asked)
                del asked
                if token_count(table) > most:
                    raise too_many_tokens(most)
        seconds = _DEADLINE_SECONDS if deadline_ms is None else deadline_ms / 1000
        scoring = asyncio.create_task(context.online.score(reference, table, temperature, cache_read, cache_write, seconds))
        scored = await _unless_gone(request, scoring)
        if scored is None:
            return Response(status_code=_CLIENT_GONE)
        return _arrow(scored) if as_arrow else await to_thread.run_sync(_json, scored)

    return router


async def _unless_gone(request: Request, scoring: asyncio.Task[Scored]) -> Scored | None:
    """Wait for `scoring` and return its result. If the caller disconnects first, cancel `scoring` and return None."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(gone())
    try:
        await asyncio.wait({scoring, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await scoring if scoring.done() else None
    finally:
        leaving.cancel()
        scoring.cancel()


def _arrow(scored: Scored) -> Response:
    about = {
        "reference_id": scored.reference_id,
        "snapshot": "" if scored.snapshot is None else str(scored.snapshot),
        "hits": str(scored.hits),
        "engine_seconds": f"{scored.engine_seconds:.6f}",
        "queue_seconds": f"{scored.queue_seconds:.6f}",
    }
    return Response(stream_bytes(scored.outcomes.replace_schema_metadata(about)), media_type=ARROW_STREAM)


def _table_of(asked: ScoreRequest) -> pa.Table:
    columns = [[getattr(sequence, name) for sequence in asked.sequences] for name in SEQUENCES.names]
    return pa.table(columns, schema=SEQUENCES)


def _json(scored: Scored) -> Response:
    return json_response(
        ScoreAnswer(
            reference_id=scored.reference_id,
            hits=scored.hits,
            engine_seconds=scored.engine_seconds,
            queue_seconds=scored.queue_seconds,
            token_logps=scored.outcomes["token_logps"].to_pylist(),
            errors=scored.outcomes["error"].to_pylist(),
        )
    )
