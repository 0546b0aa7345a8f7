"""Define the Prometheus metrics of the service, and the middleware that counts and times every request."""

from __future__ import annotations

import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reflogp.service.models import JOB_STATES, JobState

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Histogram(
            "reflogp_request_seconds",
            "Time from the start of a request to the end of its response.",
            ["route", "status"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.lookup_keys = Counter("reflogp_lookup_keys", "Keys looked up.", ["found"], registry=registry)
        self.sequences = Counter(
            "reflogp_sequences",
            "Sequences whose values were in the store or that occurred earlier in the same job (hit), and sequences that an"
            " engine scored (scored).",
            ["way", "how"],
            registry=registry,
        )
        self.tokens = Counter("reflogp_scored_tokens", "Tokens in sequences that an engine scored.", ["way"], registry=registry)
        self.engine_seconds = Histogram(
            "reflogp_score_engine_seconds",
            "Time that the engine spent on an online request.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "reflogp_score_queue_seconds",
            "Time that an online request waited for the engine.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.refused = Counter(
            "reflogp_score_refused", "Online requests that were refused or whose deadline passed.", ["why"], registry=registry
        )
        self.jobs_ended = Counter("reflogp_jobs_ended", "Jobs that ended.", ["state"], registry=registry)
        self.worker_deaths = Counter("reflogp_worker_deaths", "Worker processes that ended unexpectedly.", registry=registry)
        self._jobs = Gauge("reflogp_jobs", "Jobs in the ledger.", ["state"], registry=registry)
        self._workers = Gauge("reflogp_workers_ready", "Workers that accept work.", registry=registry)
        self._online_tokens = Gauge(
            "reflogp_score_queued_tokens", "Tokens in online requests that are queued or running.", registry=registry
        )
        self._answering = Gauge("reflogp_workers_answering", "Workers that accept work and answer pings.", registry=registry)
        self._busy = Gauge(
            "reflogp_worker_busy_seconds",
            "Seconds since the engine began its current model load or forward pass; 0 while the engine is idle.",
            ["worker", "at"],
            registry=registry,
        )
        self._ledger_well = Gauge(
            "reflogp_ledger_works", "1 while the ledger of jobs can be written to, else 0.", registry=registry
        )
        self._ledger_failures = Gauge("reflogp_ledger_failures", "Failed reads and writes of the ledger.", registry=registry)
        self._unrecorded = Gauge(
            "reflogp_ledger_waiting_writes", "Writes that wait for the ledger to become writable.", registry=registry
        )
        self._memory = Gauge("reflogp_memory_bytes", "Resident memory of each process.", ["process"], registry=registry)

    def set_ledger(self, works: bool, failures: int, waiting_writes: int) -> None:
        self._ledger_well.set(works)
        self._ledger_failures.set(failures)
        self._unrecorded.set(waiting_writes)

    def set_workers(self, ready: int, answering: int, busy: Mapping[int, tuple[str, float] | None]) -> None:
        """Set the gauges of the workers. `busy` maps a worker's number to WorkerHandle.doing."""
        self._workers.set(ready)
        self._answering.set(answering)
        for worker, doing in busy.items():
            for at in ("load", "pass"):
                self._busy.labels(str(worker), at).set(doing[1] if doing is not None and doing[0] == at else 0.0)

    def text(self, jobs: Mapping[JobState, int] | None, online_tokens: int, memory: dict[str, int]) -> bytes:
        """Set the gauges of jobs (unless None), queued tokens and memory, and return all metrics in the text format."""
        for state in JOB_STATES if jobs is not None else ():
            self._jobs.labels(state).set((jobs or {}).get(state, 0))
        self._online_tokens.set(online_tokens)
        for process, size in memory.items():
            self._memory.labels(process).set(size)
        return generate_latest(self._registry)


class Timed:
    """Middleware that counts and times requests by route and status, until the last byte of the response has been sent."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, status).observe(time.perf_counter() - start)
