"""A worker's process: what the pool needs of one, and one on this machine.

Knows pipes and exit statuses. Does not know what the frames mean. Made for `pool`; one elsewhere is in `on_ray.processes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

import psutil

from reflogp.scoring.frames import Frame, receive_frame
from reflogp.scoring.machine.allocator import growing_segments
from reflogp.scoring.machine.exits import reason_of

#: How a worker is started, and the longest frame head that is read at once.
COMMAND = (sys.executable, "-m", "reflogp.service.worker")
BUFFER = 1 << 20


class WorkerProcess(Protocol):
    """A worker that runs.

    Attributes:
        name: for the log.
    """

    name: str

    def send(self, data: bytes) -> bool:
        """Send bytes of frames; False when it takes no more."""

    def outgoing(self) -> int:
        """Bytes that were sent and that it has not read yet, as far as that can be told."""

    async def receive(self) -> Frame | None:
        """Its next frame; None when it has ended."""

    async def wait(self) -> str:
        """Why it ended, in words, once it has."""

    async def memory(self) -> int:
        """Its resident bytes; 0 when that cannot be told."""

    def kill(self) -> None:
        """End it at once."""


#: Starts a worker; raises ReflogpError when that cannot be done.
Start = Callable[[], Awaitable[WorkerProcess]]


class LocalProcess:
    """A WorkerProcess on this machine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.name = f"pid {process.pid}"
        self._process = process

    def send(self, data: bytes) -> bool:
        """As WorkerProcess.send."""
        stdin = self._process.stdin
        if stdin is None or stdin.is_closing():
            return False
        stdin.write(data)
        return True

    def outgoing(self) -> int:
        """As WorkerProcess.outgoing."""
        assert self._process.stdin is not None
        return int(self._process.stdin.transport.get_write_buffer_size())

    async def receive(self) -> Frame | None:
        """As WorkerProcess.receive."""
        assert self._process.stdout is not None
        return await receive_frame(self._process.stdout)

    async def wait(self) -> str:
        """As WorkerProcess.wait."""
        return reason_of(await self._process.wait(), "the service's log")

    async def memory(self) -> int:
        """As WorkerProcess.memory."""
        return memory_of(self._process.pid)

    def kill(self) -> None:
        """As WorkerProcess.kill."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


async def start_here() -> WorkerProcess:
    """Start a worker on this machine."""
    return LocalProcess(await start_process())


async def start_process() -> asyncio.subprocess.Process:
    """The process itself, with pipes."""
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, **growing_segments(os.environ)}
    return await asyncio.create_subprocess_exec(*COMMAND, stdin=pipe, stdout=pipe, limit=BUFFER, env=environment)


def memory_of(pid: int) -> int:
    """Resident bytes of a process; 0 when it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
