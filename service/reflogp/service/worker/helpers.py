"""Spread a job over idle workers: the side of the job's worker, and the side of a worker that helps.

Frames between a job's worker and its helpers go through the service, which reports when helpers join and leave. Each job has
its own Helpers object, an implementation of `spread.scorer.Workers`. A helper receives units in the job thread of its worker,
scores them on its engine between online requests, and commits them.
"""

from __future__ import annotations

import itertools
import queue
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from reflogp.scoring.errors import WorkerGoneError
from reflogp.scoring.runs.spread.scorer import Worker, settle, settled
from reflogp.scoring.runs.spread.units import IN_FLIGHT, UnitScorer, VisionCache
from reflogp.scoring.torch_engine.sequences import Operations
from reflogp.service.worker.engine_loop import EngineLoop
from reflogp.service.worker.job_engine import JobEngine
from reflogp.service.worker.protocol import HelpOrder
from reflogp.store import LogprobTable


class Helpers:
    """Helpers that join and leave. The thread that reads frames calls `take`; the job's thread sends requests.

    Args:
        job: id of the job.
        send: sends a frame to the service.
        may_come: True if the service has other workers.

    Attributes:
        count, may_come: see Workers.
    """

    def __init__(self, job: str, send: Callable[[dict[str, Any], bytes], None], may_come: bool) -> None:
        self.count, self.may_come = 0, may_come
        self.job = job
        self._send = send
        self._run = uuid.uuid4().hex  # a job may begin twice in one process, and answers to its first run may arrive late
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._joined: list[Worker] = []
        self._asked: dict[int, tuple[int, Future[Any]]] = {}  # request number -> (worker number, its answer)
        self._here: dict[int, _Helper] = {}

    def open(self, table: LogprobTable) -> None:
        """See Workers.open. Each helper opens the table itself. The next `begin` returns helpers of an earlier attempt."""
        with self._lock:
            self._joined = list(self._here.values())

    def begin(self, have: int) -> list[Worker]:
        """See Workers.begin; returns the helpers that joined since the last call."""
        with self._lock:
            joined, self._joined = self._joined, []
        return joined

    def look(self, is_any_placed: bool) -> None:
        """See Workers.look. Does nothing: a job needs no helpers, because its own worker computes too."""

    def take(self, message: dict[str, Any]) -> None:
        """Handle a frame about a helper. Frames of other jobs, which have ended, are ignored."""
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
        """Ask a helper to call a method of its UnitScorer; return the future result."""
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
    """A helping worker, from the time it joins until it leaves; implements `spread.scorer.Worker`."""

    def __init__(self, helpers: Helpers, number: int, provenance: dict[str, Any]) -> None:
        self._helpers = helpers
        self.number = number
        self._provenance = provenance

    def place(self) -> Future[str]:
        """See Worker.place."""
        return settled(f"worker {self.number}")

    def prepare(self) -> Future[dict[str, Any]]:
        """See Worker.prepare. Done at once: a worker joins after its engine was loaded."""
        return settled(self._provenance)

    def score(self, content: bytes, again: bool) -> Future[dict[str, Any]]:
        """See Worker.score."""
        return self._helpers.ask(self, "score", again, content)

    def peak(self) -> Future[float | None]:
        """See Worker.peak."""
        return self._helpers.ask(self, "peak")

    def stop(self) -> Future[None]:
        """See Worker.stop. Does nothing: the service dismisses helpers when a job ends."""
        return settled(None)

    def end(self) -> None:
        """See Worker.end. Does nothing: the process belongs to the service."""


def encoded(value: Any) -> Any:
    """Return a result of UnitScorer in a form that JSON can represent."""
    if not isinstance(value, dict):
        return value
    operations = value["operations"]
    return {**value, "operations": [operations.plain, operations.computed], "problems": list(value["problems"].items())}


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {**value, "operations": Operations(*value["operations"]), "problems": dict(value["problems"])}


_LOOK_SECONDS = 0.1

#: A frame of the job's worker, and the unit that it carries.
Asked = tuple[dict[str, Any], bytes]


def help_with(
    order: HelpOrder,
    table: LogprobTable,
    loop: EngineLoop,
    asked: queue.SimpleQueue[Asked],
    send: Callable[[dict[str, Any]], None],
    check: Callable[[], None],
    vision: VisionCache,
) -> None:
    """Help until `check` raises. Values computed by then are committed; the rest is left to the job's worker.

    Args:
        asked: requests of the job's worker.
        send: sends the frame `helping` when the engine is loaded, and the answers.
        check: called repeatedly; raises to stop.
        vision: the image processors of the model.

    Raises the errors of `check`, of the engine and of the store.
    """
    loaded = loop.engine(order.reference_id, check)
    units = UnitScorer(JobEngine(loop, loaded, order.reference_id, (), order.poison, lambda _: None, check), table, vision)
    failed: list[BaseException] = []

    def answer(message: dict[str, Any], content: bytes) -> None:
        try:
            value = units.score(content, message["again"]) if message["method"] == "score" else units.peak()
        except BaseException as error:
            failed.append(error)
            return
        which = {"job": order.job, "run": message["run"], "number": message["number"]}
        send({"op": "answer", **which, "value": encoded(value)})

    send({"op": "helping", "job": order.job, "provenance": units.provenance})
    with ThreadPoolExecutor(IN_FLIGHT + 1) as pool:
        try:
            while True:
                check()
                if units.error is not None:
                    raise units.error
                if failed:  # unanswered units go to other workers once this one has left
                    raise failed[0]
                try:
                    pool.submit(answer, *asked.get(timeout=_LOOK_SECONDS))
                except queue.Empty:
                    continue
        finally:
            units.stop()
