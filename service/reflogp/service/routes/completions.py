"""Serve /v1/completions, /v1/models and /health as `vllm serve` does, for clients that ask it for log-probs of given tokens.

TRL's teacher client, axolotl's online distillation and lm-eval send such requests. reflogp computes the log-prob of each token
of a prompt from the second on, and the most probable tokens at its position, and stores them, but generates nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any, Literal

import pyarrow as pa
from anyio import to_thread
from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from reflogp.service.auth import requires
from reflogp.service.bodies import JSON, body_schemas, read_json, too_many_tokens
from reflogp.service.context import Context
from reflogp.service.problems import Problem, documented
from reflogp.service.worker.protocol import SEQUENCES
from reflogp.store import Reference
from reflogp.store.schema import one_array

#: Maximum size of a request in bytes, its maximum number of prompts, and the maximum number of log-probs in a response. Parsing
#: takes about 40 bytes for each token id.
_MOST_BYTES, _MOST_PROMPTS, _MOST_LOGPS = 8 << 20, 1_024, 4 << 20
#: Number of responses that are written at the same time; each takes up to a gigabyte of memory.
_WRITERS = 2
_SECONDS = 600.0


#: JSON Schemas of what `CompletionRequest.prompts` and `CompletionRequest.check` accept.
_IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
_PROMPT: dict[str, Any] = {"anyOf": [_IDS, {"type": "array", "minItems": 1, "maxItems": _MOST_PROMPTS, "items": _IDS}]}
_ASKS_FOR_LOGPS: list[Any] = [
    {"required": ["prompt_logprobs"], "properties": {"prompt_logprobs": {"type": "integer"}}},
    {"required": ["echo", "logprobs"], "properties": {"echo": {"const": True}, "logprobs": {"type": "integer"}}},
]
_ZERO_OR_ONE: dict[str, Any] = {"enum": [0, 1, None]}


class CompletionRequest(BaseModel):
    """A request as vLLM's `POST /v1/completions` takes it. Other fields of such requests are ignored."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"anyOf": _ASKS_FOR_LOGPS})
    model: str | None = Field(None, max_length=200, description="Name or id of a reference; not needed if there is only one.")
    prompt: Any = Field(
        description="Token ids of a prompt (a list of integers), or a list of such lists.", json_schema_extra=_PROMPT
    )
    max_tokens: int | None = Field(
        None, description="0 or 1. Nothing is generated; 1 is accepted because vLLM refuses 0.", json_schema_extra=_ZERO_OR_ONE
    )
    temperature: float | None = Field(
        None,
        description="0 or 1. Values are always computed at temperature 1, as in vLLM.",
        json_schema_extra=_ZERO_OR_ONE,
    )
    echo: bool | None = Field(None, description="Whether to return `logprobs` of the prompt's tokens.")
    logprobs: int | None = Field(None, ge=0, le=256, description="With `echo`: number of most probable tokens per position.")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=256, description="Number of most probable tokens per position in the choices' `prompt_logprobs`."
    )
    stream: Literal[False] | None = Field(None, description="Not supported: false or absent.")
    n: Literal[1] | None = Field(None, description="Not supported: 1 or absent.")
    best_of: Literal[1] | None = Field(None, description="Not supported: 1 or absent.")
    truncate_prompt_tokens: None = Field(None, description="Not supported: absent.")

    def prompts(self) -> list[list[int]]:
        several = isinstance(self.prompt, list) and all(isinstance(ids, list) for ids in self.prompt)
        prompts = self.prompt if several else [self.prompt]
        if not (0 < len(prompts) <= _MOST_PROMPTS and all(map(_are_ids, prompts))):
            raise Problem(
                422,
                f"prompt: 1 to {_MOST_PROMPTS:,} lists of token ids are needed, none of them empty",
                "tokenize texts before you send them, and split long lists of prompts",
            )
        return prompts

    def check(self) -> int:
        """Return the number of most probable tokens that are needed. Raises Problem for what reflogp does not do."""
        step = "send token ids with max_tokens 1 and prompt_logprobs, or with echo and logprobs"
        if self.max_tokens not in (None, 0, 1):
            raise Problem(422, f"max_tokens {self.max_tokens}: this service scores prompts and generates no tokens", step)
        if self.temperature not in (None, 0.0, 1.0):
            raise Problem(
                422,
                f"temperature {self.temperature:g}: values are computed at temperature 1",
                "send temperature 1, and rescale the values: p ** (1 / T), renormalised over the tokens that you have",
            )
        if self.prompt_logprobs is None and not (self.echo and self.logprobs is not None):
            raise Problem(422, "the request asks for no log-probs of its prompts", step)
        return max(self.prompt_logprobs or 0, self.logprobs or 0 if self.echo else 0)


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and bool(ids) and all(type(token) is int and 0 <= token < 2**31 for token in ids)


def completions_router(context: Context) -> APIRouter:
    router = APIRouter(tags=["completions"])
    writing = asyncio.Semaphore(_WRITERS)
    scorer = Depends(requires("online", context.settings.tokens))

    @router.get(
        "/health",
        summary="Check that the process responds",
        response_class=Response,
        response_description="The process responds.",
    )
    async def health() -> Response:
        """Return 200 to show that the process responds. The body is empty, as vLLM's."""
        return Response()

    @router.get(
        "/v1/models",
        dependencies=[Depends(requires("read", context.settings.tokens))],
        summary="List models",
        response_description="The names of the references that the service has a model for.",
        responses=documented(401, 403),
    )
    async def models() -> dict[str, Any]:
        """List the references by name, in the format of OpenAI's and vLLM's `GET /v1/models`."""
        about = {"object": "model", "created": 0, "owned_by": "reflogp"}
        found = [
            {"id": name, **about, "root": served.reference.name, "max_model_len": _positions_of(served.reference)}
            for name, served in context.registry.named.items()
        ]
        return {"object": "list", "data": found}

    @router.post(
        "/v1/completions",
        dependencies=[scorer],
        summary="Score prompts as vLLM does",
        response_description="A choice for each prompt, in the order of the request.",
        responses=documented(400, 401, 403, 404, 413, 415, 422, 429, 500, 503, 504),
        openapi_extra=body_schemas("/v1/completions", CompletionRequest),
    )
    async def completions(request: Request) -> Response:
        """Return log-probs of prompts that are given as token ids, in the format of vLLM's `POST /v1/completions`.

        Each token from a prompt's second on has a log-prob, and the first one null. Values are read from the store if they are
        there, and stored otherwise. The service decodes no tokens: texts are empty, and tokens are written `token_id:ID`. In
        `prompt_logprobs`, a token that is not among the K most probable ones has the rank K + 1.
        """
        async with context.large.turn_of(request):
            asked = await read_json(request, CompletionRequest, _MOST_BYTES)
        model = asked.model or _only_model(list(context.registry.named))
        served = context.registry.served(model).settings.top_k
        top_k, prompts = asked.check(), asked.prompts()
        if top_k > served:
            raise Problem(
                422,
                f"{top_k} most probable tokens were requested, but {model!r} is served with top_k = {served}",
                f"ask for at most {served}, or have `top_k = {top_k}` set for this reference in the service's settings",
            )
        scored = [at for at, ids in enumerate(prompts) if len(ids) > 1]  # a first token has no context
        if sum(map(len, prompts)) * (1 + served) > _MOST_LOGPS:
            raise too_many_tokens(_MOST_LOGPS // (1 + served))
        table = pa.table([[prompts[at][:1] for at in scored], [prompts[at][1:] for at in scored]], schema=SEQUENCES)
        found = await context.online.score(model, table, 1.0, True, True, _SECONDS, top_k)
        for at, problem in zip(scored, found.outcomes["error"].to_pylist(), strict=True):
            if problem is not None:
                raise Problem(422, f"prompt {at} cannot be scored: {problem}", "remove it, and send the others again")
        async with writing:
            return await to_thread.run_sync(_response, asked, model, prompts, scored, found.outcomes, top_k)

    return router


def _positions_of(reference: Reference) -> int | None:
    config = reference.config.get("text_config", reference.config)
    positions: int | None = config.get("max_position_embeddings") or config.get("n_positions")
    return positions


def _only_model(names: list[str]) -> str:
    if len(names) != 1:
        raise Problem(404, f"model: name one of {', '.join(names) or 'no models'}", "GET /v1/models lists them")
    return names[0]


def _response(
    asked: CompletionRequest, model: str, prompts: list[list[int]], scored: list[int], outcomes: pa.Table, top_k: int
) -> Response:
    columns = {name: one_array(outcomes[name]) for name in outcomes.column_names if name != "error"}
    places = {index: place for place, index in enumerate(scored)}
    choices = []
    for index, ids in enumerate(prompts):
        positions: list[list[_Entry]] = []
        if index in places:
            logps, *tops = (column[places[index]].values.to_numpy() for column in columns.values())
            rows = [top.reshape(-1, top_k).tolist() for top in tops] or [[[]] * len(logps)] * 2
            positions = [_entries(*of) for of in zip(ids[1:], logps.tolist(), *rows, strict=True)]
        choice = {"index": index, "text": "", "finish_reason": "length", **_choice(asked, ids, positions)}
        choices.append(_json(choice))  # as text, which takes a tenth of the memory
    tokens = sum(map(len, prompts))
    content = {
        "id": "cmpl-reflogp",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
    }
    return Response(f'{_json(content)[:-1]},"choices":[{",".join(choices)}]}}', media_type=JSON)


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


#: A token at a position: its id, its log-prob, and its rank, which is unknown if no most probable tokens were requested.
_Entry = tuple[int, float, int | None]


def _entries(token: int, logp: float, ids: list[int], logps: list[float]) -> list[_Entry]:
    """Return the entries of a position: the most probable tokens and the prompt's own, which is among them or comes last.

    The log-probs of most probable tokens are rounded if they were stored, and the token's own is not. They are made to have the
    order of the ranks, because clients compare them to see whether the token is the most probable one.
    """
    if not ids:
        return [(token, logp, None)]
    place = ids.index(token) if token in ids else len(ids)
    above = math.nextafter(logp, math.inf)
    before = zip(ids[:place], logps, strict=False)
    entries: list[_Entry] = [(top, max(value, above), rank) for rank, (top, value) in enumerate(before, 1)]
    entries.append((token, logp, place + 1))
    after = zip(ids[place + 1 :], logps[place + 1 :], strict=True)
    return entries + [(top, min(value, logp), place + 2 + more) for more, (top, value) in enumerate(after)]


def _choice(asked: CompletionRequest, ids: list[int], positions: list[list[_Entry]]) -> dict[str, Any]:
    """Return the fields of a choice that have log-probs. `positions` has the entries of each token of `ids` but the first."""

    def chosen(entries: list[_Entry], token: int, k: int) -> list[_Entry]:
        """Return the entries that were asked for. As in vLLM, the prompt's own token is first, and clients rely on it."""
        return sorted((of for of in entries if of[0] == token or (of[2] or 1) <= k), key=lambda of: of[0] != token)

    found: dict[str, Any] = {"logprobs": None, "prompt_logprobs": None}
    if (k := asked.prompt_logprobs) is not None:
        found["prompt_logprobs"] = [None] + [
            {
                str(top): {"logprob": logp, "rank": rank, "decoded_token": f"token_id:{top}"}
                for top, logp, rank in chosen(entries, token, k)
            }
            for token, entries in zip(ids[1:], positions, strict=True)
        ]
    if asked.echo and (k := asked.logprobs) is not None:
        own = [
            next(logp for top, logp, _ in entries if top == token) for token, entries in zip(ids[1:], positions, strict=True)
        ]
        tops = [
            {f"token_id:{top}": logp for top, logp, _ in chosen(entries, token, k)}
            for token, entries in zip(ids[1:], positions, strict=True)
        ]
        count = asked.max_tokens or 0
        generated = [None] * count  # clients expect an entry for a token that vLLM would generate
        found["logprobs"] = {
            "tokens": [f"token_id:{token}" for token in ids] + [""] * count,
            "token_logprobs": [None, *own, *generated],
            "top_logprobs": [None, *tops, *generated],
            "text_offset": [0] * (len(ids) + count),
        }
    return found
