"""Define the interface of a worker's process, and start one on this machine.

For processes on a Ray cluster see `ray_processes`.
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
from reflogp.scoring.machine import exit_reason, growing_segments

#: Command that starts a worker, and the buffer limit of its streams in bytes, which also bounds the head of a frame.
COMMAND = (sys.executable, "-m", "reflogp.service.worker")
BUFFER = 1 << 20


class WorkerProcess(Protocol):
    """A running worker process.

    Attributes:
        name: name in the log.
    """

    name: str

    def send(self, data: bytes) -> bool:
        """Send bytes of frames; return False if the process accepts no more."""

    def outgoing(self) -> int:
        """Return the bytes that were sent but not yet read by the process, as far as known."""

    async def receive(self) -> Frame | None:
        """Return the next frame, or None when the process has ended."""

    async def wait(self) -> str:
        """Wait until the process ends; return the reason in words."""

    async def memory(self) -> int:
        """Return its resident bytes, or 0 if unknown."""

    def kill(self) -> None:
        """Kill the process."""


#: Starts a worker; raises ReflogpError if the worker cannot be started.
Start = Callable[[], Awaitable[WorkerProcess]]


class LocalProcess:
    """A WorkerProcess on this machine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.name = f"pid {process.pid}"
        self._process = process

    def send(self, data: bytes) -> bool:
        """See WorkerProcess.send."""
        stdin = self._process.stdin
        if stdin is None or stdin.is_closing():
            return False
        stdin.write(data)
        return True

    def outgoing(self) -> int:
        """See WorkerProcess.outgoing."""
        assert self._process.stdin is not None
        return int(self._process.stdin.transport.get_write_buffer_size())

    async def receive(self) -> Frame | None:
        """See WorkerProcess.receive."""
        assert self._process.stdout is not None
        return await receive_frame(self._process.stdout)

    async def wait(self) -> str:
        """See WorkerProcess.wait."""
        return exit_reason(await self._process.wait(), "the service's log")

    async def memory(self) -> int:
        """See WorkerProcess.memory."""
        return memory_of(self._process.pid)

    def kill(self) -> None:
        """See WorkerProcess.kill."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


async def start_here() -> WorkerProcess:
    """Start a worker on this machine."""
    return LocalProcess(await start_process())


async def start_process() -> asyncio.subprocess.Process:
    """Start the process of a worker, with pipes for stdin and stdout."""
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, **growing_segments(os.environ)}
    return await asyncio.create_subprocess_exec(*COMMAND, stdin=pipe, stdout=pipe, limit=BUFFER, env=environment)


def memory_of(pid: int) -> int:
    """Return the resident bytes of a process, or 0 if it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
