"""Spread a job over idle workers.

The worker that runs the job uses Helpers; each worker that helps calls `help_with`.

The service relays frames between a job's worker and its helpers, and reports when helpers join and leave. Each job has its own
Helpers object, which implements `runs.scheduler.Workers`. A helper receives units of work in its job thread, scores their
sequences between online requests, and commits the values.
"""

from __future__ import annotations

import itertools
import queue
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

from reflogp.scoring.errors import WorkerGoneError
from reflogp.scoring.runs.scheduler import Worker, settle, settled
from reflogp.scoring.runs.units import IN_FLIGHT, UnitScorer, VisionCache
from reflogp.scoring.torch_engine.sequences import TokenCounts
from reflogp.service.worker.engine_loop import EngineLoop
from reflogp.service.worker.job_engine import JobEngine
from reflogp.service.worker.protocol import HelpOrder
from reflogp.store import LogprobTable


class Helpers:
    """The workers that help with a job. They join and leave while the job runs.

    The thread that reads frames calls `take`; the job's thread sends requests to the helpers.

    Args:
        job: id of the job.
        send: sends a frame to the service.
        may_come: True if the service has other workers, which may join as helpers.

    Attributes:
        count: number of workers that are helping with the job.
        may_come: True if other workers may join as helpers.
    """

    def __init__(self, job: str, send: Callable[[dict[str, Any], bytes], None], may_come: bool) -> None:
        self.count, self.may_come = 0, may_come
        self.job = job
        self._send = send
        # id of this run: if a job runs twice in one process, answers to requests of the first run may arrive during the second
        self._run = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._joined: list[Worker] = []
        self._asked: dict[int, tuple[int, Future[Any]]] = {}  # request number -> (worker number, Future of the answer)
        self._here: dict[int, _Helper] = {}

    def open(self, table: LogprobTable) -> None:
        """See Workers.open.

        `table` is not sent to the helpers, because each helper opens the table itself. The next call to `begin` returns
        all current helpers, including those that joined during an earlier attempt at the job.
        """
        with self._lock:
            self._joined = list(self._here.values())

    def begin(self, have: int, is_any_placed: bool) -> list[Worker]:
        """See Workers.begin. Return the helpers that joined since the last call."""
        with self._lock:
            joined, self._joined = self._joined, []
        return joined

    def take(self, message: dict[str, Any]) -> None:
        """Handle a frame about a helper. Ignore frames about other jobs, because those jobs have ended."""
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

    def ask(self, helper: _Helper, content: bytes, again: bool) -> Future[Any]:
        """Ask a helper to score a unit of work (see UnitScorer.score), and return a Future of the result.

        If the helper leaves the job before it has answered, the Future raises WorkerGoneError.
        """
        answer: Future[Any] = Future()
        worker = helper.number
        with self._lock:
            if self._here.get(worker) is not helper:
                answer.set_exception(WorkerGoneError("the helper has already left the job", blamed=False))
                return answer
            number = next(self._numbers)
            self._asked[number] = (worker, answer)
        asked = {"to": worker, "run": self._run, "number": number, "again": again}
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
    """A worker that helps with a job, from when it joins until it leaves. Implements `runs.scheduler.Worker`."""

    def __init__(self, helpers: Helpers, number: int, provenance: dict[str, Any]) -> None:
        self._helpers = helpers
        self.number = number
        self._provenance = provenance

    def place(self) -> Future[str]:
        """See Worker.place."""
        return settled(f"worker {self.number}")

    def prepare(self) -> Future[dict[str, Any]]:
        """See Worker.prepare. The Future completes at once, because a helper joins only after it has loaded its engine."""
        return settled(self._provenance)

    def score(self, content: bytes, again: bool) -> Future[dict[str, Any]]:
        """See Worker.score."""
        return self._helpers.ask(self, content, again)

    def stop(self) -> Future[None]:
        """See Worker.stop. Does nothing, because the service dismisses helpers when a job ends."""
        return settled(None)

    def progress(self) -> None:
        """See Worker.progress. The service itself notices when a worker does not respond."""

    def end(self) -> None:
        """See Worker.end. Does nothing, because the helper's process belongs to the service."""


def encoded(value: dict[str, Any]) -> dict[str, Any]:
    """Convert a UnitScorer result to JSON-compatible values."""
    return {**value, "token_counts": astuple(value["token_counts"]), "problems": list(value["problems"].items())}


def _decoded(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "token_counts": TokenCounts(*value["token_counts"]), "problems": dict(value["problems"])}


_LOOK_SECONDS = 0.1

#: A request from the job's worker: a tuple of the frame's message and the frame's body, which contains a unit of work.
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
    """Help with a job until an error is raised. The function never returns normally.

    It raises the error of `check`, or the first error that the engine, the store or the scoring of a unit of work raises.
    Values computed before the error are committed. The job's worker reassigns the remaining units of work.

    Args:
        asked: queue of requests from the job's worker.
        send: sends a frame to the service. It is called with the frame `helping` once the engine is loaded, and then with an
            `answer` frame for each request.
        check: called repeatedly; raises an error to make this worker stop helping.
        vision: cache of the model's image processors.
    """
    loaded = loop.engine(order.reference_id, check)
    units = UnitScorer(JobEngine(loop, loaded, order.reference_id, (), order.poison, lambda _: None, check), table, vision)
    failed: list[BaseException] = []

    def answer(message: dict[str, Any], content: bytes) -> None:
        try:
            value = units.score(content, message["again"])
        except BaseException as error:
            failed.append(error)
            return
        which = {"job": order.job, "run": message["run"], "number": message["number"]}
        send({"op": "answer", **which, "value": encoded(value)})

    send({"op": "helping", "job": order.job, "provenance": units.provenance})
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        try:
            while True:
                check()
                if units.error is not None:
                    raise units.error
                if failed:  # after this worker leaves, the job's worker reassigns the units without an answer
                    raise failed[0]
                try:
                    pool.submit(answer, *asked.get(timeout=_LOOK_SECONDS))
                except queue.Empty:
                    continue
        finally:
            units.stop()
