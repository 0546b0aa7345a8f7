"""Start the processes of workers and of jobs' runners, and exchange frames with them.

A worker is started as a program, because it takes seconds to load a model in any case. A runner is forked from a fork server
that has imported the libraries, so that a short job takes no longer than its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import psutil
from anyio import to_thread

from reflogp.scoring.frames import Frame, encode, receive_frame
from reflogp.scoring.machine import exit_reason, growing_segments
from reflogp.service.runner.order import JobContext, JobOrder

#: Command that starts a worker, and the size in bytes of the buffer for the worker's output. A frame may be longer than the
#: buffer.
COMMAND = (sys.executable, "-m", "reflogp.service.worker")
_BUFFER = 1 << 20
#: Attributes of multiprocessing's fork server, which belong to its implementation, that say how to connect to the server.
_SERVER = ("_forkserver_address", "_forkserver_authkey")


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


class RunnerProcess:
    """The process that runs a job."""

    def __init__(self, process: ForkServerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = process.pid
        self._process, self._reader, self._writer = process, reader, writer

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
        return exit_reason(self._process.exitcode or 0, "the service's log")

    def memory(self) -> int:
        """Return the resident memory of the process in bytes."""
        return memory_of(self.pid or 0, with_children=False)

    def kill(self) -> None:
        self._process.kill()


async def start_runner(order: JobOrder, context: JobContext) -> RunnerProcess:
    ours, theirs = socket.socketpair()
    forks = _forkserver()
    forkserver.ensure_running()
    server = {name: value for name, value in vars(forkserver._forkserver).items() if name in _SERVER}
    process = forks.Process(target=_run, args=(server, theirs, order, context), name=f"reflogp-job-{order.job}")
    with theirs:
        await to_thread.run_sync(process.start)
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_BUFFER)
    return RunnerProcess(process, reader, writer)


def start_fork_server() -> None:
    """Start the fork server of runners, and wait until it has imported their libraries."""
    process = _forkserver().Process(target=_do_nothing, daemon=True)
    process.start()
    process.join()


def _forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["reflogp.service.runner.run"])
    return context


def _run(server: dict[str, Any], connection: socket.socket, order: JobOrder, context: JobContext) -> None:
    # Let this process start the processes that read the dataset by the same fork server; otherwise, it would start its own.
    vars(forkserver._forkserver).update(server, ensure_running=lambda: None)
    from reflogp.service.runner.run import main  # imports torch, which the service's own process does not need

    main(connection, order, context)


def _do_nothing() -> None: ...


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
