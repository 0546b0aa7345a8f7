"""Score misses on several workers: send units to workers that have room, replace lost workers, and retry their units.

A unit is a group of misses (sequences that the store lacks) that a worker scores and commits together. All methods of
ParallelScorer are called from the run's thread. Its `score` returns as soon as there is room for more misses.
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
from reflogp.scoring.runs.committer import COMMIT_SEQUENCES
from reflogp.scoring.runs.local import LocalScorer
from reflogp.scoring.runs.pending import Miss, OutcomeCallbacks, Work
from reflogp.scoring.runs.spread.unit_queue import LEAST, Rate, Unit, UnitQueue, unit_size
from reflogp.scoring.runs.spread.units import IN_FLIGHT, are_stored, encode
from reflogp.scoring.tracing import record
from reflogp.store import LogprobTable, ReflogpError, UsageError

#: If this many workers in a row die before they are ready, no further worker is started.
_FAILED_STARTS = 3
#: After this many failures in a row, with nothing scored in between, workers get no more units, because the cause is probably
#: the model or the device, not the rows. For _LOSSES, a failure is a ready worker whose engine raised an error. For _KILLERS, a
#: failure is a sequence that killed two workers.
_LOSSES, _KILLERS = 3, 3
#: Maximum number of seconds to wait for a worker's response in each turn of the run's loop. The second number applies if there
#: is an engine in this process, and the first number if there is none.
_LOOK_SECONDS, _LOOK_BESIDE_SECONDS = 1.0, 0.02
#: Number of seconds that `stop` gives workers to commit computed values.
_LAST_SECONDS = 30.0


class Worker(Protocol):
    """An engine in another process.

    The futures that its methods return raise the worker's errors, or WorkerGoneError if the worker no longer exists.
    """

    def place(self) -> Future[str]:
        """Return a description of where the worker runs. The future has a result as soon as the place is known."""

    def prepare(self) -> Future[dict[str, Any]]:
        """Load the engine and return its provenance; see ScoringWorker.prepare."""

    def score(self, content: bytes, again: bool) -> Future[dict[str, Any]]:
        """Score and commit a unit; see UnitScorer.score."""

    def stop(self) -> Future[None]:
        """Start no further pass, and commit the values that are already computed; see UnitScorer.stop."""

    def end(self) -> None:
        """End the worker immediately; values that it has not committed are lost."""


class Workers(Protocol):
    """A source of workers.

    Attributes:
        count: number of workers that the run has, or will have when all are started.
        may_come: True if the run has workers or may get workers later.
    """

    count: int
    may_come: bool

    def open(self, table: LogprobTable) -> None:
        """Set the table to which the workers commit values. This method is called once, before any other method."""

    def begin(self, have: int) -> list[Worker]:
        """Start workers if some are missing, and return the workers that are new since the last call.

        The list may be empty. `have` is the number of workers that already exist. This method is called in each turn of the
        run's loop.
        """

    def look(self, is_any_placed: bool) -> None:
        """Raise EngineError if no worker can be started. This method is called in each turn of the run's loop.

        `is_any_placed` is True if it is already known where at least one worker runs.
        """


@dataclass(eq=False)
class _Member:
    """A worker and its open requests.

    Attributes:
        asked: the future that the worker's `place` returned. As soon as its result has arrived, it is replaced by the future
            that `prepare` returned.
        name: description of where the worker runs; empty until this is known.
        flying: for each unit whose result has not arrived yet, a tuple: the unit, the future of its result, and the time when
            the unit was sent. The oldest unit comes first.
        landed_at: time when the worker's latest result arrived.
    """

    worker: Worker
    asked: Future[Any]
    name: str = ""
    is_ready: bool = False
    flying: deque[tuple[Unit, Future[Any], float]] = field(default_factory=deque)
    landed_at: float = 0.0

    def awaited(self) -> Future[Any] | None:
        """Return the future of the next response, or None if there is no open request."""
        if self.is_ready:
            return self.flying[0][1] if self.flying else None
        return self.asked


class ParallelScorer:
    """A Scorer that distributes misses over several workers.

    Args:
        workers: source of the workers.
        own: scorer with an engine in this process, which scores alongside the workers. If `own` is None, the run needs at least
            one worker.
        check: function that is called in each turn of the run's loop, and that can raise an error to stop the run.
        commit_sequences: maximum number of sequences in a unit.
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
        self._rate = Rate()
        self._own_per_second: float | None = None
        self._killers: dict[bytes, str] = {}
        self._failed_starts = self._losses = self._killers_in_a_row = 0
        self._last_reason = ""
        self._alone = False  # True after too many failures of workers: only this process's engine gets units
        self._own_done = 0
        self._given_own = 0
        self._busy_since: float | None = None
        self._work = Work()

    @property
    def batch(self) -> int:
        """Number of misses to collect before calling `score`: 1, or `own.batch` if only this process's engine can compute."""
        return 1 if self._own is None or self._source.may_come else self._own.batch

    def open(self, table: LogprobTable) -> None:
        """See Scorer.open."""
        self._table = table
        self._source.open(table)
        if self._own is not None:
            self._own.open(table)

    def is_starved(self) -> bool:
        """See Scorer.is_starved."""
        if self._own is not None and not self._source.may_come:
            return self._own.is_starved()
        return len(self._queue) < self._unit_size() * self._engines()

    def score(self, misses: list[Miss], to_come: int, callbacks: OutcomeCallbacks) -> None:
        """See Scorer.score. Returns when the queue contains less than one unit for each engine."""
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
        """Report outcomes without waiting, and send units to workers that have room; see Scorer.tell."""
        if self._queue or self._members or self._own is not None:
            self._turn(callbacks, 0.0)

    def finish(self, callbacks: OutcomeCallbacks) -> None:
        """See Scorer.finish."""
        self._to_come = 0
        self._advance(callbacks, lambda: not self._queue and not any(member.flying for member in self._members))
        if self._own is not None:
            self._own.finish(callbacks)
            self._note_own(self._own)

    def stop(self) -> None:
        """See Scorer.stop. Waits at most 30 seconds for the workers."""
        asked = [member.worker.stop() for member in self._members if member.is_ready]
        if self._own is not None:
            self._own.stop()
        wait(asked, timeout=_LAST_SECONDS)

    def work(self) -> Work:
        """See Scorer.work."""
        own = Work() if self._own is None else self._own.work()
        if not self._work.workers:  # no worker was ever ready
            return own
        return Work(
            self._work.seconds,
            self._work.token_counts + own.token_counts,
            own.provenance or self._work.provenance,
            self._work.workers,
        )

    def close(self) -> None:
        """End all workers; values that they have not committed are lost."""
        for member in self._members:
            member.worker.end()
        self._members = []
        if self._own is not None:
            self._own.close()

    def _engines(self) -> int:
        """Return the approximate number of engines that share the remaining sequences."""
        return max(1, self._source.count + (self._own is not None))

    def _advance(self, callbacks: OutcomeCallbacks, enough: Callable[[], bool]) -> None:
        """Send units and take results until `enough` returns True."""
        while not enough():
            self._check()
            self._turn(callbacks, _LOOK_SECONDS if self._own is None else _LOOK_BESIDE_SECONDS)

    def _turn(self, callbacks: OutcomeCallbacks, patience: float) -> None:
        """Send units to engines that have room, and take workers' results; wait at most `patience` seconds for a result."""
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
            died = f"{self._failed_starts} workers in a row were lost before they were ready"
            raise EngineError(f"{died}; the last one: {self._last_reason}")

    def _note_own(self, own: LocalScorer) -> None:
        """Record the progress of this process's engine since the last turn."""
        if own.done == self._own_done:
            return
        self._own_done = own.done
        self._losses = self._killers_in_a_row = 0
        if own.scored >= LEAST and own.seconds > 0 and not self._members:
            self._own_per_second = own.scored / own.seconds
        self._note_idle()

    def _give(self, callbacks: OutcomeCallbacks) -> None:
        """Send units to engines that have room, one unit to each engine in turn, so that the last units are spread evenly."""
        for count in range(IN_FLIGHT):
            for member in [] if self._alone else self._members:
                if member.is_ready and len(member.flying) == count and self._may_have_more(member):
                    unit = self._queue.take(self._unit_size())
                    if unit is None:
                        return
                    content, problems = encode(unit.misses)
                    for miss, problem in problems.items():
                        callbacks.failed(miss, problem)
                    unit.misses = [miss for miss in unit.misses if miss not in problems]
                    if unit.misses:
                        self._note_busy()
                        member.flying.append((unit, member.worker.score(content, unit.again), time.monotonic()))
            if count == 0:
                self._give_own(callbacks)

    def _give_own(self, callbacks: OutcomeCallbacks) -> None:
        """Give this process's engine a unit if it is starved.

        As long as the run uses workers, suspect units (see Unit) are sent only to workers, because a sequence that kills this
        process would stop the whole run.
        """
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
        """From a lost worker's unit, return the misses that the store lacks; report the others as scored and committed."""
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
        """Return True if a worker may get another unit now.

        A suspect unit (see Unit) is sent only to an idle worker, and that worker gets no other unit until it has scored the
        suspect unit.
        """
        return not member.flying or not (member.flying[0][0].suspect or self._queue.is_suspect())

    def _arrived(self, member: _Member, future: Future[Any], callbacks: OutcomeCallbacks) -> None:
        try:
            answer = future.result()
        except WorkerGoneError as error:
            self._gone(member, str(error), error.blamed, callbacks)
        except Exception as error:
            is_first = not member.is_ready and not self._work.workers
            if is_first or not isinstance(error, EngineError):
                raise _named(member.name or "a new worker", error) from error
            self._losses += member.is_ready  # the device may be unusable now
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
                member.is_ready, self._failed_starts = True, 0
                self._work.provenance = self._work.provenance or answer
                at_work = sum(member.is_ready for member in self._members) + (self._own is not None)
                self._work.workers = max(self._work.workers, at_work)

    def _landed(self, member: _Member, answer: dict[str, Any], callbacks: OutcomeCallbacks) -> None:
        unit, _, sent_at = member.flying.popleft()
        self._losses = self._killers_in_a_row = 0
        self._note_idle()
        self._work.token_counts += answer["token_counts"]
        now = time.monotonic()
        tokens = sum(len(miss.sequence) for miss in unit.misses)
        where = {"worker": member.name, "snapshot": answer["snapshot"]}
        record("score and commit", now - sent_at, sequences=len(unit.misses), tokens=tokens, **where)
        if not unit.again:  # part of a retried unit may have been stored already
            self._rate.add(len(unit.misses), now - max(sent_at, member.landed_at))
        member.landed_at = now
        problems = answer["problems"]
        good = [miss for index, miss in enumerate(unit.misses) if index not in problems]
        for miss in good:
            callbacks.scored(miss)
        if answer["snapshot"] is not None:
            callbacks.committed(good, answer["snapshot"])
        for index, problem in problems.items():
            callbacks.failed(unit.misses[index], problem)

    def _gone(self, member: _Member, reason: str, blamed: bool, callbacks: OutcomeCallbacks) -> None:
        """Remove a lost worker and queue its units again; `blamed` is True if one of these units may have caused the loss."""
        self._members.remove(member)
        member.worker.end()
        if blamed:
            where = f"a worker on {member.name}" if member.name else "a worker"
            warnings.warn(f"{where} was lost: {reason}", stacklevel=2)
            self._last_reason = reason
            self._failed_starts += not member.is_ready
        units = [unit for unit, _, _ in member.flying]
        member.flying.clear()
        self._note_idle()
        for unit in reversed(units):
            if not blamed:
                self._queue.put_back(unit)
            elif (killer := self._queue.died_at(unit)) is not None:
                self._found_killer(killer, reason, callbacks)

    def _found_killer(self, miss: Miss, reason: str, callbacks: OutcomeCallbacks) -> None:
        self._killers[miss.key] = f"the sequence killed two workers ({reason})"
        callbacks.failed(miss, self._killers[miss.key])
        self._killers_in_a_row += 1
        if self._killers_in_a_row >= _KILLERS:
            self._give_up(
                f"{self._killers_in_a_row} sequences in a row killed two workers each, so the cause is probably the model "
                f"or the device, not the rows: {reason}"
            )

    def _give_up(self, why: str) -> None:
        """Send no more units to workers and continue with this process's engine; raise EngineError if there is none."""
        if self._own is None:
            raise EngineError(why)
        warnings.warn(f"{why}; the run continues with this process's engine only", stacklevel=2)
        self._alone = True

    def _note_busy(self) -> None:
        """Record that an engine is busy. If no engine was busy before, a busy period begins."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def _note_idle(self) -> None:
        """Record that results have arrived. If no engine is busy now, add the busy period to the scoring seconds."""
        is_busy = self._own_done < self._given_own or any(member.flying for member in self._members)
        if self._busy_since is not None and not is_busy:
            self._work.seconds += time.monotonic() - self._busy_since
            self._busy_since = None

    def _unit_size(self) -> int:
        per_second = self._rate.per_second() or self._own_per_second
        return unit_size(len(self._queue) + self._to_come, self._engines(), per_second, self._commit_sequences)


def _named(place: str, error: Exception) -> ReflogpError:
    """Convert a worker's error to a UsageError or EngineError whose message says where the worker runs."""
    kind = UsageError if isinstance(error, UsageError) else EngineError
    said = str(error) if isinstance(error, ReflogpError) else f"{type(error).__name__}: {error}"
    return kind(f"on {place}: {said}")


def settled(value: Any) -> Future[Any]:
    """Return a future that already has its result."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def settle(future: Future[Any], value: Any, error: BaseException | None) -> None:
    """Set a future's result or error. If the future already has a result or an error, do nothing."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
