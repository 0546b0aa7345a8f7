"""Build a service's HTTP app: create, start and stop its components, and add its routes."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from starlette.types import ASGIApp

from reflogp.scoring.machine import Place, gpus_in_a_child, places, total_memory
from reflogp.service import problems
from reflogp.service.bodies import LargeRequests
from reflogp.service.context import Context
from reflogp.service.dataset_files import DatasetFiles, Uploads
from reflogp.service.ledger import Ledger
from reflogp.service.ledger_file import StateLock
from reflogp.service.metrics import Metrics
from reflogp.service.middleware import EveryRequest
from reflogp.service.online import OnlineScoring
from reflogp.service.pool import Pool, WorkerHandle
from reflogp.service.precompute import Precompute
from reflogp.service.registry import ReferenceRegistry, with_dtypes
from reflogp.service.routes.completions import completions_router
from reflogp.service.routes.health import health_router
from reflogp.service.routes.jobs import jobs_router
from reflogp.service.routes.lookups import lookups_router
from reflogp.service.routes.pages import pages_router
from reflogp.service.routes.scores import scores_router
from reflogp.service.routes.uploads import uploads_router
from reflogp.service.runner.order import JobContext
from reflogp.service.runner.process import start_fork_server
from reflogp.service.scheduling import JobScheduler
from reflogp.service.settings import ReferenceSettings, ServerSettings
from reflogp.service.sites import SiteCheck
from reflogp.service.supervision import supervise
from reflogp.service.worker.protocol import WorkerConfiguration
from reflogp.store import UsageError

#: Maximum time in seconds that a request waits while another process has locked the ledger.
_LEDGER_SECONDS = 5.0
#: Maximum time in seconds between computing a job's values and committing them.
_COMMIT_SECONDS = 5.0
#: Time in seconds that an online request waits for others, so that their sequences share forward passes. It waits only if two
#: requests overlapped within the last second.
_WINDOW_SECONDS = 0.002
#: Maximum CPU time in seconds to tokenize a row. A row that needs more is a bad row.
_ROW_SECONDS = 10.0
logger = logging.getLogger(__name__)

_DESCRIPTION = "Reference log-probs: score datasets as background jobs, score sequences online, and look up stored values."


class _App(FastAPI):
    def build_middleware_stack(self) -> ASGIApp:
        settings, metrics = self.state.context.settings, self.state.context.metrics
        sites = SiteCheck(settings.allowed_hosts, bool(settings.tokens))
        return EveryRequest(super().build_middleware_stack(), sites, metrics)  # around the one that answers errors


def create_app(settings: ServerSettings) -> FastAPI:
    """Return the FastAPI app for the given settings. The state folder stays locked until the app shuts down.

    Raises:
        UsageError: another service uses the same state folder, the folder or the job ledger in it cannot be used, or the
            settings contain a store URI, a reference or a device that cannot be used.
        CheckpointError: the model folder of a reference cannot be used (see ReferenceRegistry).
        StoreUnavailableError: a reference has no dtype in the settings, and the store cannot be read.
    """
    settings = with_dtypes(settings)
    folder = settings.state_folder()
    lock = StateLock(folder)
    metrics = Metrics()
    registry = ReferenceRegistry(settings)
    ledger = Ledger(folder / "jobs.sqlite", _LEDGER_SECONDS)
    files = DatasetFiles(folder / "uploads", ledger, settings)
    uploads = Uploads(files, ledger)
    most = settings.max_worker_bytes or total_memory() * 9 // 10
    shared = JobContext(
        registry.store.uri, folder / "results", folder / "tokens", settings.max_uploads_bytes // 3, _ROW_SECONDS, most
    )

    def on_frame(worker: WorkerHandle, message: dict[str, Any], body: bytes) -> None:
        online.on_frame(worker, message, body)
        if message["op"] == "ready":
            scheduler.on_ready(worker)

    def on_death(worker: WorkerHandle, reason: str) -> None:
        metrics.worker_deaths.inc()
        at_online = online.on_death(worker, reason)
        scheduler.on_death(worker, reason, blame=not at_online)

    sockets = tempfile.TemporaryDirectory(prefix="reflogp-")  # a short path, which no other user can enter
    configurations = _configurations(settings, registry, Path(sockets.name), _devices(settings, registry))
    pool = Pool(configurations, on_frame, on_death, most)
    online = OnlineScoring(settings, registry, metrics, pool)
    scheduler = JobScheduler(settings, ledger, registry, files, metrics, pool, shared)
    precompute = Precompute(settings, ledger, registry, uploads, files, scheduler)
    context = Context(settings, registry, ledger, precompute, scheduler, online, pool, uploads, metrics, LargeRequests())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        pool.start()
        work: dict[str, Callable[[], Awaitable[None]]] = {
            "checking the store": registry.watch,
            "housekeeping": precompute.keep_house,
        }
        if configurations:  # otherwise, the first job would wait for it
            work["starting the fork server"] = partial(to_thread.run_sync, start_fork_server, abandon_on_cancel=True)
        tasks = [asyncio.create_task(supervise(name, run)) for name, run in work.items()]
        yield
        for task in tasks:
            task.cancel()
        scheduler.drain()
        await scheduler.stop()
        await pool.close()
        ledger.close()
        lock.close()
        sockets.cleanup()

    app = _App(
        title="reflogp",
        version=version("reflogp"),
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads a script from another site
        redoc_url=None,
    )
    app.state.context = context
    problems.install(app)
    app.include_router(health_router(context))
    app.include_router(lookups_router(context))
    app.include_router(scores_router(context))
    app.include_router(completions_router(context))
    app.include_router(jobs_router(context))
    app.include_router(uploads_router(context))
    app.include_router(pages_router(context))
    return app


def _devices(settings: ServerSettings, registry: ReferenceRegistry) -> list[Place]:
    """Return the device of each worker. The list is empty if no models are configured."""
    models = [served.settings for served in registry.named.values()]
    if not models:
        return []
    engines = {model.engine for model in models}
    devices = ["auto"] if engines == {"remote"} and settings.devices == ["all"] else settings.devices
    return places(devices, gpus_in_a_child, max(1, *(model.choice().gpus() for model in models)), "vllm" in engines)


def _configurations(
    settings: ServerSettings, registry: ReferenceRegistry, sockets: Path, workers: list[Place]
) -> list[WorkerConfiguration]:
    """Return one configuration for each worker. `sockets` is the folder for the sockets that runners connect to.

    Raise UsageError if two references with the same model and dtypes have different engines or engine settings.
    """
    models: dict[str, ReferenceSettings] = {}
    for name, served in registry.named.items():
        if models.setdefault(served.reference.reference_id, served.settings).choice() != served.settings.choice():
            raise UsageError(
                f"references.{name} has the same model and dtypes as another reference, but a different engine or different "
                "engine settings: remove one of the two references"
            )
    shared = {
        "sharing": max(1, sum(place.device == "cpu" for place in workers)),
        "token_budget": settings.token_budget,
        "models": models,
        "capacity": settings.max_loaded,
        "pinned": registry.named[settings.pinned].reference.reference_id if settings.pinned is not None else None,
        "store": registry.store.uri,
        "commit_seconds": _COMMIT_SECONDS,
        "window_seconds": _WINDOW_SECONDS,
    }
    return [
        WorkerConfiguration(device=place.device, visible=place.visible, address=str(sockets / str(number)), **shared)
        for number, place in enumerate(workers)
    ]
