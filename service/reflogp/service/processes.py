"""Define the interface of worker processes, and start worker processes on this machine.

`ray_processes` starts worker processes on a Ray cluster.
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

#: Command that starts a worker, and the size in bytes of the buffer for the worker's output. A frame may be longer than the
#: buffer.
COMMAND = (sys.executable, "-m", "reflogp.service.worker")
BUFFER = 1 << 20


class WorkerProcess(Protocol):
    """A running worker process.

    Attributes:
        name: name used for the process in the log.
    """

    name: str

    def send(self, data: bytes) -> bool:
        """Send encoded frames to the process. Return False if the process no longer accepts data."""

    def outgoing(self) -> int:
        """Return the number of bytes that were passed to `send` and are not yet known to have reached the process's stdin."""

    async def receive(self) -> Frame | None:
        """Return the next frame, or None if the process has exited."""

    async def wait(self) -> str:
        """Wait until the process exits, and return a message that says why it exited."""

    async def memory(self) -> int:
        """Return the resident memory of the process in bytes, or 0 if it is unknown."""

    def kill(self) -> None:
        """Kill the process."""


#: Type of a function that starts a worker. If the worker cannot be started, the function raises ReflogpError (on a Ray cluster)
#: or OSError (on this machine).
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
    """Start a worker's process with pipes for stdin and stdout."""
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, **growing_segments(os.environ)}
    return await asyncio.create_subprocess_exec(*COMMAND, stdin=pipe, stdout=pipe, limit=BUFFER, env=environment)


def memory_of(pid: int) -> int:
    """Return the resident memory of a process in bytes, or 0 if the process does not exist or cannot be inspected."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
