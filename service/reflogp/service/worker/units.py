"""Score the units of jobs on this worker's device.

The process that runs a job (its runner) connects to the worker over a Unix socket and sends units; see `scoring.runs.calls`.
The device works for one runner at a time; another runner that has connected waits until the first one has disconnected.
"""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reflogp.scoring.engines import PassEngine
from reflogp.scoring.errors import EngineError, WorkerGoneError
from reflogp.scoring.runs.calls import answer_calls
from reflogp.scoring.runs.units import UnitScorer, VisionCache
from reflogp.scoring.torch_engine import Outcome, Sequence
from reflogp.scoring.torch_engine.sequences import TokenCounts
from reflogp.service.worker.engine_loop import EngineLoop
from reflogp.store.top import ValuesTable

#: Seconds between two checks of whether the device is free for the next runner.
_LOOK_SECONDS = 0.1


@dataclass(eq=False)
class JobEngine:
    """An engine whose forward passes the engine loop computes, between online requests; see `scoring.engines.Engine`.

    `check` is called repeatedly; it raises an error to stop the passes. Only those methods of `engine` are called that run no
    forward pass.
    """

    loop: EngineLoop
    engine: PassEngine
    reference_id: str
    check: Callable[[], None]
    _token_counts: TokenCounts = field(default_factory=TokenCounts)

    def problems(self, sequences: list[Sequence]) -> dict[int, str]:
        return self.engine.problems(sequences)

    def flow(self, groups: Iterable[list[Sequence]]) -> Generator[list[tuple[int, Outcome]]]:
        for landed, token_counts in self.loop.flow(self.reference_id, groups, self.check):
            self._token_counts += token_counts
            yield landed

    def provenance(self) -> dict[str, Any]:
        return self.engine.provenance()

    def token_counts(self) -> TokenCounts:
        """See Engine.token_counts. Only this job's passes are counted."""
        return self._token_counts

    def close(self) -> None:
        """Does nothing, because the engine belongs to the loop."""


class UnitServer(socketserver.ThreadingUnixStreamServer):
    """Accepts the connections of runners, and answers the calls of each in a thread.

    Args:
        address: path of the Unix socket.
        open_table: returns the table for the values of a reference.
        vision: returns the image processors of a reference's model.
        commit_seconds: maximum time in seconds between computing values and committing them.
    """

    daemon_threads = True

    def __init__(
        self,
        address: str,
        loop: EngineLoop,
        open_table: Callable[[str], ValuesTable],
        vision: Callable[[str], VisionCache],
        commit_seconds: float,
    ) -> None:
        self.loop = loop
        self.open_table = open_table
        self.vision = vision
        self.commit_seconds = commit_seconds
        self.turn = threading.Lock()  # held for the runner that the device works for
        self.is_ending = False
        self._connected: set[_Runner] = set()
        Path(address).unlink(missing_ok=True)  # of this worker's last process
        super().__init__(address, socketserver.BaseRequestHandler)

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, name="runners", daemon=True).start()

    def end(self) -> None:
        """Commit the values that are already computed, and score no further units."""
        self.is_ending = True
        for runner in list(self._connected):
            runner.stop()

    def finish_request(self, request: Any, client_address: Any) -> None:
        runner = _Runner(self)
        self._connected.add(runner)
        try:
            answer_calls(request, runner, runner.stop)
        finally:
            runner.give_way()
            self._connected.discard(runner)


class _Runner:
    """The methods that a runner can call; see ScoringWorker."""

    def __init__(self, server: UnitServer) -> None:
        self._server = server
        self._units: UnitScorer | None = None
        self._is_stopped = self._has_turn = False

    def prepare(self, reference_id: str) -> dict[str, Any]:
        """Wait for the device and load the engine. Return the provenance of the values that the engine will compute."""
        while not self._server.turn.acquire(timeout=_LOOK_SECONDS):
            self._check()
        self._has_turn = True
        loop = self._server.loop
        engine = JobEngine(loop, loop.engine(reference_id, self._check), reference_id, self._check)
        table, vision = self._server.open_table(reference_id), self._server.vision(reference_id)
        self._units = UnitScorer(engine, table, vision, self._server.commit_seconds)
        return self._units.provenance

    def score(self, content: bytes, again: bool) -> dict[str, Any]:
        assert self._units is not None, "`prepare` is called before `score`"
        try:
            return self._units.score(content, again)
        except EngineError:
            self._check()  # if the worker was stopped, that is the error
            raise

    def progress(self) -> int:
        return 0 if self._units is None else self._units.scored

    def stop(self) -> None:
        """Start no further pass, and commit the values that are already computed."""
        self._is_stopped = True
        if self._units is not None:
            self._units.stop()

    def give_way(self) -> None:
        """Let the device work for another runner."""
        if self._has_turn:
            self._server.turn.release()

    def _check(self) -> None:
        if self._is_stopped or self._server.is_ending:
            raise WorkerGoneError("the worker was stopped", blamed=False)
