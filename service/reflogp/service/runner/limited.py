"""Run a function in a process that has a memory limit and can be killed, and take the messages that the function sends.

The process is forked from a fork server that has imported the libraries, and inherits no open file but standard error and a
pipe. On Linux, RLIMIT_AS limits its memory, and when the machine runs out of memory, the kernel kills it before other
processes. It writes no core dump.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from reflogp.scoring.machine import quiet_libraries, usable_cores

#: Maximum number of seconds between two calls of `check`.
_POLL_SECONDS = 0.1
#: Maximum number of bytes of a message. A longer one comes from a process that a file has taken over.
_MOST_BYTES = 4 << 30
#: Maximum number of bytes of a file that the process writes, such as a decompressed copy.
_MOST_FILE_BYTES = 256 << 30
#: Exit status of a process in which a MemoryError was raised.
_OUT_OF_MEMORY = 3
#: Maximum number of threads of each pool.
MOST_THREADS = 8
#: Parameter of glibc's `mallopt` for the number of arenas, each of which reserves 64 MiB, and its value.
_ARENA_MAX, _ARENAS = -8, 2
#: The module that the fork server imports.
_PRELOADED = "reflogp.service.runner.fork_server"


class NoProcessError(Exception):
    """The machine has no memory or no processes left, or the fork server has ended."""


class ProcessEndedError(Exception):
    """The process crashed, reached a limit, or was killed. The message is the reason."""

    def __init__(self, reason: str, timed_out: bool) -> None:
        super().__init__(reason)
        self.timed_out = timed_out  # whether it reached the limit of processor time that it had set with ITIMER_PROF


def fork_server() -> ForkServerContext:
    """Return the context that starts processes by a fork server, which imports their libraries when it starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    return context


def messages(function: Callable[..., None], *arguments: Any, memory: int, check: Callable[[], None]) -> Generator[bytes]:
    """Call function(connection, *arguments) in a process, and yield the messages that it sends with `send_bytes`.

    The process is killed when the generator is closed, or when `check` raises an error.

    Args:
        function: a function of a module that the process can import.
        arguments: arguments that can be pickled.
        memory: bytes of memory that the process may use in addition to the address space that it starts with.
        check: function that is called about ten times a second while the caller waits for a message.

    Raises ProcessEndedError if the process ends in another way than by returning from the function, and NoProcessError if it
    cannot be started.
    """
    context = fork_server()
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sending, memory, function, arguments), name="reflogp-reader", daemon=True)
    try:
        process.start()
    except (OSError, EOFError) as error:
        raise NoProcessError(f"no process can be started: {error}") from error
    sending.close()
    try:
        while True:
            check()
            if not receiving.poll(_POLL_SECONDS):
                continue
            try:
                message = receiving.recv_bytes(_MOST_BYTES)
            except EOFError:
                break
            yield message
        process.join()
        if process.exitcode:
            raise ProcessEndedError(_reason(process.exitcode, memory), process.exitcode == -signal.SIGPROF)
    finally:
        process.kill()
        process.join()
        receiving.close()


def _reason(status: int, memory: int) -> str:
    if status == -signal.SIGPROF:
        return "took too much processor time"
    if status == _OUT_OF_MEMORY:
        return f"needs more than {memory:,} bytes of memory"
    if status < 0:
        return f"crashed the process ({signal.Signals(-status).name}; perhaps out of memory)"
    return f"failed in an unexpected way (exit status {status}; see the log)"


# In the process


def _reserve_little() -> None:
    """Make allocators and thread pools reserve now or never what address space, which RLIMIT_AS counts, they do not use."""
    pa.allocate_buffer(1)  # Arrow's pool reserves 1 GiB
    pa.set_cpu_count(min(usable_cores(), MOST_THREADS))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, _ARENAS)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(connection: Connection, memory: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends this process
        os.dup2(2, 1)  # what libraries print goes to the log
        threading.Thread(target=_end_with_parent, daemon=True).start()
        quiet_libraries()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_FILE_BYTES, _MOST_FILE_BYTES))
        if sys.platform == "linux":
            _reserve_little()
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + memory, taken + memory))
            Path("/proc/self/oom_score_adj").write_text("1000")
        function(connection, *arguments)
        os._exit(0)
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    except BrokenPipeError:  # the parent has closed the pipe or exited
        os._exit(1)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
