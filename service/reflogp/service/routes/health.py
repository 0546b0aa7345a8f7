"""Serve /healthz, /readyz and /metrics for monitoring."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import version

from anyio import to_thread
from fastapi import APIRouter, Depends, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from reflogp.service.auth import requires
from reflogp.service.context import Context
from reflogp.service.ledger_file import LedgerError
from reflogp.service.models import JOB_STATES
from reflogp.service.pool import WorkerHandle, memory_of
from reflogp.service.problems import Problem, documented


class Health(BaseModel):
    """Status and version of a healthy service."""

    status: str = Field(description="`ok` in responses from /healthz, `ready` in responses from /readyz.")
    version: str = Field(description="Version of reflogp.")


def health_router(context: Context) -> APIRouter:
    router, pool = APIRouter(tags=["health"]), context.pool

    @router.get("/healthz", summary="Check that the process responds", response_description="The process responds.")
    async def healthz() -> Health:
        """Return 200 to show that the process responds."""
        return Health(status="ok", version=version("reflogp"))

    @router.get(
        "/readyz",
        summary="Check that the service is ready",
        response_description="The service is ready.",
        responses=documented(503),
    )
    async def readyz() -> Health:
        """Return 200 if the store can be read, the job ledger can be written, and a worker responds.

        Otherwise (for example, while the workers are starting), return 503 with an explanation. A service without reference
        models has no workers and needs none to be ready.
        """
        if context.registry.trouble is None:
            raise Problem(503, "the store has not been read yet", "try again in a few seconds", {"Retry-After": "5"})
        if context.registry.trouble:
            raise Problem(503, context.registry.trouble, "ask an administrator to check the store")
        if (trouble := context.ledger.trouble) is not None:
            raise trouble
        if pool.workers and not any(worker.answering for worker in pool.workers):
            raise Problem(
                503,
                _why_not(pool.workers),
                "try again later, or ask an administrator to check the service's log",
                {"Retry-After": "5"},
            )
        return Health(status="ready", version=version("reflogp"))

    @router.get(
        "/metrics",
        dependencies=[Depends(requires("read", context.settings.tokens))],
        summary="Return metrics",
        response_class=PlainTextResponse,
        response_description="The metrics in the Prometheus text format.",
        responses=documented(401, 403),
    )
    async def metrics() -> Response:
        """Return metrics about jobs, sequences, tokens, the queue, latencies, workers, the job ledger and memory."""
        gauges, ledger = context.metrics, context.ledger
        with suppress(LedgerError):  # the gauges then stay unchanged
            jobs = await to_thread.run_sync(ledger.counts)
            for state in JOB_STATES:
                gauges.jobs.labels(state).set(jobs.get(state, 0))
        gauges.ledger_works.set(ledger.trouble is None)
        gauges.online_tokens.set(context.online.queued_tokens())
        gauges.workers_ready.set(sum(worker.ready for worker in pool.workers))
        gauges.workers_answering.set(sum(worker.answering for worker in pool.workers))
        gauges.memory.labels("service").set(memory_of(os.getpid(), with_children=False))
        gauges.memory.labels("jobs").set(context.scheduler.memory_bytes())
        for worker in pool.workers:
            gauges.memory.labels(f"worker {worker.number}").set(worker.memory_bytes)
            for at in ("load", "pass"):
                seconds = worker.doing[1] if worker.doing is not None and worker.doing[0] == at else 0.0
                gauges.busy.labels(str(worker.number), at).set(seconds)
        return Response(gauges.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _why_not(workers: list[WorkerHandle]) -> str:
    if all(worker.broken for worker in workers):
        return f"no worker can be started: {workers[0].last_error or 'see the log'}"
    silent = [worker for worker in workers if worker.late]
    if silent:
        return f"worker {silent[0].number} has not answered for {silent[0].silent_seconds:.0f} seconds"
    return "no worker is ready: " + "; ".join(
        f"worker {worker.number} ended: {worker.last_error}"
        if worker.process is None and worker.last_error
        else f"worker {worker.number} is starting"
        for worker in workers
    )
