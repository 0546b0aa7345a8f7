"""Run work in forked child processes with limits on memory and time, which their parent can kill at any moment.

A child inherits what its parent has in memory, so it starts in milliseconds. It closes every inherited file except a socket to
its parent, standard error, and the files in `files`. On Linux its memory is limited (RLIMIT_AS), and the kernel kills it
first when the machine's memory is exhausted. It leaves no core dump.
"""

from __future__ import annotations

import _thread
import fcntl
import gc
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import psutil

from reflogp.store import ReflogpError
from reflogp.store.texts import shortened

#: Maximum seconds to wait for a child between two calls of the caller's `check`.
POLL_SECONDS = 0.1
#: A child that uses no processor time for this many times its time limit is killed (it may wait for a lock or a network).
STILL = 6
#: File descriptor of a child's socket; the descriptors of `files` follow.
SOCKET = 3
#: Exit status of a child that raised MemoryError.
OUT_OF_MEMORY = 3


class ConfinedProcess:
    """A forked child and the parent's end of a socket to it.

    Args:
        work: called in the child, which ends when it returns: status 0, OUT_OF_MEMORY after a MemoryError, 1 after another
            exception.
        memory: bytes that the child may take in addition to the address space that it inherits.
        files: descriptors that the child keeps, as SOCKET + 1 and so on.

    Attributes:
        socket: the parent's end.
        pid: the child's process id.
        still: True if the child was killed because it used no processor time and made no progress.
    """

    def __init__(self, work: Callable[[], None], memory: int, files: Sequence[int] = ()) -> None:
        self.still = False
        self._status: int | None = None
        self._stood, self._seen, self._looked = 0.0, (0, 0.0), time.monotonic()
        self.socket, theirs = socket.socketpair()
        self.pid = 0
        self._forgotten: weakref.finalize[..., ConfinedProcess] | None = None
        failed: list[Exception] = []
        done = False
        waiting = threading.Lock()  # not an Event: Ctrl-C in the middle of its `wait` releases a lock that others hold
        waiting.acquire()

        def fork() -> None:
            nonlocal done
            # Handlers of the parent must not run in the child before it restores the defaults.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self.pid = os.fork()
                if self.pid == 0:
                    _run(work, memory, (theirs.fileno(), *files))
                # Ctrl-C may come before the caller has this object; the child then ends with it.
                self._forgotten = weakref.finalize(self, _kill_own_child, self.pid, os.getpid())
            except OSError as error:
                failed.append(error)
            finally:
                done = True
                waiting.release()

        # Python runs signal handlers in the main thread. An exception from one, such as KeyboardInterrupt, in the middle of a
        # fork would leave the child behind, and locks held that Python takes around a fork (logging's).
        try:
            try:
                _thread.start_new_thread(fork, ())
                waiting.acquire()
            except RuntimeError as error:  # no thread can be started
                failed.append(error)
        except BaseException:
            if not done:
                waiting.acquire(timeout=5.0)
            if self.pid:
                self.end()
            raise
        finally:
            theirs.close()
        if failed:
            self.socket.close()
            reason = getattr(failed[0], "strerror", None) or failed[0]
            raise ReflogpError(f"the machine cannot start a process to read or tokenise data: {reason}") from failed[0]

    def stir(self) -> None:
        """Restart the clock that measures how long the child has made no progress."""
        self._stood = 0.0

    def watch(self, seconds: float, progress: int) -> None:
        """Kill the child if for `seconds` it has used no processor time and `progress` has not changed.

        Time in which this process did not run (a suspended machine) does not count.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 1.0), now
        if self.still:
            return
        self._stood += passed
        if self._stood < seconds / 10:
            return
        seen = (progress, _processor_seconds(self.pid))
        if seen != self._seen:
            self._seen, self._stood = seen, 0.0
        elif self._stood > seconds:
            self.still = True
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill the child and return its exit status, negative for a signal. Later calls return the same status."""
        if self._status is None:
            self.socket.close()
            try:
                # A child that has already ended keeps its own exit status.
                os.kill(self.pid, signal.SIGKILL)
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except (ProcessLookupError, ChildProcessError):
                self._status = -signal.SIGKILL
            if self._forgotten is not None:
                self._forgotten.detach()
        return self._status


def _kill_own_child(pid: int, parent: int) -> None:
    """Kill a child that nobody ended, and wait for it; do nothing in a fork of its parent."""
    if os.getpid() == parent:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _processor_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return -1.0


# In the child


def _run(work: Callable[[], None], memory: int, files: Sequence[int]) -> NoReturn:
    """Do the work and exit. Never returns: the code after the fork is the parent's."""
    try:
        _confine(memory, files)
        work()
        os._exit(0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:
        os.write(2, f"reflogp: a child process ended: {shortened(repr(error))}\n".encode("utf-8", "replace"))
    finally:
        os._exit(1)


def _confine(memory: int, files: Sequence[int]) -> None:
    """Close inherited files, restore default signal handlers, ignore SIGINT and limit memory."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) or number in (signal.SIGTERM, signal.SIGPROF, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    gc.freeze()  # a garbage collection would copy every page that is shared with the parent
    end = SOCKET + len(files)
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, end) for file in files]
    for place, copy in enumerate(copies, SOCKET):
        os.dup2(copy, place)
    os.closerange(end, os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:  # noqa: PTH123
            taken = int(file.read().split()[0]) * mmap.PAGESIZE
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = taken + memory if hard == resource.RLIM_INFINITY else min(taken + memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
            file.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
