"""The workers that score a job's sequences, as the job's runner sees them.

The service lends workers to the runner and takes them back while the job runs. If a worker's process ends, the service says
why, and whether the job may be the cause; until then, the runner does not know.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from reflogp.scoring.errors import EngineError, WorkerGoneError
from reflogp.scoring.runs.calls import CalledWorker
from reflogp.scoring.runs.scheduler import Worker, settle
from reflogp.store.top import ValuesTable

#: Seconds between calls of `check` while the runner waits for a worker.
_LOOK_SECONDS = 0.2
#: Maximum number of seconds to wait for the service to say why a worker's process has ended.
_REASON_SECONDS = 60.0


@dataclass(eq=False)
class LentWorkers:
    """The workers that the service lends to the runner; see scheduler.Workers.

    The thread that reads the service's messages calls `lend`, `take_back` and `gone`; the run's thread calls the other methods.
    """

    reference_id: str
    check: Callable[[], None]  # called repeatedly while the run waits for a worker; raises an error to stop the job
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _addresses: dict[int, str] = field(default_factory=dict)  # of the workers that the runner may use
    _connected: dict[int, _LentWorker] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self._addresses)

    def lend(self, number: int, address: str) -> None:
        """Let the run use a worker. A worker whose process has ended is lent again when its next process is ready."""
        with self._changed:
            self._addresses[number] = address
            self._changed.notify_all()

    def take_back(self, number: int) -> None:
        """Let the worker commit what it has computed, and leave it."""
        with self._changed:
            self._addresses.pop(number, None)
            worker = self._connected.get(number)
        if worker is not None:
            worker.release()

    def gone(self, number: int, reason: str, blamed: bool) -> None:
        with self._changed:
            self._addresses.pop(number, None)
            worker = self._connected.get(number)
        if worker is not None:
            settle(worker.reason, WorkerGoneError(reason, blamed), None)

    def open(self, table: ValuesTable) -> None:
        """Does nothing, because each worker opens the table by itself; see Workers.open."""

    def begin(self, have: int, is_any_placed: bool) -> list[Worker]:
        """Connect to the workers that were lent since the last call; wait for one if there is none. See Workers.begin."""
        while True:
            self.check()
            with self._changed:
                new = [number for number in self._addresses if number not in self._connected]
                workers = [worker for number in new if (worker := self._connect(number)) is not None]
                if workers or have:
                    return workers
                self._changed.wait(_LOOK_SECONDS)

    def _connect(self, number: int) -> Worker | None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._addresses[number])
        except OSError:  # its process has just ended; it is lent again when the next one is ready
            connection.close()
            del self._addresses[number]
            return None
        self._connected[number] = worker = _LentWorker(connection, number, self.reference_id, self)
        return worker

    def left(self, worker: _LentWorker) -> None:
        """A worker is no longer used by the run. If it is still lent, `begin` returns it again."""
        with self._changed:
            if self._connected.get(worker.number) is worker:
                del self._connected[worker.number]


class _LentWorker(CalledWorker):
    """A worker of the service, from when the run connects to it until it is taken back or its process ends."""

    def __init__(self, connection: socket.socket, number: int, reference_id: str, lent: LentWorkers) -> None:
        self.number, self.place = number, f"worker {number}"
        self._reference_id = reference_id
        self._lent = lent
        self.reason: Future[WorkerGoneError] = Future()  # why it is of no more use to the run
        super().__init__(connection, self._ended)

    def prepare(self) -> Future[dict[str, Any]]:
        return self._ask("prepare", reference_id=self._reference_id)

    def progress(self) -> None:
        """Returns None: the service itself notices when a worker does not respond."""

    def release(self) -> None:
        """Disconnect when the worker has committed what it has computed. Its open calls raise WorkerGoneError."""
        settle(self.reason, WorkerGoneError("the worker is needed for another job", blamed=False), None)
        self.stop().add_done_callback(lambda _: self.close())

    def end(self) -> None:
        """See Worker.end. The worker's process goes on, because it belongs to the service."""
        settle(self.reason, WorkerGoneError("the run has ended", blamed=False), None)
        self.close()
        self._lent.left(self)

    def _ended(self) -> EngineError:
        try:
            return self.reason.result(_REASON_SECONDS)
        except TimeoutError:
            return WorkerGoneError("its connection was lost", blamed=False)
