"""Worker processes: started, fed with frames, watched, started again when they end.

Knows processes and frames. Does not know what the frames mean beyond `ready`, `loaded` and `dying`; that is the listeners'.
Everything here runs in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import psutil

from reflogp_service.worker.frames import encode, receive_frame
from reflogp_service.worker.orders import WorkerConfiguration

logger = logging.getLogger(__name__)

#: Seconds before a worker that ended is started again: the first is at once, each further one without success doubles.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0
#: Deaths in a row, before it was ever ready, after which a worker counts as broken.
_BROKEN_AFTER = 3
_MEMORY_SECONDS = 2.0
_END_SECONDS = 25.0


class WorkerHandle:
    """One worker as the service sees it.

    Attributes:
        number: from 0.
        ready: it takes turns; False while it starts.
        loaded: reference ids whose engines are loaded.
        deaths: of its processes so far.
        memory_bytes: resident, at the last look.
        broken: it died several times before it was ready.
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
        self.process: asyncio.subprocess.Process | None = None
        self._backlog: list[bytes] = []

    @property
    def broken(self) -> bool:
        return self.failed_starts >= _BROKEN_AFTER

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Send a frame, or keep it for the next process where there is none now."""
        data = encode(message, body)
        if self.process is None or self.process.stdin is None or self.process.stdin.is_closing():
            self._backlog.append(data)
            return
        self.process.stdin.write(data)

    def kill(self, why: str) -> None:
        """End the process at once; it is started again."""
        self.killed_for = why
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def start(self) -> asyncio.subprocess.Process:
        self.killed_for = ""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "reflogp_service.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        self.process = process
        self.last_error = ""
        assert process.stdin is not None
        process.stdin.write(encode({"op": "configure", "configuration": asdict(self.configuration)}))
        backlog, self._backlog = self._backlog, []
        for data in backlog:
            process.stdin.write(data)
        return process


Frames = Callable[[WorkerHandle, dict[str, Any], bytes], Awaitable[None]]
Deaths = Callable[[WorkerHandle, str], Awaitable[None]]


class Pool:
    """The workers of a service.

    Args:
        configurations: one per worker.
        on_frame: gets every frame, in order per worker.
        on_death: told when a worker's process has ended unasked, and why.
        max_worker_bytes: a worker whose memory is beyond is killed before the system kills another process; None for 9/10 of
            the machine's.
    """

    def __init__(
        self,
        configurations: list[WorkerConfiguration],
        on_frame: Frames,
        on_death: Deaths,
        max_worker_bytes: int | None = None,
    ) -> None:
        self.workers = [WorkerHandle(number, entry) for number, entry in enumerate(configurations)]
        self._on_frame = on_frame
        self._on_death = on_death
        self._max_worker_bytes = max_worker_bytes or psutil.virtual_memory().total * 9 // 10
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all workers."""
        self._tasks = [asyncio.create_task(self._supervise(worker)) for worker in self.workers]
        self._tasks.append(asyncio.create_task(self._watch_memory()))

    async def close(self) -> None:
        """Let every worker commit what it has and end; kill those that do not."""
        self._closing = True
        for worker in self.workers:
            if worker.process is not None:
                worker.send({"op": "exit"})
        watch = self._tasks.pop() if self._tasks else None
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_END_SECONDS)
            for worker in self.workers if late else []:
                worker.kill("it did not end in time")
            if late:
                await asyncio.wait(late, timeout=5)
        for task in [*self._tasks, *([watch] if watch else [])]:
            task.cancel()

    async def _supervise(self, worker: WorkerHandle) -> None:
        while not self._closing:
            process = await worker.start()
            logger.info("worker %d started, pid %d", worker.number, process.pid)
            assert process.stdout is not None
            try:
                while (frame := await receive_frame(process.stdout)) is not None:
                    await self._take(worker, *frame)
            except Exception:  # a defect of ours must not leave the service without a worker
                logger.exception("a frame of worker %d could not be handled", worker.number)
                worker.kill("its frames could not be handled")
            status = await process.wait()
            was_ready, worker.ready, worker.loaded, worker.process = worker.ready, False, [], None
            if self._closing:
                return
            worker.deaths += 1
            worker.failed_starts = 0 if was_ready else worker.failed_starts + 1
            reason = _reason(status, worker)
            logger.warning("worker %d ended: %s", worker.number, reason)
            await self._on_death(worker, reason)
            if worker.failed_starts:
                await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**worker.failed_starts))

    async def _take(self, worker: WorkerHandle, message: dict[str, Any], body: bytes) -> None:
        match message["op"]:
            case "ready":
                worker.ready, worker.failed_starts = True, 0
            case "loaded":
                worker.loaded = message["references"]
            case "dying":
                worker.last_error = message["error"]
        await self._on_frame(worker, message, body)

    async def _watch_memory(self) -> None:
        while True:
            for worker in self.workers:
                worker.memory_bytes = memory_of(worker.process.pid) if worker.process is not None else 0
                if worker.memory_bytes > self._max_worker_bytes:
                    worker.kill(f"it took {worker.memory_bytes:,} bytes of memory, more than max_worker_bytes allows")
            await asyncio.sleep(_MEMORY_SECONDS)


def memory_of(pid: int) -> int:
    """Resident bytes of a process; 0 when it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def own_memory() -> int:
    """Resident bytes of this process."""
    return memory_of(os.getpid())


def _reason(status: int, worker: WorkerHandle) -> str:
    """Why a process ended, in words."""
    if worker.killed_for:
        return worker.killed_for
    if worker.last_error:
        return worker.last_error
    if status < 0:
        name = signal.Signals(-status).name if -status in {int(s) for s in signal.Signals} else str(-status)
        return f"killed by {name}" + (" (out of memory, perhaps)" if -status == signal.SIGKILL else "")
    return f"it ended with status {status}; its last words are in the service's log"
