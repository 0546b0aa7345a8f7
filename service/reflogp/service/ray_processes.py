"""Start worker processes on nodes of a Ray cluster, for `executor = "ray"`.

An actor on the node holds the process and passes bytes in both directions. The service's side runs in its event loop.
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
from reflogp.scoring.machine import exit_reason
from reflogp.scoring.on_ray.cluster import (
    connect,
    default_workers,
    describe_cluster,
    on_workers,
    probe,
    raised_on,
    reason_of,
    require_visible,
    resources_of,
    this_node,
)
from reflogp.service.processes import BUFFER, WorkerProcess, memory_of, start_process
from reflogp.store.storage import is_local, make_folder


class Relay:
    """A Ray actor that holds one worker process. Its methods run concurrently in one event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process

    async def place(self) -> str:
        """Return the actor's node, in words."""
        return this_node()

    async def start(self, probes: list[str]) -> int:
        """Start the process; return its id.

        Args:
            probes: files in folders that the worker shares with the service.

        Raises EngineError if a probe is not visible on this node.
        """
        for file in probes:
            require_visible(file)
        self._process = await start_process()
        return self._process.pid

    async def send(self, data: bytes) -> None:
        """Write to the process's stdin. Does nothing if the process has ended; `receive` reports the end."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def receive(self) -> bytes:
        """Return the next bytes from the process's stdout; empty if it has ended."""
        assert self._process.stdout is not None
        return await self._process.stdout.read(BUFFER)

    async def wait(self) -> int:
        """Wait for the process to end; return its exit status."""
        return await self._process.wait()

    async def memory(self) -> int:
        """Return the resident bytes of the process."""
        return memory_of(self._process.pid)

    async def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


logger = logging.getLogger(__name__)

#: Seconds that a worker waits for room on the cluster before a warning is logged, and the timeout of a request for its memory.
_SAID_SECONDS, _ANSWER_SECONDS = 60.0, 2.0
#: Seconds that a relay has to kill its worker before the relay itself is killed.
_KILL_SECONDS = 10.0


class RayProcess:
    """A WorkerProcess on a node of the cluster.

    Args:
        relay: the actor; it has started its process.
        name: name in the log.
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
        """See WorkerProcess.send."""
        if self._reader.at_eof():
            return False
        self._outgoing.put_nowait(data)
        self._outgoing_bytes += len(data)
        return True

    def outgoing(self) -> int:
        """See WorkerProcess.outgoing."""
        return self._outgoing_bytes

    async def receive(self) -> Frame | None:
        """See WorkerProcess.receive."""
        return await receive_frame(self._reader)

    async def wait(self) -> str:
        """See WorkerProcess.wait."""
        await self._tasks[1]
        self._tasks[0].cancel()
        try:
            return self._lost or exit_reason(await self._relay.wait.remote(), "Ray's logs of its node")
        except RayError as error:
            return reason_of(error)
        finally:
            ray.kill(self._relay)

    async def memory(self) -> int:
        """See WorkerProcess.memory."""
        try:
            return int(await asyncio.wait_for(_answer(self._relay.memory.remote()), _ANSWER_SECONDS))
        except (RayError, TimeoutError):
            return 0

    def kill(self) -> None:
        """See WorkerProcess.kill. A relay that does not respond in time is killed too, which ends its worker."""
        self._relay.kill.remote()
        if not self._killing:
            self._killing = True
            asyncio.get_running_loop().call_later(_KILL_SECONDS, self._end_relay)

    def _end_relay(self) -> None:
        if not self._tasks[1].done():
            ray.kill(self._relay)

    async def _write(self) -> None:
        """Send queued bytes, one call at a time: overlapping calls of an asynchronous actor have no order."""
        with contextlib.suppress(RayError):  # the reader gets the same error and records the reason
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
    """The workers of a service on a cluster.

    Attributes:
        choice: engine of each worker, and the device that it computes on.
        count: number of workers.
        folders: local folders that the workers share with the service.
    """

    choice: EngineChoice
    count: int
    folders: tuple[Path, ...]

    async def start(self) -> WorkerProcess:
        """Start a worker on a node that has room. Waits for room, and logs a warning if that takes long.

        Raises:
            UsageError, EngineError: the worker could not be started; an error raised on a node names the node.
        """
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
        """Disconnect from the cluster; everything that still runs on it for this service ends."""
        ray.shutdown()

    async def _placed(self, relay: Any) -> str:
        placing = asyncio.ensure_future(_answer(relay.place.remote()))
        done, _ = await asyncio.wait([placing], timeout=_SAID_SECONDS)
        if not done:
            logger.warning("a worker has not begun yet: the Ray cluster has %s", describe_cluster())
        return str(await placing)


def ray_workers(address: str | None, device: str, count: int | None, store: str, state: Path) -> RayWorkers:
    """Connect to a cluster and return the service's workers on it.

    Args:
        address: as in `cluster.connect`.
        device: auto, cpu or cuda.
        count: number of workers; None for as many as the cluster has room for now.
        store: URI of the store.
        state: state folder of the service.

    Raises UsageError if there is no cluster or no such device, StoreUnavailableError if the store cannot be created.
    """
    ends = signal.getsignal(signal.SIGTERM)
    connect(address)
    signal.signal(signal.SIGTERM, ends)  # Ray's handler would end the service with an exit code, as if it had failed
    choice = on_workers(EngineChoice(device=device))
    make_folder(store)
    folders = (state, *([Path(store)] if is_local(store) else []))
    return RayWorkers(choice, count or default_workers(choice), folders)


async def _answer(reference: Awaitable[Any]) -> Any:
    """Return the value of a Ray object reference; a coroutine, so that asyncio can wait for it with a timeout."""
    return await reference
