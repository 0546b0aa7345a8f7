"""Misses scored by several workers: units given to them as they get on, lost workers replaced, their units given again.

Knows workers' lives. Does not know where a worker is, or where misses come from. Made by the command line and by a service's
job; every call comes from one thread, the run's, and returns as soon as there is room for more misses.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from reflogp.scoring.errors import EngineError, WorkerGoneError
from reflogp.scoring.runs.commits import COMMIT_SEQUENCES
from reflogp.scoring.runs.local import LocalScorer
from reflogp.scoring.runs.pending import Miss, OutcomeCallbacks, Work
from reflogp.scoring.runs.spread.unit import encode
from reflogp.scoring.runs.spread.unit_queue import LEAST, Unit, UnitQueue, unit_size
from reflogp.scoring.runs.spread.units import IN_FLIGHT, are_stored
from reflogp.store import LogprobTable, ReflogpError, UsageError

#: Workers that die one after the other before any is ready, after which no further one is begun.
_FAILED_STARTS = 3
#: Losses of devices, and sequences that killed two workers each, one after the other and nothing scored in between, after
#: which it is not the rows that are to blame.
_LOSSES, _KILLERS = 3, 3
#: Seconds between two looks, and where an engine of this process computes too.
_LOOK_SECONDS, _LOOK_BESIDE_SECONDS = 1.0, 0.02
_PEAK_SECONDS = 60.0
#: Seconds that workers have to commit what they have computed.
_LAST_SECONDS = 30.0
#: Weight of the newest unit in the rate that sizes the next ones.
_NEWEST = 0.3


class Worker(Protocol):
    """An engine elsewhere. Its futures raise what it raises, and WorkerGoneError when it is gone."""

    def place(self) -> Future[str]:
        """Where it is, in words, once that is settled."""

    def prepare(self) -> Future[dict[str, Any]]:
        """As ScoringWorker.prepare."""

    def score(self, content: bytes, again: bool) -> Future[dict[str, Any]]:
        """As Units.score."""

    def peak(self) -> Future[float | None]:
        """As Engine.peak_flops_per_second."""

    def stop(self) -> Future[None]:
        """As Units.stop."""

    def end(self) -> None:
        """End it at once; what it has not committed is lost."""


class Workers(Protocol):
    """Where workers come from.

    Attributes:
        count: that there shall be, or are.
        may_come: there are some, or may be later.
    """

    count: int
    may_come: bool

    def open(self, table: LogprobTable) -> None:
        """Told once, before anything else, where values go."""

    def begin(self, have: int) -> list[Worker]:
        """Further ones, where there are so many."""

    def look(self, is_any_placed: bool) -> None:
        """Called now and then. Raises EngineError where none can be had."""


@dataclass(eq=False)
class _Member:
    """A worker, and what it was asked: its place, then to prepare, then units."""

    worker: Worker
    asked: Future[Any]
    name: str = ""
    is_ready: bool = False
    ready_at: float = 0.0
    flying: deque[tuple[Unit, Future[Any]]] = field(default_factory=deque)

    def awaited(self) -> Future[Any] | None:
        """What it answers next; None where it was asked nothing."""
        if self.is_ready:
            return self.flying[0][1] if self.flying else None
        return self.asked


class ParallelScorer:
    """A Scorer on several workers.

    Args:
        workers: where they come from.
        own: an engine of this process, which computes beside them; without it there is always at least one worker.
        check: called now and then; raises to stop.
        commit_sequences: of a unit at the most.
    """

    def __init__(
        self,
        workers: Workers,
        own: LocalScorer | None = None,
        check: Callable[[], None] = lambda: None,
        commit_sequences: int = COMMIT_SEQUENCES,
    ) -> None:
        self._source = workers
        self._own = own
        self._check = check
        self._commit_sequences = commit_sequences
        self._table: LogprobTable
        self._members: list[_Member] = []
        self._queue = UnitQueue()
        self._to_come = 0
        self._per_second: float | None = None
        self._killers: dict[bytes, str] = {}
        self._failed_starts = self._losses = self._killers_in_a_row = 0
        self._last_reason = ""
        self._alone = False  # helpers fail at whatever they get
        self._own_done = 0
        self._given_own = 0
        self._began = self._ended = 0.0
        self._present = 0.0  # seconds of workers that are gone
        self._busy_since: float | None = None
        self._work = Work()

    @property
    def batch(self) -> int:
        """As Scorer.batch: a lone engine takes large groups, of which it makes full passes."""
        return 1 if self._own is None or self._source.may_come else self._own.batch

    def open(self, table: LogprobTable) -> None:
        """As Scorer.open."""
        self._table = table
        self._source.open(table)
        if self._own is not None:
            self._own.open(table)

    def is_starved(self) -> bool:
        """As Scorer.is_starved."""
        if self._own is not None and not self._source.may_come:
            return self._own.is_starved()
        return len(self._queue) < self._unit_size() * self._engines()

    def score(self, misses: list[Miss], to_come: int, callbacks: OutcomeCallbacks) -> None:
        """As Scorer.score; returns when less is in line than the workers take next."""
        fresh = [miss for miss in misses if miss.key not in self._killers]
        for miss in misses:
            if miss.key in self._killers:
                callbacks.failed(miss, self._killers[miss.key])
        self._to_come = to_come
        if self._own is not None and not self._source.may_come:
            if fresh:
                self._own.score(fresh, to_come, callbacks)
            return
        self._queue.put(fresh)
        self.tell(callbacks)
        self._advance(callbacks, self.is_starved)

    def tell(self, callbacks: OutcomeCallbacks) -> None:
        """As Scorer.tell; workers are given what they may have."""
        if self._queue or self._members or self._own is not None:
            self._turn(callbacks, 0.0)

    def finish(self, callbacks: OutcomeCallbacks) -> None:
        """As Scorer.finish."""
        self._to_come = 0
        self._advance(callbacks, lambda: not self._queue and not any(member.flying for member in self._members))
        if self._own is not None:
            self._own.finish(callbacks)
            self._note_own(self._own)

    def stop(self) -> None:
        """As Scorer.stop. Workers that do not end in time are not waited for."""
        asked = [member.worker.stop() for member in self._members if member.is_ready]
        if self._own is not None:
            self._own.stop()
        wait(asked, timeout=_LAST_SECONDS)

    def work(self) -> Work:
        """As Scorer.work. Workers come and go: the peak is that of as many as there were on average."""
        ready = [member for member in self._members if member.is_ready]
        done, _ = wait([member.worker.peak() for member in ready], timeout=_PEAK_SECONDS)
        peaks = [future.result() for future in done if future.exception() is None]
        own = Work() if self._own is None else self._own.work()
        if not self._work.workers:  # nobody else was ever there
            return own
        present = self._present + sum(self._presence(member) for member in ready)
        if own.seconds > 0:
            peaks.append(own.peak)
            present += self._ended - self._began
        known = [peak for peak in peaks if peak is not None]
        average = present / max(self._ended - self._began, 1e-6)
        return Work(
            self._work.seconds,
            self._work.operations + own.operations,
            average * sum(known) / len(known) if known and len(known) == len(peaks) else None,
            own.provenance or self._work.provenance,
            self._work.workers,
        )

    def close(self) -> None:
        """End all workers; what they have not committed is lost."""
        for member in self._members:
            member.worker.end()
        self._members = []
        if self._own is not None:
            self._own.close()

    def _engines(self) -> int:
        """Engines that share what is left, about."""
        return max(1, self._source.count + (self._own is not None))

    def _advance(self, callbacks: OutcomeCallbacks, enough: Callable[[], bool]) -> None:
        """Give and take until it is enough."""
        while not enough():
            self._check()
            self._turn(callbacks, _LOOK_SECONDS if self._own is None else _LOOK_BESIDE_SECONDS)

    def _turn(self, callbacks: OutcomeCallbacks, patience: float) -> None:
        """Give what may be given, and take what arrives within so many seconds."""
        self._keep_up_workers()
        self._give(callbacks)
        if self._own is not None:
            self._own.tell(callbacks)
            self._note_own(self._own)
        awaited = {future: member for member in self._members if (future := member.awaited()) is not None}
        if awaited:
            for future in wait(awaited, patience, FIRST_COMPLETED).done:
                self._arrived(awaited[future], future, callbacks)
        elif patience:
            time.sleep(_LOOK_BESIDE_SECONDS)
        self._source.look(any(member.name for member in self._members))

    def _keep_up_workers(self) -> None:
        if self._failed_starts < _FAILED_STARTS:
            self._members += [_Member(worker, worker.place()) for worker in self._source.begin(len(self._members))]
        if not self._members and self._own is None:
            died = f"{self._failed_starts} workers died one after the other before they were ready"
            raise EngineError(f"{died}; the last one: {self._last_reason}")

    def _note_own(self, own: LocalScorer) -> None:
        """What the own engine has done since the last turn."""
        if own.done == self._own_done:
            return
        self._own_done = own.done
        self._losses = self._killers_in_a_row = 0
        if own.scored >= LEAST and own.seconds > 0 and not self._members:
            self._per_second = own.scored / own.seconds
        self._note_idle()

    def _give(self, callbacks: OutcomeCallbacks) -> None:
        """Give every engine what it may have, in turn, so that the last units are spread."""
        for count in range(IN_FLIGHT):
            for member in [] if self._alone else self._members:
                if member.is_ready and len(member.flying) == count and self._may_have_more(member):
                    unit = self._queue.take(self._unit_size())
                    if unit is None:
                        return
                    self._note_busy()
                    member.flying.append((unit, member.worker.score(encode(unit.misses), unit.again)))
            if count == 0:
                self._give_own(callbacks)

    def _give_own(self, callbacks: OutcomeCallbacks) -> None:
        """What may kill an engine is a worker's, where there is one: with this process the whole run would end."""
        if self._own is None or not self._own.is_starved():
            return
        unit = self._queue.take(self._unit_size(), suspects=self._alone or not self._members)
        if unit is None:
            return
        misses = self._not_stored(unit, callbacks) if unit.again else unit.misses
        if misses:
            self._note_busy()
            self._given_own += len(misses)
            self._own.score(misses, self._to_come, callbacks)

    def _not_stored(self, unit: Unit, callbacks: OutcomeCallbacks) -> list[Miss]:
        """What a worker that is gone has not committed; the rest is told."""
        now = self._table.snapshot()
        keys = pa.array([miss.key for miss in unit.misses], pa.binary())
        stored = are_stored(now, keys, [miss.sequence for miss in unit.misses])
        done = [miss for miss, there in zip(unit.misses, stored, strict=True) if there]
        for miss in done:
            callbacks.scored(miss)
        if done:
            callbacks.committed(done, now.number)
        return [miss for miss, there in zip(unit.misses, stored, strict=True) if not there]

    def _may_have_more(self, member: _Member) -> bool:
        """Whether a unit may be given beside those that a worker has. One that a worker died at is alone."""
        return not member.flying or not (member.flying[0][0].suspect or self._queue.is_suspect())

    def _arrived(self, member: _Member, future: Future[Any], callbacks: OutcomeCallbacks) -> None:
        try:
            answer = future.result()
        except WorkerGoneError as error:
            self._gone(member, str(error), error.blamed, callbacks)
        except Exception as error:
            is_first = not member.is_ready and not self._work.workers
            if is_first or not isinstance(error, EngineError):
                raise _named(member.name or "the place it was given", error) from error
            self._losses += member.is_ready  # the device may be in no state to go on
            self._gone(member, str(error), True, callbacks)
            if self._losses >= _LOSSES:
                self._give_up(f"{self._losses} workers in a row were lost; the last one: {error}")
        else:
            if member.is_ready:
                self._landed(member, answer, callbacks)
            elif not member.name:
                member.name = answer
                member.asked = member.worker.prepare()
            else:
                member.is_ready, member.ready_at, self._failed_starts = True, time.monotonic(), 0
                self._work.provenance = self._work.provenance or answer
                at_work = sum(member.is_ready for member in self._members) + (self._own is not None)
                self._work.workers = max(self._work.workers, at_work)

    def _landed(self, member: _Member, answer: dict[str, Any], callbacks: OutcomeCallbacks) -> None:
        unit, _ = member.flying.popleft()
        self._losses = self._killers_in_a_row = 0
        self._note_idle()
        self._work.operations += answer["operations"]
        if not unit.again:  # of such a unit some was stored
            rate = len(unit.misses) / max(answer["seconds"], 1e-3)
            self._per_second = rate if self._per_second is None else self._per_second + _NEWEST * (rate - self._per_second)
        problems = answer["problems"]
        good = [miss for index, miss in enumerate(unit.misses) if index not in problems]
        for miss in good:
            callbacks.scored(miss)
        if answer["snapshot"] is not None:
            callbacks.committed(good, answer["snapshot"])
        for index, problem in problems.items():
            callbacks.failed(unit.misses[index], problem)

    def _gone(self, member: _Member, reason: str, blamed: bool, callbacks: OutcomeCallbacks) -> None:
        """A worker is gone: any of the units that it had may be the reason, unless it was called away."""
        self._present += self._presence(member)
        self._members.remove(member)
        member.worker.end()
        if blamed:
            where = f"a worker on {member.name}" if member.name else "a worker"
            warnings.warn(f"{where} was lost: {reason}", stacklevel=2)
            self._last_reason = reason
            self._failed_starts += not member.is_ready
        units = [unit for unit, _ in member.flying]
        member.flying.clear()
        self._note_idle()
        for unit in reversed(units):
            if not blamed:
                self._queue.put_back(unit)
            elif (killer := self._queue.died_at(unit)) is not None:
                self._found_killer(killer, reason, callbacks)

    def _found_killer(self, miss: Miss, reason: str, callbacks: OutcomeCallbacks) -> None:
        self._killers[miss.key] = f"it killed its worker twice ({reason})"
        callbacks.failed(miss, self._killers[miss.key])
        self._killers_in_a_row += 1
        if self._killers_in_a_row >= _KILLERS:
            self._give_up(
                f"{self._killers_in_a_row} sequences in a row killed two workers each, so it is the model or the device and "
                f"not the rows: {reason}"
            )

    def _give_up(self, why: str) -> None:
        """No unit is given to workers any more: the own engine goes on alone, where there is one."""
        if self._own is None:
            raise EngineError(why)
        warnings.warn(f"{why}; the job goes on without help", stacklevel=2)
        self._alone = True

    def _note_busy(self) -> None:
        """Something is computed from now on."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()
            self._began = self._began or self._busy_since

    def _note_idle(self) -> None:
        """Count the time in which something was computed."""
        self._ended = time.monotonic()
        is_busy = self._own_done < self._given_own or any(member.flying for member in self._members)
        if self._busy_since is not None and not is_busy:
            self._work.seconds += self._ended - self._busy_since
            self._busy_since = None

    def _presence(self, member: _Member) -> float:
        """Seconds between the first unit and the last in which a worker was ready."""
        return max(0.0, self._ended - max(member.ready_at, self._began)) if member.is_ready else 0.0

    def _unit_size(self) -> int:
        return unit_size(len(self._queue) + self._to_come, self._engines(), self._per_second, self._commit_sequences)


def _named(place: str, error: Exception) -> ReflogpError:
    """What a worker raised, with its place."""
    kind = UsageError if isinstance(error, UsageError) else EngineError
    said = str(error) if isinstance(error, ReflogpError) else f"{type(error).__name__}: {error}"
    return kind(f"on {place}: {said}")


def settled(value: Any) -> Future[Any]:
    """A future that has its result, for a Worker."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def settle(future: Future[Any], value: Any, error: BaseException | None) -> None:
    """Give a future its end, where it has none yet."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
