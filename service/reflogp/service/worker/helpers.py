"""The workers that help with this worker's job: their frames go through the service, which says who comes and goes.

Knows frames. Does not know the pipe. Made for each job; a Workers of `spread.scorer`.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from reflogp.scoring.errors import WorkerGoneError
from reflogp.scoring.runs.spread.scorer import Worker, settle, settled
from reflogp.scoring.torch_engine.operations import Operations
from reflogp.store import LogprobTable


class Helpers:
    """Workers that come and go. The service's thread tells of them, the job's asks them.

    Args:
        job: id.
        send: sends a frame to the service.
        may_come: the service has other workers.

    Attributes:
        count, may_come: as of Workers.
    """

    def __init__(self, job: str, send: Callable[[dict[str, Any], bytes], None], may_come: bool) -> None:
        self.count, self.may_come = 0, may_come
        self.job = job
        self._send = send
        self._run = uuid.uuid4().hex  # a job may begin twice in one process, and answers be late
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._joined: list[Worker] = []
        self._asked: dict[int, tuple[int, Future[Any]]] = {}  # number -> (worker, its answer)
        self._here: dict[int, _Helper] = {}

    def open(self, table: LogprobTable) -> None:
        """As Workers.open: a helper knows the store. Those of an attempt before are there still."""
        with self._lock:
            self._joined = list(self._here.values())

    def begin(self, have: int) -> list[Worker]:
        """As Workers.begin: those that came since the last call."""
        with self._lock:
            joined, self._joined = self._joined, []
        return joined

    def look(self, is_any_placed: bool) -> None:
        """As Workers.look: the job goes on without them."""

    def take(self, message: dict[str, Any]) -> None:
        """A frame of the service about a helper; any other job's is of one that has ended."""
        if message["job"] != self.job:
            return
        match message["op"]:
            case "helper":
                with self._lock:
                    helper = self._here[message["worker"]] = _Helper(self, message["worker"], message["provenance"])
                    self._joined.append(helper)
                    self.count = len(self._here)
            case "answer" if message["run"] == self._run:
                with self._lock:
                    _, answer = self._asked.pop(message["number"], (0, Future()))
                settle(answer, _decoded(message["value"]), None)
            case "gone":
                self._lose(message["worker"], WorkerGoneError(message["reason"], message["blamed"]))

    def ask(self, helper: _Helper, method: str, again: bool = False, content: bytes = b"") -> Future[Any]:
        """A helper's answer to a call of Units."""
        answer: Future[Any] = Future()
        worker = helper.number
        with self._lock:
            if self._here.get(worker) is not helper:
                answer.set_exception(WorkerGoneError("it was gone already", blamed=False))
                return answer
            number = next(self._numbers)
            self._asked[number] = (worker, answer)
        asked = {"to": worker, "run": self._run, "number": number, "method": method, "again": again}
        self._send({"op": "ask", "job": self.job, **asked}, content)
        return answer

    def _lose(self, worker: int, error: WorkerGoneError) -> None:
        with self._lock:
            self._here.pop(worker, None)
            self.count = len(self._here)
            lost = [number for number, (of, _) in self._asked.items() if of == worker]
            answers = [self._asked.pop(number)[1] for number in lost]
        for answer in answers:
            settle(answer, None, error)


class _Helper:
    """One of them, for as long as it helps."""

    def __init__(self, helpers: Helpers, number: int, provenance: dict[str, Any]) -> None:
        self._helpers = helpers
        self.number = number
        self._provenance = provenance

    def place(self) -> Future[str]:
        """As Worker.place."""
        return settled(f"worker {self.number}")

    def prepare(self) -> Future[dict[str, Any]]:
        """As Worker.prepare: it said that it helps when its engine was loaded."""
        return settled(self._provenance)

    def score(self, content: bytes, again: bool) -> Future[dict[str, Any]]:
        """As Worker.score."""
        return self._helpers.ask(self, "score", again, content)

    def peak(self) -> Future[float | None]:
        """As Worker.peak."""
        return self._helpers.ask(self, "peak")

    def stop(self) -> Future[None]:
        """As Worker.stop: the service calls helpers away when a job ends."""
        return settled(None)

    def end(self) -> None:
        """As Worker.end: it is the service's."""


def encoded(value: Any) -> Any:
    """An answer of Units as JSON has it."""
    if not isinstance(value, dict):
        return value
    operations = value["operations"]
    return {**value, "operations": [operations.plain, operations.computed], "problems": list(value["problems"].items())}


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {**value, "operations": Operations(*value["operations"]), "problems": dict(value["problems"])}
