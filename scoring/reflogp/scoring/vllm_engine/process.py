"""Run vLLM in a separate process: read requests from stdin and write log-probs to stdout until stdin is closed.

The process runs in vLLM's environment, as `python -m reflogp.scoring.vllm_engine.process`. The only extra of reflogp that this
environment needs is `vllm`. The caller decides which requests may read vLLM's prefix cache. The caller and the process exchange
the following messages. The functions in parentheses, in answers.py, encode the messages' bodies. The
process sends `ready` when the model is loaded, and `dying` before it exits because of an error.

    caller -> process   configure, then score (requests_body)
    process -> caller   ready, answers (answers_table), dying
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from reflogp.scoring.frames import Frame, encode, read_frame
from reflogp.scoring.vllm_engine.answers import Answer, Request, answers_table, requests_of
from reflogp.scoring.vllm_engine.images import ImagePrompts, ImageRefusedError
from reflogp.scoring.wire import SentImages
from reflogp.store.images import FIRST_IMAGE_ID
from reflogp.store.schema import stream_bytes
from reflogp.store.texts import first_line

#: Maximum number of requests in vLLM at the same time, as a multiple of vLLM's batch size. With 2, the next batch is already
#: waiting while a batch runs.
_WAITING = 2
#: Maximum fraction of vLLM's cache that all requests in flight may need together. If the cache were full, vLLM would preempt
#: and restart a request. The restarted request could read cache blocks that it had written itself, and vLLM computes no
#: log-probs for the positions in these blocks.
_ROOM = 0.9
#: Lengths of the sequences that are scored in one batch at startup. Some problems do not occur with a single sequence.
_PROBES = (4, 40, 9)
#: For the check of images at startup: the maximum number of tokens that are scored after a test image, and the maximum
#: difference in nats between a token's log-probs with and without the cache.
_CHECKED, _SAME = 8, 0.25
#: Defaults for environment variables. VLLM_CPU_KVCACHE_SPACE (GiB) is set because vLLM on a CPU would otherwise use most of the
#: memory for its cache.
_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}
#: Default arguments for `vllm.LLM` on a CPU. With vLLM's default block size of 128 tokens, most prompts would share few blocks.
#: With `enforce_eager`, vLLM does not compile the model. Compiling takes minutes and does not make scoring faster.
_ON_A_CPU = {"block_size": 32, "enforce_eager": True}
#: How long this process waits for a running step after stdin was closed, in seconds. vLLM's own processes exit when this
#: process exits.
_LAST_SECONDS = 10.0


class Scorer:
    """vLLM's engine, used only to compute the log-probs of given completions."""

    def __init__(self, options: dict[str, Any], adapter: str | None, no_images: str | None, top_k: int = 0) -> None:
        self._top_k = top_k
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm  # vLLM reads the environment when it is imported
        from vllm.exceptions import VLLMClientError
        from vllm.lora.request import LoRARequest
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind

        self._vllm = vllm
        self._client_error = VLLMClientError
        self._final_only = RequestOutputKind.FINAL_ONLY
        self.device = str(current_platform.get_device_name() or "cpu")
        if current_platform.is_cpu():
            options = {**_ON_A_CPU, **options}
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # on a CPU, a second process does not make vLLM faster
        self._engine = vllm.LLM(**options).llm_engine
        self._lora = LoRARequest("reference", 1, adapter) if adapter is not None else None
        config = self._engine.vllm_config
        self.block_size = int(config.cache_config.block_size)
        self.room = int(int(config.cache_config.num_gpu_blocks) * _ROOM)
        self._at_a_time = _WAITING * int(config.scheduler_config.max_num_seqs)
        self._flying: dict[str, Request] = {}
        self._blocks = 0
        self.method = self._find_method()
        self.images: ImagePrompts | None = None
        self.no_images = no_images
        if no_images is None:
            try:
                self.images = ImagePrompts(self._engine)
                self._check_images(self.images)
            except ImageRefusedError as error:
                self.no_images = str(error)

    def about(self) -> dict[str, Any]:
        config = self._engine.vllm_config
        return {
            "vllm": str(self._vllm.__version__),
            "method": self.method,
            "block_size": self.block_size,
            "max_model_len": int(config.model_config.max_model_len),  # includes the token that vLLM samples
            "prefix_cache": bool(config.cache_config.enable_prefix_caching),
            "batched_tokens": int(config.scheduler_config.max_num_batched_tokens),  # in one step
            "room_tokens": self.room * self.block_size,
            "device": self.device,
            "tensor_parallel": int(config.parallel_config.tensor_parallel_size),
            "no_images": self.no_images,
            "image_settings": self.images.settings if self.images is not None else None,
            "image_library": self.images.library if self.images is not None else None,
            "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT") == "1",
        }

    def fits(self, tokens: int) -> bool:
        """Return True if a request with this many tokens may be added to the requests in flight."""
        enough = self._blocks + self._blocks_of(tokens) <= self.room and len(self._flying) < self._at_a_time
        return enough or not self._flying

    def busy(self) -> bool:
        return bool(self._flying)

    def add(self, number: int, request: Request, salt: str) -> None:
        ids = request.model_ids()
        settings = self._settings(self.method, ids, request.prompt_len, not request.reads_cache)
        if request.images is None:
            prompt = self._vllm.TokensPrompt(prompt_token_ids=ids, cache_salt=salt)
            self._engine.add_request(str(number), prompt, settings, lora_request=self._lora)
        else:
            if self.images is None:
                raise ImageRefusedError(str(self.no_images))
            prompt = self.images.prompt(request, salt)
            try:
                self._engine.add_request(str(number), prompt, settings)
            except (ValueError, self._client_error) as error:  # for example, an image is too large
                raise ImageRefusedError(f"vLLM refuses the sequence: {first_line(error)[:200]}") from error
        self._flying[str(number)] = request
        self._blocks += self._blocks_of(len(ids))

    def step(self) -> Iterator[Answer]:
        for output in self._engine.step():
            if not output.finished or output.request_id not in self._flying:
                continue
            request = self._flying.pop(output.request_id)
            self._blocks -= self._blocks_of(len(request.ids))
            values = self._values(output, len(request.ids) - request.prompt_len)
            problem = None
            if request.images is not None and list(output.prompt_token_ids) != request.model_ids():
                values, problem = None, "vLLM scored token ids that differ from those of the sequence"
            yield Answer(int(output.request_id), values, int(output.num_cached_tokens or 0), problem)

    def _blocks_of(self, tokens: int) -> int:
        return -(-(tokens + 1) // self.block_size)

    def _settings(self, method: str, ids: list[int], prompt_len: int, skip_cache: bool) -> Any:
        shared = {
            "max_tokens": 1,
            "temperature": 0.0,
            "detokenize": False,
            "skip_reading_prefix_cache": skip_cache,
            "skip_clone": True,
            "output_kind": self._final_only,
        }
        if method == "prompt_logprob_token_ids":
            wanted = np.array(ids[prompt_len:], np.int32)[:, None]
            return self._vllm.SamplingParams(**shared, prompt_logprob_token_ids=wanted, prompt_logprob_start=prompt_len - 1)
        return self._vllm.SamplingParams(**shared, prompt_logprobs=self._top_k, flat_logprobs=True)

    def _values(self, output: Any, count: int) -> Any:
        """Return the log-probs of the last `count` tokens, or None if the response does not contain them.

        With `top_k`, there are 1 + 2 * top_k numbers for each token; see `top_logps_of`.
        """
        if self.method == "prompt_logprob_token_ids":
            found = output.prompt_token_id_logprobs
            return None if found is None else np.asarray(found, np.float32)[:, 0]
        found, width = output.prompt_logprobs, 1 + self._top_k
        if found is None or len(found.logprobs) < count * width:
            return None
        logps = np.array(found.logprobs[-count * width :], np.float32)  # at each position, the token itself comes first
        if not self._top_k:
            return logps
        ids = np.array(found.token_ids[-count * width :], np.float32)
        return np.concatenate([logps.reshape(count, width), ids.reshape(count, width)[:, 1:]], 1).ravel()

    def _find_method(self) -> str:
        """Return the best method that works: "prompt_logprob_token_ids" if possible, otherwise "prompt_logprobs"."""
        for method in ("prompt_logprobs",) if self._top_k else ("prompt_logprob_token_ids", "prompt_logprobs"):
            self.method = method
            try:
                for number, length in enumerate(_PROBES):
                    self.add(number, Request(np.zeros(length, np.int64), length // 2, False), "probe")
            except Exception as error:  # ValueError or vLLM's own exception class, depending on vLLM's version
                if method not in str(error) or method == "prompt_logprobs":
                    raise
                continue
            if all(answer.values is not None for answer in self._finished()):
                return method
        raise RuntimeError("vLLM does not return log-probs of the tokens in a request")

    def _finished(self) -> list[Answer]:
        found: list[Answer] = []
        while self.busy():
            found += self.step()
        return sorted(found, key=lambda answer: answer.at)

    def _check_images(self, prompts: ImagePrompts) -> None:
        """Check that vLLM's values depend on the image, and do not change when vLLM reads the image from its prefix cache.

        The same completion is scored three times: after each of two different images, and again after the first of them, which
        is then in the cache.
        """
        found: list[Any] = []
        try:
            for number, shade in enumerate((0, 255, 0)):
                digest, file, ids, token = prompts.example(shade)
                count = int((ids >= FIRST_IMAGE_ID).sum())
                # The prompt ends in the middle of a cache block. Only whole blocks are cached, so no cached block contains
                # completion tokens.
                after = self.block_size + (self.block_size // 2 - len(ids)) % self.block_size
                prompt = np.concatenate([np.zeros(self.block_size, np.int64), ids, np.zeros(after, np.int64)])
                completion = np.arange(max(1, min(_CHECKED, self.block_size // 2)))
                images = SentImages((digest,), (count,), (file,), token)
                self.add(number, Request(np.concatenate([prompt, completion]), len(prompt), True, images), "probe")
                [answer] = self._finished()
                if answer.values is None or not np.isfinite(answer.values).all():
                    raise ImageRefusedError(answer.problem or "vLLM returned no valid log-probs for a test image")
                found.append(answer.values)
        except ImageRefusedError:
            raise
        except Exception as error:
            raise ImageRefusedError(f"vLLM failed on a test image: {first_line(error)[:200]}") from error
        if np.allclose(found[0], found[1], rtol=0, atol=1e-6):
            raise ImageRefusedError("vLLM's values are the same for two different test images")
        if not np.allclose(found[0], found[2], rtol=0, atol=_SAME):
            raise ImageRefusedError("vLLM's values for a test image change when vLLM reads the image from its prefix cache")


def answer_requests(scorer: Scorer, source: BinaryIO, out: BinaryIO) -> None:
    send(out, {"op": "ready", **scorer.about()})
    coming: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(source, coming), name="frames", daemon=True).start()
    waiting: list[tuple[int, Request, str]] = []  # in reverse order: the last entry is sent to vLLM first
    while True:
        while not coming.empty() or not (waiting or scorer.busy()):
            frame = coming.get()
            if frame is None:
                return
            message, body = frame
            waiting[:0] = [(*row, message["salt"]) for row in requests_of(body)][::-1]
        answers: list[Answer] = []
        while waiting and scorer.fits(len(waiting[-1][1].ids)):
            number, request, salt = waiting.pop()
            try:
                scorer.add(number, request, salt)
            except ImageRefusedError as error:
                answers.append(Answer(number, None, 0, str(error)))
        if answers := answers + list(scorer.step()):
            send(out, {"op": "answers"}, stream_bytes(answers_table(answers)))


def _read(source: BinaryIO, coming: queue.SimpleQueue[Frame | None]) -> None:
    while (frame := read_frame(source)) is not None:
        coming.put(frame)
    coming.put(None)
    # The caller has closed stdin or has exited, and does not need the responses to the requests in flight.
    threading.Timer(_LAST_SECONDS, os._exit, (0,)).start()


def send(out: BinaryIO, message: dict[str, Any], body: bytes = b"") -> None:
    out.write(encode(message, body))
    out.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when this process should end
    out, source = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # vLLM's own output must not mix with the frames
    frame = read_frame(source)
    if frame is None:
        return
    try:
        loading = frame[0]
        answer_requests(Scorer(loading["options"], loading["adapter"], loading["no_images"], loading["top_k"]), source, out)
    except BrokenPipeError:
        os._exit(0)
    except Exception as error:  # vLLM may raise any error; its log contains the details
        import traceback

        traceback.print_exc()
        send(out, {"op": "dying", "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
