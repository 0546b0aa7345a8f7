"""Start the processes of jobs, and exchange frames with them.

Each is forked from a fork server that has imported the libraries, so that a short job takes no longer than its work.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import socket
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any, Literal

from anyio import to_thread

from reflogp.scoring.frames import Frame, encode, receive_frame
from reflogp.scoring.machine import exit_reason
from reflogp.service.pool import memory_of
from reflogp.service.runner.limited import fork_server
from reflogp.service.runner.order import JobOrder

#: Seconds between checks of a process's memory.
_LOOK_SECONDS = 2.0
#: Size in bytes of the buffer for a process's frames. A frame may be longer.
_BUFFER = 1 << 20
#: Attributes of multiprocessing's fork server, which belong to its implementation, that say how to connect to the server.
_SERVER = ("_forkserver_address", "_forkserver_authkey")


class RunnerProcess:
    """The process that runs a job, or writes its report. It is killed if it uses more than `most_bytes` of memory."""

    def __init__(
        self, process: ForkServerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most_bytes: int
    ) -> None:
        self.pid = process.pid
        self.memory_bytes = 0  # at the last check
        self.killed_for = ""
        self._process, self._reader, self._writer = process, reader, writer
        self._watch = asyncio.create_task(self._limit_memory(most_bytes))

    def send(self, message: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> Frame | None:
        """Return the next frame, or None if the process has exited."""
        return await receive_frame(self._reader)

    async def wait(self) -> str:
        """Wait until the process exits, and return a message that says why it exited."""
        self._writer.close()
        await to_thread.run_sync(self._process.join)
        self._watch.cancel()
        return self.killed_for or exit_reason(self._process.exitcode or 0, "the service's log")

    def kill(self, why: str) -> None:
        self.killed_for = why
        self._process.kill()

    async def _limit_memory(self, most_bytes: int) -> None:
        while (used := memory_of(self.pid or 0, with_children=False)) <= most_bytes:
            self.memory_bytes = used
            await asyncio.sleep(_LOOK_SECONDS)
        self.kill(f"it used {used:,} bytes of memory, more than max_worker_bytes allows")


async def start_process(work: Literal["run", "report"], order: JobOrder) -> RunnerProcess:
    """Start the process that runs a job or writes its report: `main` of the module with this name.

    Raises OSError or EOFError if the machine has no memory or no processes left.
    """
    ours, theirs = socket.socketpair()
    process = await to_thread.run_sync(_start, work, theirs, order)
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_BUFFER)
    return RunnerProcess(process, reader, writer, order.context.most_bytes)


def _start(work: str, theirs: socket.socket, order: JobOrder) -> ForkServerProcess:
    forks = fork_server()
    forkserver.ensure_running()
    server = {name: value for name, value in vars(forkserver._forkserver).items() if name in _SERVER}
    process = forks.Process(target=_main, args=(work, server, theirs, order), name=f"reflogp-job-{order.claim.id}")
    with theirs:
        process.start()
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # a forced exit does not wait for it
    return process


def start_fork_server() -> None:
    """Start the fork server of runners, and wait until it has imported their libraries."""
    process = fork_server().Process(target=_do_nothing, daemon=True)
    process.start()
    process.join()


def _main(work: str, server: dict[str, Any], connection: socket.socket, order: JobOrder) -> None:
    # the processes that read the dataset are started by the service's fork server, not by one of this process's own
    vars(forkserver._forkserver).update(server, ensure_running=lambda: None)
    # that module imports torch, which the service's own process does not need
    importlib.import_module(f"reflogp.service.runner.{work}").main(connection, order)


def _do_nothing() -> None: ...
