"""Write requests to a `vllm serve` and read its responses, as JSON, in three forms.

The forms, the best first:

    token_ids    POST /inference/v1/generate, values of the completion's tokens only (vLLM's runner V2)
    prompt       POST /inference/v1/generate, values of all tokens
    completions  POST /v1/completions, values of all tokens; all servers support it
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any, Literal

import numpy as np

from reflogp.scoring.vllm_engine.answers import Request

Form = Literal["token_ids", "prompt", "completions"]
FORMS: tuple[Form, ...] = ("token_ids", "prompt", "completions")
#: vLLM writes this for minus infinity, which JSON does not have (vllm.logprobs, clamp_prompt_logprobs).
_MINUS_INFINITY = -9999.0


def question(form: Form, model: str, request: Request, salt: str) -> tuple[str, dict[str, Any]]:
    """Return (path, JSON body) of one request."""
    ids = request.ids.tolist()
    if form == "completions":
        return "/v1/completions", {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    settings: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    if form == "token_ids":
        wanted = [[token] for token in ids[request.prompt_len :]]
        settings |= {"prompt_logprob_token_ids": wanted, "prompt_logprob_start": request.prompt_len - 1}
        settings["skip_reading_prefix_cache"] = not request.reads_cache
    else:
        settings |= {"prompt_logprobs": 0, "skip_reading_prefix_cache": True}
    return "/inference/v1/generate", {"model": model, "token_ids": ids, "sampling_params": settings, "cache_salt": salt}


def values(form: Form, answer: dict[str, Any], request: Request) -> Any:
    """Return the float32 values of the completion's tokens, or None if the response does not hold all of them."""
    ids = request.ids.tolist()
    try:
        if form == "token_ids":
            packed = base64.b64decode(answer["prompt_token_id_logprobs"], validate=True)
            found = np.load(io.BytesIO(packed), allow_pickle=False).astype(np.float32)
            return found[:, 0] if found.shape == (len(ids) - request.prompt_len, 1) else None
        holder = answer["choices"][0] if form == "completions" else answer
        entries = holder["prompt_logprobs"]
        if len(entries) != len(ids):
            return None
        chosen = [entries[at][str(ids[at])]["logprob"] for at in range(request.prompt_len, len(ids))]
    except (KeyError, IndexError, TypeError, ValueError, binascii.Error):
        return None
    found = np.array(chosen, np.float32)
    return np.where(found <= _MINUS_INFINITY, -np.inf, found)


def cached_tokens(answer: dict[str, Any]) -> int:
    """Return the number of tokens that the server reports as read from its cache; 0 if it reports nothing."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
