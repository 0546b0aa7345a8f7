"""Run functions in forked child processes that have a memory limit and that the parent process can kill at any time.

A child inherits its parent's memory and therefore starts within milliseconds. The child closes every inherited file except a
socket to its parent, standard error, and the files that the caller lists. On Linux, RLIMIT_AS limits the child's memory, and
when the machine runs out of memory, the kernel kills the child before other processes. A child that crashes writes no core
dump.
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

#: Maximum number of seconds to wait for a child before checking whether the child is idle or the caller wants to cancel.
POLL_SECONDS = 0.1
#: Maximum idle time of a child, as a multiple of its processor time limit. A child that is idle for longer, for example because
#: it waits for a lock or for the network, is killed.
STILL = 6
#: File descriptor of the socket in a child. The files that the caller lists have the next higher descriptors.
SOCKET = 3
#: Exit status of a child that raised MemoryError.
OUT_OF_MEMORY = 3


class ConfinedProcess:
    """A forked child process, and the parent's end of a socket between the two processes.

    Args:
        work: function that is called in the child. The child exits with status 0 when `work` returns, with OUT_OF_MEMORY after
            a MemoryError, and with 1 after any other exception.
        memory: bytes of memory that the child may use in addition to the address space that it inherits.
        files: file descriptors that stay open in the child, renumbered to SOCKET + 1, SOCKET + 2 and so on.

    Attributes:
        socket: the parent's end of the socket.
        pid: the child's process id.
        still: True if `watch` killed the child because it used no processor time and made no progress for too long.

    Raises:
        ReflogpError: the child process cannot be started.
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
        # This is a lock and not an Event, because Ctrl-C during Event.wait can release the Event's internal lock while another
        # thread holds it.
        waiting = threading.Lock()
        waiting.acquire()

        def fork() -> None:
            nonlocal done
            # The parent's signal handlers must not run in the child before the child restores the defaults.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self.pid = os.fork()
                if self.pid == 0:
                    _run(work, memory, (theirs.fileno(), *files))
                # After Ctrl-C, the caller may never get this object. The child is then killed when the object is deleted.
                self._forgotten = weakref.finalize(self, _kill_own_child, self.pid, os.getpid())
            except OSError as error:
                failed.append(error)
            finally:
                done = True
                waiting.release()

        # Python runs signal handlers in the main thread. If a handler raised an exception, such as KeyboardInterrupt, during a
        # fork, the child would stay alive, and locks that Python takes around a fork, such as those of logging, would stay
        # locked. Therefore, another thread forks, and this thread waits for it.
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
            raise ReflogpError(f"cannot start a process to read or tokenize data: {reason}") from failed[0]

    def stir(self) -> None:
        """Set the child's idle time, which `watch` measures, to zero."""
        self._stood = 0.0

    def watch(self, seconds: float, progress: int) -> None:
        """Kill the child if, for `seconds` seconds, it has used no processor time and `progress` has not changed.

        The caller must call this method repeatedly while it waits for the child. `progress` is a number that the caller changes
        when the child makes progress. At most one second is counted between two calls, so that the time during which the parent
        process does not run, for example because the machine is suspended, does not count.
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
        """Kill the child if it is still running. Return its exit status, or -N if signal N killed it.

        Later calls return the same status.
        """
        if self._status is None:
            self.socket.close()
            try:
                # A child that has already exited keeps its own exit status.
                os.kill(self.pid, signal.SIGKILL)
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except (ProcessLookupError, ChildProcessError):
                self._status = -signal.SIGKILL
            if self._forgotten is not None:
                self._forgotten.detach()
        return self._status


def _kill_own_child(pid: int, parent: int) -> None:
    """Kill a child that `ConfinedProcess.end` did not kill, and wait for it to exit.

    Do nothing in a process that is not the child's parent, such as another process that the parent forked.
    """
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
    """Call `work` and exit. This function must never return, because only the parent may run the code after the fork."""
    try:
        _confine(memory, files)
        work()
        os._exit(0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:
        os.write(2, f"reflogp: a child process failed: {shortened(repr(error))}\n".encode("utf-8", "replace"))
    finally:
        os._exit(1)


def _confine(memory: int, files: Sequence[int]) -> None:
    """Close inherited files, restore default signal handlers, ignore SIGINT and limit memory."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) or number in (signal.SIGTERM, signal.SIGPROF, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends this child
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    gc.freeze()  # a garbage collection would copy every page that is shared with the parent
    end = SOCKET + len(files)
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, end) for file in files]
    for place, copy in enumerate(copies, SOCKET):
        os.dup2(copy, place)
    for name in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):  # noqa: PTH208
        if int(name) >= end:
            with suppress(OSError):  # the descriptor of this listing
                os.close(int(name))
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
