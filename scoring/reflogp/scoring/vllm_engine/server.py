"""Implement a Transport that connects to a running `vllm serve`, sends concurrent HTTP requests and retries failed ones.

reflogp cannot read the server's weights. Instead, `check_claim` scores a few sequences both locally and on the server, and
compares the values. Requests for log-probs have one of three forms, listed from best to worst. The first two forms need
`vllm serve --enable-scale-out`.

    token_ids    POST /inference/v1/generate, returns values of the completion's tokens only; needs vLLM's model runner V2
    prompt       POST /inference/v1/generate, returns values of all tokens
    completions  POST /v1/completions, returns values of all tokens; supported by all servers
"""

from __future__ import annotations

import base64
import binascii
import io
import random
import threading
import time
import warnings
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, Literal

import httpx
import numpy as np

from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine.sequences import Sequence, SequenceImages, token_logps_of
from reflogp.scoring.vllm_engine.answers import Answer, Request
from reflogp.scoring.vllm_engine.engine import PASSES, VllmEngine
from reflogp.store import Reference, UsageError
from reflogp.store.checkpoint import Checkpoint

Form = Literal["token_ids", "prompt", "completions"]
FORMS: tuple[Form, ...] = ("token_ids", "prompt", "completions")
#: The number that vLLM writes instead of minus infinity, which JSON cannot represent (vllm.logprobs, clamp_prompt_logprobs).
_MINUS_INFINITY = -9999.0


def question(form: Form, model: str, request: Request, salt: str, top_k: int = 0) -> tuple[str, dict[str, Any]]:
    ids = request.ids.tolist()
    if form == "completions":
        return "/v1/completions", {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k}
    settings: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    if form == "token_ids":
        wanted = [[token] for token in ids[request.prompt_len :]]
        settings |= {"prompt_logprob_token_ids": wanted, "prompt_logprob_start": request.prompt_len - 1}
        settings["skip_reading_prefix_cache"] = not request.reads_cache
    else:
        settings |= {"prompt_logprobs": top_k, "skip_reading_prefix_cache": True}
    return "/inference/v1/generate", {"model": model, "token_ids": ids, "sampling_params": settings, "cache_salt": salt}


def values(form: Form, answer: dict[str, Any], request: Request, top_k: int = 0) -> Any:
    """Return the log-probs of the completion's tokens, float32, or None if the response does not contain all of them.

    With `top_k`, there are 1 + 2 * top_k numbers for each token; see `top_logps_of`.
    """
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
        chosen = []
        for at in range(request.prompt_len, len(ids)):
            chosen.append(entries[at][str(ids[at])]["logprob"])
            if top_k:
                top = sorted(entries[at].items(), key=lambda entry: entry[1]["rank"])[:top_k]
                chosen += [entry["logprob"] for _, entry in top] + [int(token) for token, _ in top]
    except (KeyError, IndexError, TypeError, ValueError, binascii.Error):
        return None
    found = np.array(chosen, np.float32)
    return np.where(found <= _MINUS_INFINITY, -np.inf, found)


def cached_tokens(answer: dict[str, Any]) -> int:
    """Return how many tokens the server read from its cache according to its response, or 0 if the response does not say."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


#: Timeout for a response, in seconds. It is long because a sequence may have to wait for many others.
_ANSWER_SECONDS = 600.0
#: The first and the longest pause between attempts, in seconds. Each pause is twice as long as the previous one, up to the
#: longest pause. In addition, each pause is randomly shortened or lengthened by up to half.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0
#: If all attempts have failed for this many seconds, a warning says that reflogp is waiting for the server.
_SAID_SECONDS = 3.0
#: Status codes after which a request is retried. The codes in `_AWAY` mean that the server is overloaded, or that the server or
#: a proxy is restarting. `_LATER` also contains 500, which a server sends while it shuts down. Requests that test what the
#: server supports are retried only after the codes in `_AWAY`, because a server may also send 500 for a request that it does
#: not support.
_AWAY = (408, 425, 429, 502, 503, 504)
_LATER = (*_AWAY, 500)
#: A request is not retried after this many responses with status 500 while the server answers a test request.
_STRIKES = 3
#: The maximum number of tokens in all passes in flight together is this number times the maximum number of concurrent requests.
_TOKENS_EACH = 1024


#: A short sequence that every server can score.
_TEST_REQUEST = Request(np.array([0, 0, 0]), 1, False)


class VllmServer:
    """A connection to a running vLLM server. Whether the server's model is the reference model is not checked here."""

    block_size: int | None = None

    def __init__(
        self,
        url: str,
        model: str | None = None,
        key: str | None = None,
        concurrency: int = 64,
        patience_seconds: float = 300.0,
        top_k: int = 0,
    ) -> None:
        self._top_k = top_k
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url {url}: use the address of a running vllm serve, such as http://HOST:PORT")
        self._url, self._patience_seconds = url, patience_seconds
        self._http = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=10.0),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="vllm-server")
        self._silent_since: float | None = None
        self._said = False
        self._closed = threading.Event()
        self._model, self.max_tokens = self._find_model(model)
        about = self._sent("GET", "/version", None, _AWAY)  # a proxy might not forward this path
        self._version = str(about.json().get("version")) if about.status_code == 200 else "unknown"
        self.form = self._find_form()
        self.reads_cache = self.form == "token_ids"
        self.token_budget = concurrency * _TOKENS_EACH // PASSES

    def problem_of_images(self, images: SequenceImages) -> str | None:
        # /inference/v1/generate accepts images together with token ids, in the field content_parts or in the field features.
        # With content_parts, the server itself replaces each placeholder with image tokens. With features, the caller must send
        # tensors and token ranges from vLLM's own processor, and these ranges cannot exclude text tokens between the tokens of
        # an image.
        return "a vLLM server generates image tokens with its own image processor, whose settings reflogp cannot check"

    def ask(self, requests: list[Request], salt: str) -> Iterator[Answer]:
        futures = {self._threads.submit(self._answer, request, salt): at for at, request in enumerate(requests)}
        return self._answers(futures)

    @staticmethod
    def _answers(futures: dict[Future[tuple[Any, int, str | None]], int]) -> Iterator[Answer]:
        try:
            for future in as_completed(futures):
                yield Answer(futures[future], *future.result())
        finally:  # after an error, the other responses are not needed
            for future in futures:
                future.cancel()

    def revive(self) -> bool:
        return False

    def provenance(self) -> dict[str, Any]:
        """The provenance omits the server's address and its name for the model, because they may be confidential."""
        return {"engine": "remote", "vllm": self._version, "method": self.form}

    def close(self) -> None:
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _answer(self, request: Request, salt: str) -> tuple[Any, int, str | None]:
        path, body = question(self.form, self._model, request, salt, self._top_k)
        response = self._sent("POST", path, body, _LATER)
        if response.status_code == 500:
            return None, 0, f"the server failed {_STRIKES} times with this sequence, but answers others ({_said(response)})"
        answer = self._json(response, path)
        return values(self.form, answer, request, self._top_k), cached_tokens(answer), None

    def _answers_others(self) -> bool:
        path, body = question(self.form, self._model, _TEST_REQUEST, "probe")
        try:
            return self._http.request("POST", path, json=body).status_code == 200
        except httpx.TransportError:
            return False

    def _find_model(self, name: str | None) -> tuple[str, int]:
        """Return the server's name for the model, and the length in tokens of the longest sequence that the server accepts."""
        path = "/v1/models"
        served = {entry["id"]: entry for entry in self._json(self._sent("GET", path, None, _LATER), path).get("data", [])}
        if not served:
            raise UsageError(f"{self._url} serves no model; start `vllm serve` with the reference model")
        if name is None and len(served) != 1:
            raise UsageError(f"{self._url} serves {len(served)} models: name one with --served-model ({_some(served)})")
        name = name or next(iter(served))
        if name not in served:
            raise UsageError(f"{self._url} does not serve {name!r}; it serves {_some(served)}")
        return name, int(served[name].get("max_model_len") or 2**31) - 1

    def _find_form(self) -> Form:
        refusals = []
        for form in FORMS[1:] if self._top_k else FORMS:
            path, body = question(form, self._model, _TEST_REQUEST, "probe", self._top_k)
            response = self._sent("POST", path, body, _AWAY)
            found = (
                values(form, self._json(response, path), _TEST_REQUEST, self._top_k) if response.status_code == 200 else None
            )
            if found is not None:
                return form
            refusals.append(f"{path}: {response.status_code} {_said(response)}")
        raise EngineError(f"{self._url} does not return log-probs of the tokens in a request ({'; '.join(refusals)})")

    def _json(self, response: httpx.Response, path: str) -> dict[str, Any]:
        if response.status_code != 200:
            raise EngineError(f"{self._url}{path} responded with {response.status_code} {_said(response)}")
        try:
            answer: dict[str, Any] = response.json()
        except ValueError as error:
            raise EngineError(f"{self._url}{path} did not respond with JSON: {_said(response)}") from error
        return answer

    def _sent(self, method: str, path: str, body: dict[str, Any] | None, later: Collection[int]) -> httpx.Response:
        """Send a request and return the response. Retry if there is no response, or if the response's status is in `later`.

        A response with status 500 is returned, not retried, if the server fails repeatedly and yet answers a test request.

        Raises EngineError if attempts fail for longer than `patience_seconds`, or if the engine is closed.
        """
        pause, strikes = _FIRST_PAUSE, 0
        while True:
            try:
                response = self._http.request(method, path, json=body)
                if response.status_code not in later:
                    self._silent_since, self._said = None, False
                    return response
                strikes += response.status_code == 500
                if strikes >= _STRIKES and response.status_code == 500 and self._answers_others():
                    return response
                problem = f"{response.status_code} {_said(response)}"
            except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed
                problem = f"{type(error).__name__}: {error}"
            now = time.monotonic()
            since = self._silent_since = self._silent_since or now
            if now - since > _SAID_SECONDS and not self._said:
                self._said = True
                waiting = f"waiting up to {self._patience_seconds:.0f} s for the server (--patience)"
                warnings.warn(f"{self._url} is unreachable or busy ({problem}); {waiting}", stacklevel=2)
            if self._closed.wait(pause * random.uniform(0.5, 1.5)):
                raise EngineError("the engine was closed")
            if now - since > self._patience_seconds:
                raise EngineError(
                    f"{self._url} has been unreachable or busy for {now - since:.0f} s ({problem}). Values computed so "
                    "far are kept: run the same command again when the server is back, or with a larger --patience"
                )
            pause = min(2 * pause, _LONGEST_PAUSE)


def _said(response: httpx.Response) -> str:
    try:
        said = response.json()
        said = said.get("error", said) if isinstance(said, dict) else said
        text = str(said.get("message", said) if isinstance(said, dict) else said)
    except ValueError:
        text = response.text
    return text.splitlines()[0][:200] if text else ""


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (", …" if len(listed) > 5 else "") if listed else "none"


#: (prompt length, completion length) of each sequence that `check_claim` scores. Three sequences have at most 512 tokens, and
#: one is longer. With speculative decoding, vLLM's values can be wrong for prompts of up to 512 tokens
#: (github.com/vllm-project/vllm/issues/53488).
_CLAIM_LENGTHS = ((40, 23), (40, 31), (120, 60), (560, 80))


def check_claim(
    engine: VllmEngine, model: Checkpoint, reference: Reference, device: str, trust_remote_code: bool
) -> dict[str, Any]:
    """Compare a server's values for a few sequences with values computed locally; return entries for the provenance."""
    import torch

    from reflogp.scoring.torch_engine.engine import TorchEngine
    from reflogp.scoring.torch_engine.selfcheck import tolerance_of

    here = TorchEngine(
        model, reference.dtype, device, lm_head_dtype=reference.lm_head_dtype, trust_remote_code=trust_remote_code
    )
    draw = np.random.default_rng(0).integers
    pairs = [[draw(0, engine.vocab_size, length) for length in lengths] for lengths in _CLAIM_LENGTHS]
    sequences = [Sequence(prompt, completion) for prompt, completion in pairs]
    sequences = [sequence for sequence in sequences if not (here.problems([sequence]) or engine.problems([sequence]))]
    if not sequences:
        raise EngineError(
            "the server's maximum length is too small: the server accepts none of the sequences that reflogp compares; start "
            "`vllm serve` with a larger --max-model-len"
        )
    ours = np.concatenate(here.score(sequences))
    theirs = np.concatenate(list(map(token_logps_of, engine.score(sequences))))
    here.close()
    difference = float(np.sqrt(np.mean((ours - theirs) ** 2)))
    tolerance = tolerance_of(getattr(torch, reference.dtype), ours)
    if difference > tolerance:
        raise EngineError(
            f"the server does not serve {reference.name} in {reference.dtype} (reference {reference.reference_id}): "
            f"the server's log-probs of {len(ours)} tokens differ from those computed locally by {difference:.3g} nats "
            f"(root mean square), but at most {tolerance:.3g} nats are allowed"
        )
    return {"reference": "checked", "reference_difference": difference}
