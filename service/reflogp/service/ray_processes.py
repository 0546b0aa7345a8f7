"""Start worker processes on nodes of a Ray cluster, for `executor = "ray"`.

For each worker process, a Ray actor (Relay) starts the process on a node, and relays bytes between the process and the service.
In the service's event loop, a RayProcess represents the worker process.
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
    """A Ray actor that runs one worker process on its node. The actor's methods run concurrently in one event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process

    async def place(self) -> str:
        """Return a description of the node that the actor runs on."""
        return this_node()

    async def start(self, probes: list[str]) -> int:
        """Start the process and return its process id.

        Args:
            probes: files that the service has written, one in each folder that the node must share with the service.

        Raise EngineError if a probe is not visible on this node, which means that the probe's folder is not shared.
        """
        for file in probes:
            require_visible(file)
        self._process = await start_process()
        return self._process.pid

    async def send(self, data: bytes) -> None:
        """Write data to the process's stdin. If the process has ended, do nothing; `receive` reports its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def receive(self) -> bytes:
        """Return the next bytes from the process's stdout, or empty bytes if the process has ended."""
        assert self._process.stdout is not None
        return await self._process.stdout.read(BUFFER)

    async def wait(self) -> int:
        """Wait for the process to end, and return its exit status."""
        return await self._process.wait()

    async def memory(self) -> int:
        """Return the resident memory of the process in bytes."""
        return memory_of(self._process.pid)

    async def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


logger = logging.getLogger(__name__)

#: A warning is logged when a worker has waited _SAID_SECONDS for resources on the cluster. A query for a worker's memory use
#: times out after _ANSWER_SECONDS.
_SAID_SECONDS, _ANSWER_SECONDS = 60.0, 2.0
#: Time limit, in seconds, for a relay to kill its worker process. A relay that takes longer is itself killed.
_KILL_SECONDS = 10.0


class RayProcess:
    """A WorkerProcess on a node of the cluster.

    Args:
        relay: the Relay actor, which has already started the worker process.
        name: name used for the process in the log.
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
            return self._lost or exit_reason(await self._relay.wait.remote(), "Ray's logs on the worker's node")
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
        """See WorkerProcess.kill. If the relay does not kill the process in time, kill the relay, which ends the process."""
        self._relay.kill.remote()
        if not self._killing:
            self._killing = True
            asyncio.get_running_loop().call_later(_KILL_SECONDS, self._end_relay)

    def _end_relay(self) -> None:
        if not self._tasks[1].done():
            ray.kill(self._relay)

    async def _write(self) -> None:
        """Send queued bytes to the relay.

        Only one remote call is made at a time, because the relay may run concurrent calls in any order.
        """
        with contextlib.suppress(RayError):  # `_read` gets the same error and records the reason
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
    """A service's workers on a Ray cluster.

    Attributes:
        choice: determines the device of each worker, and the GPUs or CPUs that Ray reserves for each worker. It does not
            determine which engine a worker uses for a reference; the service's settings do.
        count: number of workers.
        folders: folders that each worker's node must share with the service.
    """

    choice: EngineChoice
    count: int
    folders: tuple[Path, ...]

    async def start(self) -> WorkerProcess:
        """Start a worker on a node with enough free resources.

        If there is no such node yet, wait until there is one, without a time limit, and log a warning after _SAID_SECONDS.

        Raises:
            UsageError, EngineError: the worker could not be started. If the error was raised on a node, its message names the
                node.
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
        """Disconnect from the cluster. This ends all actors of this service that are still running."""
        ray.shutdown()

    async def _placed(self, relay: Any) -> str:
        placing = asyncio.ensure_future(_answer(relay.place.remote()))
        done, _ = await asyncio.wait([placing], timeout=_SAID_SECONDS)
        if not done:
            logger.warning(
                "a worker is still waiting for resources; the Ray cluster has %s in total: add a node or stop other Ray jobs",
                describe_cluster(),
            )
        return str(await placing)


def ray_workers(address: str | None, device: str, count: int | None, store: str, state: Path, gpus_each: int = 1) -> RayWorkers:
    """Connect to a Ray cluster and return a RayWorkers, which starts the service's workers there.

    Args:
        address: "auto", host:port, ray://host:port, or "local" to start Ray on this machine; None means the address in
            $RAY_ADDRESS, or "local" if the variable is not set.
        device: cpu, cuda, or auto (cuda if the cluster has a GPU, otherwise cpu).
        count: number of workers; None means as many workers as fit on all current nodes of the cluster.
        store: URI of the store.
        state: state folder of the service.
        gpus_each: number of GPUs that each worker uses if `device` is cuda.

    Raise UsageError if there is no cluster at the address or `device` is none of the values above, and StoreUnavailableError
    if the store's folder cannot be created.
    """
    ends = signal.getsignal(signal.SIGTERM)
    connect(address)
    signal.signal(signal.SIGTERM, ends)  # with Ray's handler, the service would exit with a failure code after SIGTERM
    # Only the device and the number of GPUs are used. Each reference has its own engine.
    choice = on_workers(EngineChoice("vllm", device, tensor_parallel=gpus_each))
    make_folder(store)
    folders = (state, *([Path(store)] if is_local(store) else []))
    return RayWorkers(choice, count or default_workers(choice), folders)


async def _answer(reference: Awaitable[Any]) -> Any:
    """Return the value of a Ray object reference.

    This function is a coroutine, so that asyncio can wait for the value with a timeout.
    """
    return await reference
