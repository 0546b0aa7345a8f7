"""/healthz, /readyz and /metrics: how the service is, for what watches it."""

from __future__ import annotations

from importlib.metadata import version

from anyio import to_thread
from fastapi import APIRouter, Depends, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from reflogp_service.server.auth import requires
from reflogp_service.server.context import Context
from reflogp_service.server.pool import Pool, own_memory
from reflogp_service.server.problems import Problem, documented
from reflogp_store import ReflogpError


class Health(BaseModel):
    """That the service is well."""

    status: str = Field(description="ok.")
    version: str = Field(description="Of reflogp.")


def health_router(context: Context, pool: Pool) -> APIRouter:
    """Routes that say how the service is."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="Is it alive", response_description="It is.")
    async def healthz() -> Health:
        """The process answers."""
        return Health(status="ok", version=version("reflogp"))

    @router.get("/readyz", summary="Is it ready", response_description="It is.", responses=documented(503))
    async def readyz() -> Health:
        """The store and the ledger can be read, and no worker keeps failing to start."""
        try:
            await to_thread.run_sync(context.shelf.list)
            await to_thread.run_sync(context.ledger.waiting)
        except ReflogpError as error:
            raise Problem(503, str(error), "an administrator checks the store") from error
        if pool.workers and all(worker.broken for worker in pool.workers):
            raise Problem(503, "no worker can be started", "an administrator reads the service's log")
        return Health(status="ready", version=version("reflogp"))

    @router.get(
        "/metrics",
        dependencies=[Depends(requires("read", context.settings.tokens))],
        summary="Count and time",
        response_class=PlainTextResponse,
        response_description="Prometheus' text format.",
        responses=documented(401, 403),
    )
    async def metrics() -> Response:
        """Jobs by state, tokens and sequences by way, hits, queue, latencies, worker deaths, memory."""
        jobs = (await to_thread.run_sync(context.ledger.page, None, None, 1)).counts
        memory = {"service": own_memory(), **{f"worker {worker.number}": worker.memory_bytes for worker in pool.workers}}
        ready = sum(worker.ready for worker in pool.workers)
        text = context.metrics.text(jobs, ready, context.online.queued_tokens(), memory)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
