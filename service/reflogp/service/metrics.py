"""Define the Prometheus metrics of the service, and the middleware that counts and times every request, and logs refusals."""

from __future__ import annotations

import logging
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reflogp.store.texts import shortened

logger = logging.getLogger(__name__)

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
        self.jobs = Gauge("reflogp_jobs", "Jobs in the ledger.", ["state"], registry=registry)
        self.workers_ready = Gauge("reflogp_workers_ready", "Workers that accept work.", registry=registry)
        self.online_tokens = Gauge(
            "reflogp_score_queued_tokens", "Tokens in online requests that are queued or running.", registry=registry
        )
        self.workers_answering = Gauge(
            "reflogp_workers_answering", "Workers that accept work and answer pings.", registry=registry
        )
        self.busy = Gauge(
            "reflogp_worker_busy_seconds",
            "Seconds since the engine began its current model load or forward pass; 0 while the engine is idle.",
            ["worker", "at"],
            registry=registry,
        )
        self.ledger_works = Gauge(
            "reflogp_ledger_works", "1 while the ledger of jobs can be written to, else 0.", registry=registry
        )
        self.memory = Gauge("reflogp_memory_bytes", "Resident memory of each process.", ["process"], registry=registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Timed:
    """Middleware that counts and times requests by route and status, until the last byte of the response has been sent.

    Requests that were refused with 401 or 403 are logged, with the token's name if it is known.
    """

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
            if status in (401, 403):
                name = scope.get("state", {}).get("token")
                by = f"token {name}" if name else "no known token"
                logger.info("%s %s refused with status %d: %s", scope["method"], shortened(scope["path"]), status, by)
