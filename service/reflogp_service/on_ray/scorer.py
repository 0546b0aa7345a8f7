"""Misses scored on a Ray cluster: units given to workers as they get on, lost workers replaced, their units given again.

Knows workers' lives. Does not know engines, or where misses come from. Made by the command line; every call comes from one
thread, the run's, and returns as soon as there is room for more misses.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from reflogp_service.commits import COMMIT_SEQUENCES
from reflogp_service.engines import EngineChoice
from reflogp_service.errors import EngineError
from reflogp_service.misses import Miss, Told, Work
from reflogp_service.on_ray.cluster import default_workers, on_workers, raised_on, reason_of, resources_of, what_there_is
from reflogp_service.on_ray.line import Line, Unit, unit_size
from reflogp_service.on_ray.shared import probe
from reflogp_service.on_ray.unit import encode
from reflogp_service.on_ray.worker import ScoringWorker
from reflogp_store import LogprobTable, Reference
from reflogp_store.storage import is_local

#: Units that a worker has at a time: one that it commits, one that it scores, one so that it need not wait for the next.
_IN_FLIGHT = 3
#: Workers that die one after the other before any is ready, after which no further one is begun.
_FAILED_STARTS = 3
#: Seconds without any worker after which that is said, and after which it is given up: nodes that Ray adds need minutes.
_SAID_SECONDS, PLACE_SECONDS = 60.0, 600.0
_LOOK_SECONDS = 1.0
_PEAK_SECONDS = 60.0
#: Weight of the newest unit in the rate that sizes the next ones.
_NEWEST = 0.3


@dataclass(eq=False)
class _Worker:
    """A worker, and what it was asked: where it is, then to prepare, then units."""

    actor: Any
    placing: Any
    node: str = ""
    preparing: Any = None
    probe: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    ready: bool = False
    flying: deque[tuple[Unit, Any]] = field(default_factory=deque)

    def awaited(self) -> Any:
        """What it answers next; None where it was asked nothing."""
        if self.ready:
            return self.flying[0][1] if self.flying else None
        return self.preparing or self.placing


class OnRay:
    """A Scorer on the cluster that this process is connected to (see `cluster.connected`).

    Args:
        model: folder or hub id, as every node finds it.
        revision: of a hub id.
        reference: the model under the numerics that are wanted.
        choice: the engine of each worker.
        workers: None for as many as the cluster has GPUs, or CPUs where it has none.
        commit_sequences: of a unit at the most.
        place_seconds: given up when no worker could be placed for so long.
    """

    batch = 1

    def __init__(
        self,
        model: str,
        revision: str | None,
        reference: Reference,
        choice: EngineChoice,
        workers: int | None = None,
        commit_sequences: int = COMMIT_SEQUENCES,
        place_seconds: float = PLACE_SECONDS,
    ) -> None:
        self._model = str(Path(model).expanduser().absolute()) if Path(model).expanduser().is_dir() else model
        self._revision = revision
        self._reference = reference
        self._choice = on_workers(choice)
        self._wanted = workers or default_workers(self._choice)
        self._commit_sequences = commit_sequences
        self._place_seconds = place_seconds
        self._store = self._table_folder = ""
        self._workers: list[_Worker] = []
        self._line = Line()
        self._to_come = 0
        self._per_second: float | None = None
        self._killers: dict[bytes, str] = {}
        self._failed_starts = 0
        self._last_reason = ""
        self._without_since: float | None = None
        self._said = False
        self._busy_since: float | None = None
        self._work = Work()

    def open(self, table: LogprobTable) -> None:
        """As Scorer.open."""
        self._table_folder = table.uri
        self._store = table.uri.rsplit("/", 2)[0]

    def is_starved(self) -> bool:
        """As Scorer.is_starved."""
        return len(self._line) < self._unit_size() * self._wanted

    def score(self, misses: list[Miss], to_come: int, told: Told) -> None:
        """As Scorer.score; returns when less is in line than the workers take next."""
        fresh = [miss for miss in misses if miss.key not in self._killers]
        for miss in misses:
            if miss.key in self._killers:
                told.failed(miss, self._killers[miss.key])
        self._line.put(fresh)
        self._to_come = to_come
        self.tell(told)
        self._advance(told, self.is_starved)

    def tell(self, told: Told) -> None:
        """As Scorer.tell; workers are given what they may have."""
        if self._line or self._workers:
            self._turn(told, 0.0)

    def finish(self, told: Told) -> None:
        """As Scorer.finish."""
        self._to_come = 0
        self._advance(told, lambda: not self._line and not any(worker.flying for worker in self._workers))

    def stop(self) -> None:
        """As Scorer.stop: workers commit by themselves what they compute."""

    def work(self) -> Work:
        """As Scorer.work; the peak is that of the workers that are there now, all at once as they worked."""
        asked = [worker.actor.peak.remote() for worker in self._workers if worker.ready]
        try:
            peaks = ray.get(asked, timeout=_PEAK_SECONDS)
        except (RayError, GetTimeoutError):
            peaks = []
        self._work.peak = sum(peaks) if peaks and None not in peaks else None
        return self._work

    def close(self) -> None:
        """End all workers; what they have not committed is lost."""
        for worker in self._workers:
            self._end(worker)
        self._workers = []

    def _advance(self, told: Told, enough: Callable[[], bool]) -> None:
        """Give and take until it is enough."""
        while not enough():
            self._turn(told, _LOOK_SECONDS)

    def _turn(self, told: Told, patience: float) -> None:
        """Give what may be given, and take what arrives within so many seconds."""
        self._keep_up_workers()
        self._give()
        awaited = {reference: worker for worker in self._workers if (reference := worker.awaited()) is not None}
        arrived, _ = ray.wait(list(awaited), timeout=patience) if awaited else ([], [])
        for reference in arrived:
            self._arrived(awaited[reference], reference, told)
        self._watch_places()

    def _keep_up_workers(self) -> None:
        while len(self._workers) < self._wanted and self._failed_starts < _FAILED_STARTS:
            actor_class: Any = ray.remote(ScoringWorker)  # ray's types know neither options nor a class's methods
            lives = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": _IN_FLIGHT + 1}
            placed = actor_class.options(**resources_of(self._choice), **lives)
            actor = placed.remote(self._model, self._revision, self._reference.to_json(), asdict(self._choice), self._store)
            self._workers.append(_Worker(actor, actor.place.remote()))
        if not self._workers:
            died = f"{self._failed_starts} workers died one after the other before they were ready"
            raise EngineError(f"{died}; the last one: {self._last_reason}")

    def _give(self) -> None:
        """Give every worker that is ready what it may have, in turn, so that the last units are spread."""
        for count in range(_IN_FLIGHT):
            for worker in self._workers:
                if worker.ready and len(worker.flying) == count and self._line and self._may_have_more(worker):
                    unit = self._line.take(self._unit_size())
                    if self._busy_since is None:
                        self._busy_since = time.monotonic()
                    worker.flying.append((unit, worker.actor.score.remote(encode(unit.misses), unit.again)))

    def _may_have_more(self, worker: _Worker) -> bool:
        """Whether a unit may be given beside those that a worker has. One that a worker died at is alone."""
        return not worker.flying or not (worker.flying[0][0].again or self._line.is_suspect())

    def _arrived(self, worker: _Worker, reference: Any, told: Told) -> None:
        try:
            answer = ray.get(reference)
        except RayTaskError as error:
            if worker.ready and isinstance(error.cause, EngineError):  # its device may be in no state to go on
                self._lost(worker, str(error.cause), told)
                return
            raise raised_on(worker.node or "it was placed on", error) from None
        except RayError as error:
            self._lost(worker, reason_of(error), told)
            return
        if worker.ready:
            self._landed(worker, answer, told)
        elif worker.preparing is None:
            worker.node = answer
            folder = Path(self._table_folder)
            file = worker.probe.enter_context(probe(folder)) if is_local(self._table_folder) else None
            worker.preparing = worker.actor.prepare.remote(file)
        else:
            worker.probe.close()
            worker.ready, self._failed_starts = True, 0
            self._work.provenance = self._work.provenance or answer
            self._work.workers = max(self._work.workers, sum(worker.ready for worker in self._workers))

    def _landed(self, worker: _Worker, answer: dict[str, Any], told: Told) -> None:
        unit, _ = worker.flying.popleft()
        self._note_idle()
        self._work.operations += answer["operations"]
        rate = len(unit.misses) / max(answer["seconds"], 1e-3)
        self._per_second = rate if self._per_second is None else self._per_second + _NEWEST * (rate - self._per_second)
        problems = answer["problems"]
        good = [miss for index, miss in enumerate(unit.misses) if index not in problems]
        for miss in good:
            told.scored(miss)
        if answer["snapshot"] is not None:
            told.committed(good, answer["snapshot"])
        for index, problem in problems.items():
            told.failed(unit.misses[index], problem)

    def _lost(self, worker: _Worker, reason: str, told: Told) -> None:
        """A worker is gone: any of the units that it had may be the reason."""
        self._workers.remove(worker)
        self._end(worker)
        where = f"a worker on {worker.node}" if worker.node else "a worker"
        warnings.warn(f"{where} was lost: {reason}", stacklevel=2)
        self._last_reason = reason
        if not worker.ready:
            self._failed_starts += 1
        units = [unit for unit, _ in worker.flying]
        worker.flying.clear()
        self._note_idle()
        for unit in reversed(units):
            if (killer := self._line.died_at(unit)) is not None:
                self._killers[killer.key] = f"it killed its worker twice ({reason})"
                told.failed(killer, self._killers[killer.key])

    def _end(self, worker: _Worker) -> None:
        worker.probe.close()
        with contextlib.suppress(RayError):
            ray.kill(worker.actor)

    def _note_idle(self) -> None:
        """Count the time in which something was computed."""
        if self._busy_since is not None and not any(worker.flying for worker in self._workers):
            self._work.seconds += time.monotonic() - self._busy_since
            self._busy_since = None

    def _unit_size(self) -> int:
        return unit_size(len(self._line) + self._to_come, self._wanted, self._per_second, self._commit_sequences)

    def _watch_places(self) -> None:
        """Say that no worker has begun, and give up after a while. Those that wait do no harm while others work.

        Ray does not say whether a worker waits for room or for its process to start.
        """
        now = time.monotonic()
        if any(worker.node for worker in self._workers):
            self._without_since = None
            return
        self._without_since = self._without_since or now
        waited = now - self._without_since
        asked = ", ".join(f"{count:g} {name[4:-1].upper()}" for name, count in resources_of(self._choice).items() if count)
        what = f"no worker could begin: each asks for {asked}, and the Ray cluster has {what_there_is()}"
        if waited > self._place_seconds:
            raise EngineError(f"{what}, for {waited:.0f} s now")
        if waited > _SAID_SECONDS and not self._said:
            self._said = True
            warnings.warn(f"{what}; waiting {self._place_seconds:.0f} s for nodes", stacklevel=2)
