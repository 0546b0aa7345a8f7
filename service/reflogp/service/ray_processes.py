"""A worker's process on a node of a Ray cluster, as the pool sees it: an actor holds it and passes bytes both ways.

Knows the actor. Does not know what the frames mean. Imported by the app where `executor` is "ray". Lives in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.errors import EngineError
from reflogp.scoring.frames import Frame, receive_frame
from reflogp.scoring.machine import exits
from reflogp.scoring.on_ray.cluster import (
    connect,
    default_workers,
    on_workers,
    raised_on,
    reason_of,
    resources_of,
    what_there_is,
)
from reflogp.scoring.on_ray.shared import probe
from reflogp.service.processes import BUFFER, WorkerProcess
from reflogp.service.ray_relay import Relay
from reflogp.store.storage import is_local, make_folder

logger = logging.getLogger(__name__)

#: Seconds without a place after which that is said, and within which a node must answer what a worker's memory is.
_SAID_SECONDS, _ANSWER_SECONDS = 60.0, 2.0
#: Seconds that a relay has to end its worker.
_KILL_SECONDS = 10.0


class RayProcess:
    """A WorkerProcess on some node.

    Args:
        relay: the actor, whose process was started.
        name: for the log.
    """

    def __init__(self, relay: Any, name: str) -> None:
        self.name = name
        self._relay = relay
        self._lost = ""
        self._killing = False
        self._reader = asyncio.StreamReader(limit=BUFFER)
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._outgoing_bytes = 0
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    def send(self, data: bytes) -> bool:
        """As WorkerProcess.send."""
        if self._reader.at_eof():
            return False
        self._outgoing.put_nowait(data)
        self._outgoing_bytes += len(data)
        return True

    def outgoing(self) -> int:
        """As WorkerProcess.outgoing."""
        return self._outgoing_bytes

    async def receive(self) -> Frame | None:
        """As WorkerProcess.receive."""
        return await receive_frame(self._reader)

    async def wait(self) -> str:
        """As WorkerProcess.wait."""
        await self._tasks[1]
        self._tasks[0].cancel()
        try:
            return self._lost or exits.reason_of(await self._relay.wait.remote(), "Ray's logs of its node")
        except RayError as error:
            return reason_of(error)
        finally:
            ray.kill(self._relay)

    async def memory(self) -> int:
        """As WorkerProcess.memory."""
        try:
            return int(await asyncio.wait_for(_answer(self._relay.memory.remote()), _ANSWER_SECONDS))
        except (RayError, TimeoutError):
            return 0

    def kill(self) -> None:
        """As WorkerProcess.kill. A relay that does not answer any more is ended itself, which ends its worker."""
        self._relay.kill.remote()
        if not self._killing:
            self._killing = True
            asyncio.get_running_loop().call_later(_KILL_SECONDS, self._end_relay)

    def _end_relay(self) -> None:
        if not self._tasks[1].done():
            ray.kill(self._relay)

    async def _write(self) -> None:
        """One call at a time: calls of an asynchronous actor that overlap have no order."""
        with contextlib.suppress(RayError):  # the reader finds out too, and says why
            while True:
                data = [await self._outgoing.get()]
                while not self._outgoing.empty():
                    data.append(self._outgoing.get_nowait())
                await self._relay.send.remote(b"".join(data))
                self._outgoing_bytes -= sum(map(len, data))

    async def _read(self) -> None:
        try:
            while data := await self._relay.receive.remote():
                self._reader.feed_data(data)
        except RayError as error:
            self._lost = reason_of(error)
        self._reader.feed_eof()


@dataclass(frozen=True)
class RayWorkers:
    """The workers that a service has on a cluster.

    Attributes:
        choice: engine of each; its device is what a worker is told.
        count: of workers.
        folders: local folders that they share with the service.
    """

    choice: EngineChoice
    count: int
    folders: tuple[Path, ...]

    async def start(self) -> WorkerProcess:
        """Start a worker where there is room; waits until there is, and says so. Raises EngineError with the node's name."""
        actor_class: Any = ray.remote(Relay)
        relay = actor_class.options(**resources_of(self.choice), max_restarts=0, max_task_retries=0).remote()
        node = "it was placed on"
        try:
            node = await self._placed(relay)
            with contextlib.ExitStack() as stack:
                probes = [stack.enter_context(probe(folder)) for folder in self.folders]
                pid = await relay.start.remote(probes)
        except RayTaskError as error:
            ray.kill(relay)
            raise raised_on(node, error) from None
        except RayError as error:
            raise EngineError(reason_of(error)) from None
        except BaseException:
            ray.kill(relay)
            raise
        return RayProcess(relay, f"pid {pid} on node {node}")

    def close(self) -> None:
        """Leave the cluster; what still runs on it for this service ends."""
        ray.shutdown()

    async def _placed(self, relay: Any) -> str:
        placing = asyncio.ensure_future(_answer(relay.place.remote()))
        done, _ = await asyncio.wait([placing], timeout=_SAID_SECONDS)
        if not done:
            logger.warning("a worker has not begun yet: the Ray cluster has %s", what_there_is())
        return str(await placing)


def ray_workers(address: str | None, device: str, count: int | None, store: str, state: Path) -> RayWorkers:
    """Connect to a cluster, and say what workers there will be.

    Args:
        address: as `cluster.connect`.
        device: auto, cpu or cuda.
        count: None for as many as there is room for now.
        store: URI.
        state: the service's folder.

    Raises UsageError when there is no cluster, or no such device, StoreUnavailableError when the store cannot be made.
    """
    ends = signal.getsignal(signal.SIGTERM)
    connect(address)
    signal.signal(signal.SIGTERM, ends)  # Ray's own would end the service with an exit code, as if it had failed
    choice = on_workers(EngineChoice(device=device))
    make_folder(store)
    folders = (state, *([Path(store)] if is_local(store) else []))
    return RayWorkers(choice, count or default_workers(choice), folders)


async def _answer(reference: Awaitable[Any]) -> Any:
    """A Ray reference as a coroutine, which asyncio can wait for with a limit."""
    return await reference
