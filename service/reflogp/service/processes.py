"""Start worker processes, and exchange frames with them through pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import psutil

from reflogp.scoring.frames import Frame, receive_frame
from reflogp.scoring.machine import exit_reason, growing_segments

#: Command that starts a worker, and the size in bytes of the buffer for the worker's output. A frame may be longer than the
#: buffer.
COMMAND = (sys.executable, "-m", "reflogp.service.worker")
_BUFFER = 1 << 20


class WorkerProcess:
    """A running worker process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.name = f"pid {process.pid}"
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    def send(self, data: bytes) -> bool:
        """Send encoded frames to the process. Return False if the process no longer accepts data."""
        if self._stdin.is_closing():
            return False
        self._stdin.write(data)
        return True

    def outgoing(self) -> int:
        """Return the number of bytes that the process has not read yet."""
        return int(self._stdin.transport.get_write_buffer_size())

    async def receive(self) -> Frame | None:
        """Return the next frame, or None if the process has exited."""
        return await receive_frame(self._stdout)

    async def wait(self) -> str:
        """Wait until the process exits, and return a message that says why it exited."""
        return exit_reason(await self._process.wait(), "the service's log")

    def memory(self) -> int:
        """Return the resident memory of the process and its children (vLLM, the reader of a job) in bytes."""
        return memory_of(self._process.pid)

    def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


async def start_worker() -> WorkerProcess:
    """Start a worker's process with pipes for stdin and stdout."""
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, **growing_segments(os.environ)}
    process = await asyncio.create_subprocess_exec(*COMMAND, stdin=pipe, stdout=pipe, limit=_BUFFER, env=environment)
    return WorkerProcess(process)


def memory_of(pid: int, with_children: bool = True) -> int:
    """Return the resident memory of a process in bytes, or 0 if the process does not exist or cannot be inspected.

    Pages that processes share are counted once for each.
    """
    try:
        process = psutil.Process(pid)
        of_it = [process, *process.children(recursive=True)] if with_children else [process]
    except psutil.Error:
        return 0
    total = 0
    for each in of_it:
        with contextlib.suppress(psutil.Error):
            total += int(each.memory_info().rss)
    return total
