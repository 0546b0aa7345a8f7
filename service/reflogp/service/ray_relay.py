"""The actor that holds a service's worker process on some node, and passes bytes both ways.

Knows pipes. Does not know frames. Made by `processes`, as a Ray actor.
"""

from __future__ import annotations

import asyncio
import contextlib

from reflogp.scoring.on_ray.cluster import this_node
from reflogp.scoring.on_ray.shared import require_seen
from reflogp.service.processes import BUFFER, memory_of, start_process


class Relay:
    """One worker process. Its methods run in one event loop, several at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process

    async def place(self) -> str:
        """The node that it is on, in words."""
        return this_node()

    async def start(self, probes: list[str]) -> int:
        """Start the process; its id.

        Args:
            probes: files in folders that the worker shares with the service. Raises EngineError where one is not here.
        """
        for file in probes:
            require_seen(file)
        self._process = await start_process()
        return self._process.pid

    async def send(self, data: bytes) -> None:
        """Write to its stdin. A process that has ended takes nothing, and `receive` says so."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def receive(self) -> bytes:
        """What comes next from its stdout; nothing when it has ended."""
        assert self._process.stdout is not None
        return await self._process.stdout.read(BUFFER)

    async def wait(self) -> int:
        """Its exit status."""
        return await self._process.wait()

    async def memory(self) -> int:
        """Its resident bytes."""
        return memory_of(self._process.pid)

    async def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
