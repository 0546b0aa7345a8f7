"""Start and monitor worker processes, exchange frames with them, and replace those that have exited.

All code in this module runs in the event loop. A frame consists of a JSON object and a body of bytes. The JSON object's field
`op` names the type of the frame. The pool learns the state of each worker from the worker's `ready`, `loaded`, `pong` and
`dying` frames, and passes all frames except `pong` to a callback.

The pool sends each worker a `ping` every few seconds. A separate thread in the worker answers pings, even while the worker
loads a model or computes a forward pass. A worker that does not answer pings is therefore not just busy: its whole process has
stopped or hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
from anyio import to_thread

from reflogp.scoring.frames import encode, receive_frame
from reflogp.scoring.machine import exit_reason, growing_segments, return_freed_memory
from reflogp.service.supervision import supervise
from reflogp.service.worker.protocol import WorkerConfiguration

logger = logging.getLogger(__name__)

#: Seconds before a restart: _FIRST_PAUSE, doubled for each consecutive failed start, up to _LONGEST_PAUSE. A worker that was
#: ready when it ended is restarted at once.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0
#: A worker counts as broken after this many consecutive failed starts. A start fails if the process ends before it is ready.
_BROKEN_AFTER = 3
#: Seconds between checks of a worker's memory use and its answers to pings.
_LOOK_SECONDS = 2.0
#: A worker that leaves a ping unanswered counts as late after _LATE_SECONDS, and is killed after _SILENCE_SECONDS; before its
#: first answer, when it imports its libraries, after _START_SECONDS.
_LATE_SECONDS, _SILENCE_SECONDS, _START_SECONDS = 15.0, 60.0, 600.0
#: When the pool closes, workers that have not exited after this many seconds are killed.
_END_SECONDS = 25.0
#: Interval, in seconds, at which this process returns freed memory to the operating system.
_TRIM_SECONDS = 60.0

#: Command that starts a worker, and the size in bytes of the buffer for the worker's output. A frame may be longer than the
#: buffer.
COMMAND = (sys.executable, "-m", "reflogp.service.worker")
_BUFFER = 1 << 20


@dataclass(eq=False)
class WorkerHandle:
    """One worker of the pool. If the worker's process exits and is replaced, the WorkerHandle stays the same."""

    number: int
    configuration: WorkerConfiguration
    ready: bool = False  # accepts work; False while it is starting
    loaded: list[str] = field(default_factory=list)  # ids of the references whose engines are loaded
    memory_bytes: int = 0  # resident memory of the process and its children (such as vLLM) at the last check
    last_error: str = ""  # why its last process exited or could not be started; "" when a new process has started
    failed_starts: int = 0
    killed_for: str = ""
    process: Process | None = None
    silent_seconds: float = 0.0  # how long the latest ping has been unanswered
    answered: bool = False  # whether the current process has answered a ping
    doing: tuple[str, float] | None = None  # of the engine at the last ping: "load" or "pass", and the seconds since it began
    _is_asked: bool = False

    @property
    def broken(self) -> bool:
        return self.failed_starts >= _BROKEN_AFTER

    @property
    def late(self) -> bool:
        return self.silent_seconds > _LATE_SECONDS

    @property
    def answering(self) -> bool:
        return self.ready and not self.late

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Send a frame to the worker's process, unless it has exited."""
        if self.process is not None and self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write(encode(message, body))

    def kill(self, why: str) -> None:
        """Kill the worker's process. The pool then starts a new one, unless it is closing."""
        self.killed_for = why
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def start(self) -> Process:
        self.killed_for = ""
        self.silent_seconds, self.answered, self._is_asked, self.doing = 0.0, False, False, None
        self.process = await start_worker()
        self.last_error = ""
        self.send({"op": "configure", "configuration": self.configuration.model_dump(exclude_unset=True)})
        return self.process

    def ask(self, passed: float) -> None:
        """Send a ping. If the last one is still unanswered, add `passed` seconds to `silent_seconds`."""
        if self._is_asked:
            self.silent_seconds += passed
        else:
            self.send({"op": "ping"})
            self._is_asked = True

    def on_pong(self, message: dict[str, Any]) -> None:
        self.answered, self._is_asked, self.silent_seconds = True, False, 0.0
        self.doing = (message["doing"], message["seconds"]) if message["doing"] else None


class Pool:
    """All workers of a service.

    Args:
        on_frame: called with every frame except `pong`. Frames from the same worker arrive in order.
        on_death: called with a worker and a reason after the worker's process has exited or could not be started, unless the
            pool is closing.
        max_worker_bytes: a worker that uses more memory is killed, so that the operating system does not kill another process.
    """

    def __init__(
        self,
        configurations: list[WorkerConfiguration],
        on_frame: Callable[[WorkerHandle, dict[str, Any], bytes], None],
        on_death: Callable[[WorkerHandle, str], None],
        max_worker_bytes: int,
    ) -> None:
        self.workers = [WorkerHandle(number, entry) for number, entry in enumerate(configurations)]
        self._on_frame = on_frame
        self._on_death = on_death
        self._max_worker_bytes = max_worker_bytes
        self._closing = False
        self._lives: dict[WorkerHandle, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        for worker in self.workers:
            life = supervise(f"keeping worker {worker.number}", partial(self._supervise, worker))
            self._lives[worker] = asyncio.create_task(life)
        self._watching = asyncio.create_task(supervise("watching the workers", self._watch))

    async def close(self) -> None:
        """Let every worker commit its values and exit. Kill workers that do not exit in time."""
        self._closing = True
        for worker, life in self._lives.items():
            if worker.process is None:  # the worker is waiting for its restart
                life.cancel()
            else:
                worker.send({"op": "exit"})
        if self._lives:
            _, late = await asyncio.wait(self._lives.values(), timeout=_END_SECONDS)
            for worker in self.workers if late else []:
                worker.kill("the worker did not exit in time")
            if late:
                await asyncio.wait(late, timeout=5)
        for task in [*self._lives.values(), *([self._watching] if self._watching else [])]:
            task.cancel()

    async def _supervise(self, worker: WorkerHandle) -> None:
        while not self._closing:
            reason = await self._live(worker)
            was_ready, worker.ready, worker.loaded, worker.process = worker.ready, False, [], None
            if self._closing:
                return
            worker.failed_starts = 0 if was_ready else worker.failed_starts + 1
            worker.last_error = reason
            logger.warning("worker %d ended: %s", worker.number, reason)
            self._on_death(worker, reason)
            if worker.failed_starts:
                await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**worker.failed_starts))

    async def _live(self, worker: WorkerHandle) -> str:
        """Start a process for a worker and handle the process's frames. After it has exited, return the reason for the exit."""
        try:
            process = await worker.start()
        except OSError as error:  # the machine has no memory or no processes left
            return f"it could not be started: {error}"
        logger.info("worker %d started, pid %s", worker.number, process.pid)
        assert process.stdout is not None
        try:
            while (frame := await receive_frame(process.stdout)) is not None:
                self._take(worker, *frame)
        except Exception:  # a bug in the service; its state may not fit the worker's any more
            logger.exception("could not handle a message from worker %d", worker.number)
            worker.kill("the service could not handle a message from the worker (see the log)")
        status = await process.wait()
        return worker.killed_for or worker.last_error or exit_reason(status, "the service's log")

    def _take(self, worker: WorkerHandle, message: dict[str, Any], body: bytes) -> None:
        match message["op"]:
            case "ready":
                worker.ready, worker.failed_starts = True, 0
            case "loaded":
                worker.loaded = message["references"]
            case "pong":
                worker.on_pong(message)
                return
            case "dying":
                worker.last_error = message["error"]
        self._on_frame(worker, message, body)

    async def _watch(self) -> None:
        last = trimmed = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            passed = min(now - last, 2 * _LOOK_SECONDS)  # if this process was paused, ignore the pause
            last = now
            for worker in self.workers:
                self._look(worker, passed)
            if now - trimmed > _TRIM_SECONDS:
                trimmed = now
                await to_thread.run_sync(return_freed_memory)

    def _look(self, worker: WorkerHandle, passed: float) -> None:
        if worker.process is None:
            worker.memory_bytes = 0
            return
        worker.ask(passed)
        if worker.silent_seconds > (_SILENCE_SECONDS if worker.answered else _START_SECONDS):
            worker.kill(f"the worker did not answer for {worker.silent_seconds:.0f} seconds")
        worker.memory_bytes = memory_of(worker.process.pid)
        if worker.memory_bytes > self._max_worker_bytes:
            worker.kill(f"the worker used {worker.memory_bytes:,} bytes of memory, more than max_worker_bytes allows")


async def start_worker() -> Process:
    """Start a worker's process with pipes for stdin and stdout."""
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, **growing_segments(os.environ)}
    return await asyncio.create_subprocess_exec(*COMMAND, stdin=pipe, stdout=pipe, limit=_BUFFER, env=environment)


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
