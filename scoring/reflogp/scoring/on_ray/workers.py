"""Run workers as actors on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import EngineError, WorkerGoneError
from reflogp.scoring.runs.scheduler import Worker, settle
from reflogp.scoring.runs.units import IN_FLIGHT, ScoringWorker
from reflogp.store import Reference, UsageError
from reflogp.store.storage import split_table_uri
from reflogp.store.texts import counted, first_line
from reflogp.store.top import ValuesTable

#: If Ray has not placed any worker, the run warns after _SAID_SECONDS and fails after _PLACE_SECONDS. A node that Ray adds
#: takes minutes to start.
_SAID_SECONDS, _PLACE_SECONDS = 60.0, 600.0


class NodeWorker(ScoringWorker):
    def place(self) -> str:
        return f"node {this_node()}"


class ClusterWorkers:
    """Starts workers on the cluster that this process is connected to (see `connected`)."""

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
        self._placed: Future[str] = _future(actor.place.remote())

    @property
    def place(self) -> str:
        return self._placed.result() if self._placed.done() and self._placed.exception() is None else ""

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
    """Return a future of the result of an actor's method, given Ray's reference to this result."""
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


#: The address for which `connected` starts Ray on this machine. Ray stops when this process disconnects.
LOCAL = "local"
_CONNECT_SECONDS = 5.0


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to the cluster at an address for the duration of the block, unless this process is already connected to one.

    Args:
        address: "auto", host:port, ray://host:port, or "local" to start Ray on this machine; None means the address in
            $RAY_ADDRESS, or "local" if the variable is not set.

    Raises UsageError if there is no cluster at the address.
    """
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS") or LOCAL
    own = {"include_dashboard": False} if where == LOCAL else {}
    try:
        if (named := re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", where)) is not None:  # Ray itself would keep trying for minutes
            socket.create_connection((named[1], int(named[2])), _CONNECT_SECONDS).close()
        ray.init(where, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        hint = "`ray start --head` starts a cluster; if the cluster requires a token, set RAY_AUTH_MODE=token"
        raise UsageError(f"cannot connect to a Ray cluster at {where}: {first_line(error)} ({hint})") from error
    try:
        yield
    finally:
        ray.shutdown()


def on_workers(choice: EngineChoice) -> EngineChoice:
    """Return the engine choice for Ray's workers.

    The device "auto" is replaced by "cuda" if the cluster has a GPU, otherwise by "cpu". All other settings are kept.

    Raises UsageError for a device with a number, because Ray assigns the GPUs.
    """
    if choice.device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device {choice.device}: Ray assigns a GPU to each worker; use 'auto', 'cpu' or 'cuda'")
    gpu = ray.cluster_resources().get("GPU", 0) >= 1
    return replace(choice, device="cuda" if gpu else "cpu") if choice.device == "auto" else choice


def default_workers(choice: EngineChoice) -> int:
    """Return how many workers the whole cluster has resources for, including resources that are in use.

    The result is at least 1, because Ray may add a node later.
    """
    resources = ray.cluster_resources()
    room = resources.get("GPU", 0) // choice.gpus() if choice.gpus() else resources.get("CPU", 0)
    return max(1, int(room))


def resources_of(choice: EngineChoice) -> dict[str, float]:
    return {"num_gpus": choice.gpus(), "num_cpus": 0} if choice.gpus() else {"num_gpus": 0, "num_cpus": 1}


def describe_cluster() -> str:
    resources, alive = ray.cluster_resources(), [node for node in ray.nodes() if node["Alive"]]
    gpus, cpus = (counted(int(resources.get(name, 0)), name) for name in ("GPU", "CPU"))
    return f"{gpus} and {cpus} on {counted(len(alive), 'node')}"


def this_node() -> str:
    return f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]})"


def reason_of(error: RayError) -> str:
    text = str(error)
    if "its node has died" in text or "node was terminated" in text:
        return "the worker's node died"
    if isinstance(error, ActorDiedError) and not error.actor_init_failed:
        return "the worker's process was killed or crashed"
    return first_line(error)
