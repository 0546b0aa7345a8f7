"""Implement a Transport that runs vLLM in a local process with its own Python environment.

This module does not import vLLM.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, BinaryIO, cast

from reflogp.scoring.errors import EngineError, OutOfMemoryError
from reflogp.scoring.frames import encode, read_frame
from reflogp.scoring.machine import without_growing_segments
from reflogp.scoring.torch_engine.sequences import SequenceImages
from reflogp.scoring.vllm_engine.answers import Answer, Request, VllmEndedError, answers_of, requests_body
from reflogp.scoring.vllm_engine.engine import PASSES
from reflogp.scoring.vllm_engine.images import library_of
from reflogp.scoring.vllm_engine.options import Loading
from reflogp.store import UsageError

#: Number of lines to keep from the end of the process's log, for error messages.
_LAST_WORDS = 200
#: How long to wait for the process to exit by itself before it is killed, in seconds.
_END_SECONDS = 15.0
#: How long to wait for the last lines of the log after the process has exited, in seconds.
_LISTEN_SECONDS = 5.0

#: A pass contains at most as many tokens as vLLM can compute in this number of steps.
_STEPS = 4


class VllmProcess:
    """A vLLM process with the model loaded. It exits when the process that started it exits."""

    def __init__(self, python: str, loading: Loading, unchanged: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._python = python
        self._loading = loading
        self._unchanged = unchanged
        self._running: _Running | None = None
        self._is_closed = False
        self.revive()

    def problem_of_images(self, images: SequenceImages) -> str | None:
        if self._about["no_images"] is not None:
            return str(self._about["no_images"])
        if images.vision.tokens.settings.hex() != self._about["image_settings"]:
            return "vLLM's image processor has different settings from the image processor that generated the image tokens"
        ours, theirs = library_of(images.vision.processor.image_processor), self._about["image_library"]
        if ours != theirs:
            return (
                f"reflogp resizes images with {ours} and vLLM resizes them with {theirs}, and the two round differently "
                "(they would agree if torchvision were installed in both environments or in neither)"
            )
        if not images.independent:
            return "an image's token count depends on the prompt's other images, and vLLM processes each image separately"
        return None

    def ask(self, requests: list[Request], salt: str) -> Iterator[Answer]:
        if self._running is None:
            raise EngineError("the engine was closed")
        return self._running.ask(requests, salt)

    def provenance(self) -> dict[str, Any]:
        kept = ("vllm", "method", "block_size", "prefix_cache", "device", "batch_invariant", "tensor_parallel")
        return {"engine": "vllm", **{name: self._about[name] for name in kept}}

    def revive(self) -> bool:
        if self._running is not None and not self._running.inboxes.closed:
            return False
        if self._is_closed:
            raise EngineError("the engine was closed")
        self._end()
        with contextlib.ExitStack() as undo:
            with self._unchanged():
                running = _Running(self._python, self._loading)
                undo.callback(running.end)
            if self._is_closed:  # the engine was closed while vLLM was loading
                raise EngineError("the engine was closed")
            undo.pop_all()
        self._running = running
        about = self._about = running.about
        self.max_tokens = int(about["max_model_len"]) - 1  # vLLM's limit includes the token that vLLM samples
        fits = max(1, int(about["room_tokens"]) // PASSES)  # in the cache
        self.token_budget = min(_STEPS * int(about["batched_tokens"]), fits)
        self.reads_cache = bool(about["prefix_cache"])
        self.block_size: int | None = int(about["block_size"])
        return True

    def close(self) -> None:
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None


class _Inboxes:
    """Maps the number of each request that has no response yet to the queue that will receive the response."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, queue.SimpleQueue[Answer | None]] = {}
        self.closed = False

    def open(self, numbers: list[int]) -> queue.SimpleQueue[Answer | None]:
        """None in the queue means that no more responses will come."""
        inbox: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        with self._lock:
            if self.closed:
                inbox.put(None)
            self._open.update(dict.fromkeys(numbers, inbox))
        return inbox

    def put(self, answer: Answer) -> None:
        with self._lock:
            self._open.pop(answer.at).put(answer)

    def close(self) -> None:
        with self._lock:
            self.closed = True
            for inbox in set(self._open.values()):
                inbox.put(None)


class _Running:
    """One run of the vLLM process. The process is stopped when this object is garbage-collected."""

    def __init__(self, python: str, loading: Loading) -> None:
        self._numbers = itertools.count()
        self.inboxes = _Inboxes()
        words: deque[str] = deque(maxlen=_LAST_WORDS)
        try:
            process = subprocess.Popen(
                [python, "-m", "reflogp.scoring.vllm_engine.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=without_growing_segments(os.environ),
                start_new_session=True,  # Ctrl-C in a terminal must reach only the caller, which commits before it exits
            )
        except OSError as error:
            raise UsageError(f"vLLM's Python interpreter {python} cannot be run: {error.strerror}") from error
        self.end = weakref.finalize(self, _end, process)
        self._in, out = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
        listening = threading.Thread(target=_listen, args=(process.stderr, words), daemon=True)
        listening.start()
        with contextlib.suppress(BrokenPipeError):
            self._in.write(encode({"op": "configure", **asdict(loading)}))
            self._in.flush()
        frame = read_frame(out)
        if frame is None or frame[0]["op"] != "ready":
            process.wait()
            listening.join(_LISTEN_SECONDS)
            reason = frame[0]["error"] if frame is not None else f"vLLM's process exited with status {process.returncode}"
            raise _error_of_start(python, reason, list(words))
        self.about = frame[0]
        threading.Thread(target=_read, args=(out, self.inboxes), name="vllm", daemon=True).start()

    def ask(self, requests: list[Request], salt: str) -> Iterator[Answer]:
        numbers = [next(self._numbers) for _ in requests]
        inbox = self.inboxes.open(numbers)
        if requests:
            with contextlib.suppress(BrokenPipeError):  # if the process has exited, `_read` closes the inboxes
                self._in.write(encode({"op": "score", "salt": salt}, requests_body(zip(numbers, requests, strict=True))))
                self._in.flush()
        return _answers(numbers, inbox)


def _answers(numbers: list[int], inbox: queue.SimpleQueue[Answer | None]) -> Iterator[Answer]:
    places = {number: at for at, number in enumerate(numbers)}
    for _ in numbers:
        answer = inbox.get()
        if answer is None:
            raise VllmEndedError
        yield answer._replace(at=places[answer.at])


def _read(out: BinaryIO, inboxes: _Inboxes) -> None:
    while (frame := read_frame(out)) is not None:
        if frame[0]["op"] == "answers":
            for answer in answers_of(frame[1]):
                inboxes.put(answer)
    inboxes.close()


def _listen(stream: Any, words: deque[str]) -> None:
    """Keep the last lines of vLLM's log for error messages; print the log only if REFLOGP_VLLM_LOG is set."""
    for line in stream:
        words.append(line.decode(errors="replace").rstrip())
        if os.environ.get("REFLOGP_VLLM_LOG"):
            sys.stderr.write(words[-1] + "\n")


def _error_of_start(python: str, reason: str, words: list[str]) -> UsageError | EngineError:
    if any(f"No module named '{name}'" in line for line in words for name in ("vllm", "reflogp", "reflogp.scoring")):
        return UsageError(
            f"{python} lacks vLLM or reflogp: install both in a separate environment (pip install "
            "'reflogp[vllm]') and name its Python interpreter in REFLOGP_VLLM_PYTHON"
        )
    # If one of vLLM's child processes fails, vLLM's exception says only that the child has exited. The cause is in the log.
    causes = [line.split("] ")[-1].strip() for line in words if "Error: " in line and "initialization failed" not in line]
    detail = f" ({causes[-1]})" if causes and causes[-1] not in reason else ""
    kind = OutOfMemoryError if "memory" in f"{reason}{detail}".lower() else EngineError
    return kind(f"vLLM cannot load the model: {reason}{detail}; set REFLOGP_VLLM_LOG=1 to see vLLM's log")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
