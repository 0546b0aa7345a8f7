"""Run workers as actors on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import EngineError, WorkerGoneError
from reflogp.scoring.on_ray.cluster import (
    default_workers,
    describe_cluster,
    on_workers,
    reason_of,
    resources_of,
    this_node,
)
from reflogp.scoring.runs.scheduler import Worker, settle
from reflogp.scoring.runs.units import IN_FLIGHT, ScoringWorker
from reflogp.store import Reference
from reflogp.store.storage import split_table_uri
from reflogp.store.texts import counted
from reflogp.store.top import ValuesTable

#: If Ray has not placed any worker, the run warns after _SAID_SECONDS and fails after _PLACE_SECONDS. A node that Ray adds
#: takes minutes to start.
_SAID_SECONDS, _PLACE_SECONDS = 60.0, 600.0


class NodeWorker(ScoringWorker):
    def place(self) -> str:
        return f"node {this_node()}"


class ClusterWorkers:
    """Starts workers on the cluster that this process is connected to (see `cluster.connected`).

    Args:
        model: folder or hub id of the model, which each worker resolves on its own node.
        count: number of workers; None for as many as fit on the cluster (see `cluster.default_workers`).
    """

    def __init__(
        self,
        model: str,
        revision: str | None,
        reference: Reference,
        choice: EngineChoice,
        count: int | None = None,
    ) -> None:
        choice = on_workers(choice)
        self.count = count or default_workers(choice)
        folder = Path(model).expanduser()
        self._made_of = (str(folder.absolute()) if folder.is_dir() else model, revision, reference, choice)
        self._resources = resources_of(choice)
        self._store = ""
        self._without_since: float | None = None
        self._said = False

    def open(self, table: ValuesTable) -> None:
        self._store, _ = split_table_uri(table.uri)

    def begin(self, have: int, is_any_placed: bool) -> list[Worker]:
        """Start the missing workers; see Workers.begin."""
        self._require_places(is_any_placed)
        actor_class: Any = ray.remote(NodeWorker)  # Ray's type hints lack `options` and NodeWorker's methods
        lives = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": IN_FLIGHT + 2}
        placed = actor_class.options(**self._resources, **lives)
        return [_RayWorker(placed.remote(*self._made_of, self._store, 1)) for _ in range(self.count - have)]

    def _require_places(self, is_any_placed: bool) -> None:
        now = time.monotonic()
        if is_any_placed:
            self._without_since = None
            return
        self._without_since = self._without_since or now
        waited = now - self._without_since
        asked = ", ".join(counted(int(count), name[4:-1].upper()) for name, count in self._resources.items() if count)
        what = f"no worker could start: each worker needs {asked}, and the Ray cluster has {describe_cluster()} in total"
        if waited > _PLACE_SECONDS:
            raise EngineError(f"{what}; gave up after {waited:.0f} s")
        if waited > _SAID_SECONDS and not self._said:
            self._said = True
            warnings.warn(f"{what}; waiting up to {_PLACE_SECONDS:.0f} s for free resources or new nodes", stacklevel=2)


class _RayWorker:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def place(self) -> Future[str]:
        return _future(self._actor.place.remote())

    def prepare(self) -> Future[dict[str, Any]]:
        return _future(self._actor.prepare.remote())

    def score(self, content: bytes, again: bool) -> Future[dict[str, Any]]:
        return _future(self._actor.score.remote(content, again))

    def stop(self) -> Future[None]:
        return _future(self._actor.stop.remote())

    def progress(self) -> Future[int]:
        return _future(self._actor.progress.remote())

    def end(self) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self._actor)


def _future(reference: Any) -> Future[Any]:
    """Return a future of the result of an actor's method, given Ray's reference to this result.

    The future raises the method's error, or WorkerGoneError if the actor died.
    """
    answer: Future[Any] = Future()

    def take(arrived: Future[Any]) -> None:
        error = arrived.exception()
        if isinstance(error, RayTaskError):
            error = error.cause
        elif isinstance(error, RayError):
            error = WorkerGoneError(reason_of(error))
        settle(answer, None if error else arrived.result(), error)

    reference.future().add_done_callback(take)
    return answer
