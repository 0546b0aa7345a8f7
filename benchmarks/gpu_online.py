"""Measure the latency of online requests to an engine, in a worker's own loop, for gpu.py."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from gpu_measures import graphs_compiled
from pairs import Pairs

from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.service.worker.engine_loop import Answer, EngineLoop, Engines, OnlineRequest

#: Numbers of tokens of requests, half of them in the prompt.
TOKENS = (512, 64)
#: Number of requests of each length, and maximum seconds for the requests of one length, alone and beside a job.
REQUESTS, SECONDS = 100, {"cuda": (3.0, 8.0), "cpu": (1.0, 2.0)}
#: Maximum pause before a request beside a job, so that requests arrive at any time of a pass; and limit for one answer.
PAUSE_SECONDS, ANSWER_SECONDS = 0.2, 30.0


def online_latencies(engine: TorchEngine, vocabulary: int, job: Pairs) -> dict[str, Any]:
    """Measure single requests of 512 and of 64 tokens, first alone, then beside a job that scores `job` again and again."""
    alone, beside = SECONDS[engine.device.type]
    with _Worker(engine, vocabulary) as worker:
        found: dict[str, Any] = {"alone": {f"{tokens} tokens": worker.latencies(tokens, alone) for tokens in TOKENS}}
        with worker.job(job.sequences()) as computed:
            start = time.perf_counter()
            found["beside_a_job"] = {f"{tokens} tokens": worker.latencies(tokens, beside, PAUSE_SECONDS) for tokens in TOKENS}
            found["job_tokens_per_second"] = sum(computed) / (time.perf_counter() - start)
    return found


def online_text(online: dict[str, Any]) -> str:
    """Return the result of `online_latencies` as text."""
    lines = [f"the job scores {online['job_tokens_per_second']:,.0f} tokens/s beside requests"]
    for where, by_length in (("alone", online["alone"]), ("beside a job", online["beside_a_job"])):
        for length, row in by_length.items():
            percentiles = f"p50 {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms of {row['count']} requests"
            graphs = "graphs compiled: {first} at the first, {others} later".format(**row["graphs_compiled"])
            lines.append(f"  {length}, {where}: {percentiles}; the first took {row['first_ms']:.1f} ms; {graphs}")
    return "\n".join(lines)


class _StoppedError(Exception):
    """The job has run long enough."""


class _Worker:
    """A worker's loop with one engine, and one caller, who waits for each answer before the next request."""

    def __init__(self, engine: TorchEngine, vocabulary: int) -> None:
        self._engine, self._vocabulary = engine, vocabulary
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        engines = Engines(lambda _: engine, 1, None, lambda _: None, lambda _: None)
        self._loop = EngineLoop(engines, lambda _: None, self._answers.put, window_seconds=0.0)
        self._random = np.random.default_rng(0)

    def __enter__(self) -> _Worker:
        self._threads = ThreadPoolExecutor(2)
        self._running = self._threads.submit(self._loop.run)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.close()
        self._threads.shutdown()
        self._engine.pass_seconds = None  # the loop has set the limit for jobs beside requests
        self._running.result()  # raises the error that ended the loop

    def latencies(self, tokens: int, limit: float, pause: float = 0.0) -> dict[str, Any]:
        """Return the first latency, which may include a compilation, and percentiles of the others, in milliseconds."""
        before = graphs_compiled()
        first = self._milliseconds(tokens)
        between = graphs_compiled()
        took: list[float] = []
        end = time.perf_counter() + limit
        while not took or (len(took) < REQUESTS and time.perf_counter() < end):
            time.sleep(self._random.uniform(0, pause))
            took.append(self._milliseconds(tokens))
        return {
            "first_ms": first,
            "count": len(took),
            "p50_ms": float(np.percentile(took, 50)),
            "p99_ms": float(np.percentile(took, 99)),
            "graphs_compiled": {"first": between - before, "others": graphs_compiled() - between},
        }

    def _milliseconds(self, tokens: int) -> float:
        """Ask for the log-probs of a new sequence, and wait for the answer."""
        ids = self._random.integers(2, self._vocabulary, tokens).tolist()
        request = OnlineRequest("1", "reference", [Sequence(ids[: tokens // 2], ids[tokens // 2 :])], 1.0, False)
        start = time.perf_counter()
        self._loop.ask(request)
        answer = self._answers.get(timeout=ANSWER_SECONDS)
        seconds = time.perf_counter() - start
        if answer.error is not None or isinstance(request.outcomes[0], str):
            raise RuntimeError(answer.error or request.outcomes[0])
        return 1000 * seconds

    @contextmanager
    def job(self, sequences: list[Sequence]) -> Iterator[list[int]]:
        """Score the sequences again and again; yield a list that gets the number of tokens of each pass after the first."""
        stopped = threading.Event()
        computed: list[int] = []

        def check() -> None:
            if stopped.is_set():
                raise _StoppedError

        passes = self._loop.flow("reference", itertools.repeat(sequences), check)
        next(passes)

        def follow() -> None:
            with suppress(_StoppedError):
                for landed, _ in passes:
                    computed.append(sum(len(sequences[index % len(sequences)]) for index, _ in landed))

        following = self._threads.submit(follow)
        try:
            yield computed
        finally:
            stopped.set()
            following.result()
