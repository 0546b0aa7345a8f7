"""Hold a service's worker process on a node of a Ray cluster and pass bytes in both directions."""

from __future__ import annotations

import asyncio
import contextlib

from reflogp.scoring.on_ray.cluster import this_node
from reflogp.scoring.on_ray.shared import require_visible
from reflogp.service.processes import BUFFER, memory_of, start_process


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
