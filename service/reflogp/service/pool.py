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
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from anyio import to_thread

from reflogp.scoring.frames import encode
from reflogp.scoring.machine import return_freed_memory
from reflogp.service.processes import WorkerProcess, memory_of, start_worker
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
#: A warning is logged when a forward pass has taken this many seconds, and again after each further period of this length. The
#: pass is not stopped: a long pass cannot be told from one that hangs.
_LONG_PASS_SECONDS = 600.0
#: When the pool closes, workers that have not exited after this many seconds are killed.
_END_SECONDS = 25.0
#: Interval, in seconds, at which this process returns freed memory to the operating system.
_TRIM_SECONDS = 60.0


class WorkerHandle:
    """One worker of the pool. If the worker's process exits and is replaced, the WorkerHandle stays the same.

    Attributes:
        ready: True if the worker accepts work, False while it is starting.
        loaded: ids of the references whose engines are loaded.
        deaths: number of times so far that a process of this worker has exited or could not be started.
        memory_bytes: resident memory of the process at the last check, or 0 if it is unknown.
        last_error: why the worker's last process exited or could not be started; "" when a new process has started.
        silent_seconds: how long the latest ping has been unanswered, or 0 if the worker has answered it.
        late: True if an answer to a ping is overdue.
        answered: True if the current process has answered at least one ping.
        asked: True if the latest ping has not been answered yet.
        doing: what the engine was doing at the last ping: None, or "load" or "pass" and the seconds since it began.
    """

    def __init__(self, number: int, configuration: WorkerConfiguration) -> None:
        self.number = number
        self.configuration = configuration
        self.ready = False
        self.loaded: list[str] = []
        self.deaths = 0
        self.memory_bytes = 0
        self.last_error = ""
        self.failed_starts = 0
        self.killed_for = ""
        self.process: WorkerProcess | None = None
        self.silent_seconds = 0.0
        self.late = False
        self.answered = False
        self.asked = False
        self.doing: tuple[str, float] | None = None
        self._backlog: list[bytes] = []

    @property
    def broken(self) -> bool:
        """True if several consecutive starts have failed."""
        return self.failed_starts >= _BROKEN_AFTER

    @property
    def answering(self) -> bool:
        """True if the worker accepts work and answers pings in time."""
        return self.ready and not self.late

    @property
    def outgoing_bytes(self) -> int:
        """Number of bytes that the worker has not read yet: those sent to its process, plus those kept for its next process."""
        return sum(map(len, self._backlog)) + (self.process.outgoing() if self.process is not None else 0)

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Send a frame to the worker. If the current process does not accept the frame, keep the frame for the next process."""
        data = encode(message, body)
        if self.process is None or not self.process.send(data):
            self._backlog.append(data)

    def kill(self, why: str) -> None:
        """Kill the worker's process, for a reason. The pool then starts a new one, unless it is closing."""
        self.killed_for = why
        if self.process is not None:
            self.process.kill()

    async def start(self) -> WorkerProcess:
        self.killed_for = ""
        self.silent_seconds, self.late, self.answered, self.asked, self.doing = 0.0, False, False, False, None
        process = await start_worker()
        self.process = process
        self.last_error = ""
        process.send(encode({"op": "configure", "configuration": asdict(self.configuration)}))
        backlog, self._backlog = self._backlog, []
        for data in backlog:
            process.send(data)
        return process

    def ask(self, passed: float, late_after: float) -> None:
        """Send a ping. If the last one is still unanswered, add `passed` seconds to `silent_seconds` and update `late`."""
        if self.asked:
            self.silent_seconds += passed
            self.late = self.silent_seconds > late_after
        elif self.process is not None:
            self.asked = self.process.send(encode({"op": "ping"}))

    def on_pong(self, message: dict[str, Any]) -> None:
        self.answered, self.asked, self.silent_seconds, self.late = True, False, 0.0, False
        self.doing = (message["doing"], message["seconds"]) if message["doing"] else None


Frames = Callable[[WorkerHandle, dict[str, Any], bytes], Awaitable[None]]
Deaths = Callable[[WorkerHandle, str], Awaitable[None]]


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
        on_frame: Frames,
        on_death: Deaths,
        max_worker_bytes: int | None,
    ) -> None:
        self.workers = [WorkerHandle(number, entry) for number, entry in enumerate(configurations)]
        self._on_frame = on_frame
        self._on_death = on_death
        self._max_worker_bytes = max_worker_bytes
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        keep = [supervise(f"keeping worker {worker.number}", partial(self._supervise, worker)) for worker in self.workers]
        watch = supervise("watching the workers", self._watch)
        self._tasks = [asyncio.create_task(work) for work in [*keep, watch]]

    async def close(self) -> None:
        """Let every worker commit its values and exit. Kill workers that do not exit in time."""
        self._closing = True
        for worker in self.workers:
            if worker.process is not None:
                worker.send({"op": "exit"})
        watch = self._tasks.pop() if self._tasks else None
        for worker, task in zip(self.workers, self._tasks, strict=False):  # no tasks if the pool was never started
            if worker.process is None:  # the worker is waiting for its restart
                task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_END_SECONDS)
            for worker in self.workers if late else []:
                worker.kill("the worker did not exit in time")
            if late:
                await asyncio.wait(late, timeout=5)
        for task in [*self._tasks, *([watch] if watch else [])]:
            task.cancel()

    async def _supervise(self, worker: WorkerHandle) -> None:
        while not self._closing:
            try:
                reason = await self._live(worker)
            except Exception as error:  # a bug here must not leave the service without a worker
                logger.exception("supervision of worker %d failed", worker.number)
                reason = f"{type(error).__name__}: {error}"
            was_ready, worker.ready, worker.loaded, worker.process = worker.ready, False, [], None
            if self._closing:
                return
            worker.deaths += 1
            worker.failed_starts = 0 if was_ready else worker.failed_starts + 1
            worker.last_error = reason
            logger.warning("worker %d ended: %s", worker.number, reason)
            try:
                await self._on_death(worker, reason)
            except Exception:  # the job is later found to be running without a worker, and is queued again
                logger.exception("could not requeue the work of worker %d after its process ended", worker.number)
            if worker.failed_starts:
                await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**worker.failed_starts))

    async def _live(self, worker: WorkerHandle) -> str:
        """Start a process for a worker and handle the process's frames. After it has exited, return the reason for the exit."""
        process = await worker.start()
        logger.info("worker %d started, %s", worker.number, process.name)
        try:
            while (frame := await process.receive()) is not None:
                await self._take(worker, *frame)
        except Exception:  # a bug here must not leave the service without a worker
            logger.exception("could not handle a message from worker %d", worker.number)
            worker.kill("the service could not handle a message from the worker (see the log)")
        reason = await process.wait()
        return worker.killed_for or worker.last_error or reason

    async def _take(self, worker: WorkerHandle, message: dict[str, Any], body: bytes) -> None:
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
        await self._on_frame(worker, message, body)

    async def _watch(self) -> None:
        """Check all workers every few seconds. This coroutine never returns."""
        last = trimmed = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            passed = min(now - last, 2 * _LOOK_SECONDS)  # if this process was paused, ignore the pause
            last = now
            await asyncio.gather(*(self._look(worker, passed) for worker in self.workers))
            if now - trimmed > _TRIM_SECONDS:
                trimmed = now
                await to_thread.run_sync(return_freed_memory)

    async def _look(self, worker: WorkerHandle, passed: float) -> None:
        if worker.process is None:
            worker.memory_bytes = 0
            return
        worker.ask(passed, _LATE_SECONDS)
        allowed = _SILENCE_SECONDS if worker.answered else _START_SECONDS
        doing, seconds = worker.doing or ("", 0.0)
        if worker.silent_seconds > allowed:
            worker.kill(f"the worker did not answer for {worker.silent_seconds:.0f} seconds")
        elif doing == "pass" and seconds > _LONG_PASS_SECONDS and seconds % _LONG_PASS_SECONDS < 2 * _LOOK_SECONDS:
            logger.warning(
                "worker %d has been computing one forward pass for %.0f seconds and may be hanging", worker.number, seconds
            )
        worker.memory_bytes = worker.process.memory()
        if self._max_worker_bytes is not None and worker.memory_bytes > self._max_worker_bytes:
            worker.kill(f"the worker used {worker.memory_bytes:,} bytes of memory, more than max_worker_bytes allows")


def own_memory() -> int:
    """Return the resident memory of this process in bytes."""
    return memory_of(os.getpid(), with_children=False)
