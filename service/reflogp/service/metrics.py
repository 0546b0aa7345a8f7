"""The Prometheus metrics of the service."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
            "Sequences whose values were in the store (hit), and sequences that an engine scored (scored).",
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
