"""Schedule misses over workers in other processes or on other machines.

Misses (sequences that the store lacks) wait in a queue. Workers get units: groups of misses that one worker scores and commits
together. If a worker is lost, its units are queued again and halved until the sequence that kills workers is found.

All methods of Scheduler are called from the run's thread.
"""

from __future__ import annotations

import contextlib
import queue
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from reflogp.scoring.errors import EngineError, WorkerGoneError
from reflogp.scoring.runs.pipeline import COMMIT_SEQUENCES, Committed, Event, Failed, Miss, Scored, Work
from reflogp.scoring.runs.unit_queue import Rate, Unit, UnitQueue, unit_size
from reflogp.scoring.runs.units import IN_FLIGHT, encode
from reflogp.scoring.torch_engine.sequences import TokenCounts
from reflogp.scoring.tracing import record
from reflogp.store import ReflogpError, StoreUnavailableError, UsageError
from reflogp.store.texts import shortened_without_secrets
from reflogp.store.top import ValuesTable

#: Seconds between two questions to a worker, and the number of seconds after which a worker that does not respond hangs.
PING_SECONDS, SILENT_SECONDS = 10.0, 300.0
#: When the run's first unit is done, a worker hangs if it scores nothing for STUCK_SECONDS, and for STUCK_STEPS times as long
#: as the slowest step of any worker so far. A step is the loading of the model, or the time between two results.
STUCK_SECONDS, STUCK_STEPS = 1800.0, 20
#: Maximum number of seconds that are counted between two calls of `Clock.tick`, which are at most about one second apart.
_TICK_SECONDS = 5.0


class Clock:
    """The seconds for which the run was running, and the slowest step of its workers.

    Attributes:
        slowest: number of seconds of the slowest step.
        longest: number of tokens of the longest sequence that was scored so far; 0 if nothing has been scored yet.
    """

    def __init__(self) -> None:
        self.now = self.slowest = 0.0
        self.longest = 0
        self._ticked_at = time.monotonic()

    def tick(self) -> None:
        at = time.monotonic()
        self.now += min(at - self._ticked_at, _TICK_SECONDS)
        self._ticked_at = at


class Pulse:
    """Notices that a worker hangs: its process does not respond, or it scores nothing for much too long.

    Slow work is not a hang. A worker may load its model for as long as it needs, and so may the run's first unit, if the
    process responds. Afterwards, the limit follows from the slowest step of the run so far. Only time in which the run itself
    is running counts, because a machine or a terminal may be suspended together with its workers.
    """

    def __init__(self, clock: Clock, ask: Callable[[], Future[int] | None]) -> None:
        self._clock = clock
        self._ask = ask
        self._asked: Future[int] | None = None
        self._asked_at = self._moved_at = self._begun_at = clock.now
        self._scored = 0
        self._is_watched = True

    def note_loaded(self) -> None:
        """Count the time since the worker began as a step."""
        self._clock.slowest = max(self._clock.slowest, self._clock.now - self._begun_at)
        self._moved_at = self._clock.now

    def problem(self, longest: int) -> str | None:
        """Return why the worker hangs, or None. This method never blocks."""
        clock = self._clock
        if self._asked is None:
            if clock.now - self._asked_at >= PING_SECONDS:
                self._asked, self._asked_at = self._ask(), clock.now
                self._is_watched = self._asked is not None
        elif self._asked.done():
            scored = self._scored if self._asked.exception() else self._asked.result()
            if scored != self._scored and longest:
                clock.slowest = max(clock.slowest, clock.now - self._moved_at)
            if scored != self._scored or not longest:
                self._scored, self._moved_at = scored, clock.now
            self._asked = None
        elif clock.now - self._asked_at > SILENT_SECONDS:
            return f"its process has not responded for {clock.now - self._asked_at:.0f} s"
        if not longest or not clock.longest or not self._is_watched:
            return None
        # A pass takes at most the square of the length: attention does, everything else grows with the length.
        steps = STUCK_STEPS * max(1.0, longest / clock.longest) ** 2
        if clock.now - self._moved_at > max(STUCK_SECONDS, steps * clock.slowest):
            return f"it has scored nothing for {(clock.now - self._moved_at) / 60:.0f} min, although its process responds"
        return None


#: If this many workers in a row die before they are ready, no further worker is started.
_FAILED_STARTS = 3
#: After this many failures in a row, with nothing scored in between, the run ends, because the cause is probably the model or
#: the device, not the rows. For _LOSSES, a failure is a ready worker whose engine raised an error. For _KILLERS, a
#: failure is a sequence that killed two workers.
_LOSSES, _KILLERS = 3, 3
#: Maximum number of seconds to wait for news in each turn.
_LOOK_SECONDS = 1.0
#: Number of seconds that `stop` gives workers to commit computed values.
_LAST_SECONDS = 30.0


class Worker(Protocol):
    """An engine in another process.

    The futures that its methods return raise the worker's errors, or WorkerGoneError if the worker no longer exists.
    """

    @property
    def place(self) -> str:
        """A description of where the worker runs; empty while it is not known."""

    def prepare(self) -> Future[dict[str, Any]]:
        """Load the engine and return its provenance; see ScoringWorker.prepare."""

    def score(self, content: bytes, again: bool) -> Future[dict[str, Any]]:
        """Score and commit a unit; see UnitScorer.score."""

    def stop(self) -> Future[None]:
        """Start no further pass, and commit the values that are already computed; see UnitScorer.stop."""

    def progress(self) -> Future[int] | None:
        """Return how many sequences the worker has scored; None if somebody else notices that the worker hangs.

        A worker that returns None is not ended because it scores nothing for long.
        """

    def end(self) -> None:
        """End the worker immediately; values that it has not committed are lost."""


class Workers(Protocol):
    @property
    def count(self) -> int:
        """Number of workers that the run has, or will have when all are started."""

    def open(self, table: ValuesTable) -> None:
        """Set the table to which the workers commit values. This method is called once, before any other method."""

    def begin(self, have: int, is_any_placed: bool) -> list[Worker]:
        """Start workers if some are missing, and return the workers that are new since the last call.

        This method is called in each turn of the run's loop. It may wait for a worker if there is none. Raises EngineError if
        no worker can be started.
        """


@dataclass(eq=False)
class _Member:
    """A worker and its open requests.

    Attributes:
        flying: the units whose results have not arrived, oldest first: a dict from the future of each result to a tuple of the
            unit and the time when it was sent.
    """

    worker: Worker
    pulse: Pulse
    is_ready: bool = False
    flying: dict[Future[Any], tuple[Unit, float]] = field(default_factory=dict)
    landed_at: float = 0.0
    begun_at: float = field(default_factory=time.monotonic)

    def longest(self) -> int:
        return max((len(miss.sequence) for unit, _ in self.flying.values() for miss in unit.misses), default=0)


class Scheduler:
    """Computes and commits the values of misses.

    Args:
        check: function that is called in each turn of the run's loop, and that can raise an error to stop the run.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        check: Callable[[], None] = lambda: None,
        commit_sequences: int = COMMIT_SEQUENCES,
    ) -> None:
        self._source = workers
        self._check = check
        self._unit_sequences = commit_sequences
        self._report: Callable[[Event], None]
        self._news: queue.SimpleQueue[tuple[_Member, Future[Any]]] = queue.SimpleQueue()
        self._members: list[_Member] = []
        self._clock = Clock()
        self._queue = UnitQueue()
        self._to_come = 0
        self._rate = Rate()
        self._failed_starts = self._losses = self._killers_in_a_row = 0
        self._last_reason = ""
        self._at_workers = 0  # number of misses that workers are working on
        self._busy_since = 0.0
        self._work = Work()

    def open(self, table: ValuesTable, report: Callable[[Event], None]) -> None:
        """Set the table for the values, and the function that is called in the run's thread with what becomes of each miss."""
        self._report = report
        self._source.open(table)

    def put(self, misses: list[Miss], to_come: int) -> None:
        self._to_come = to_come
        self._queue.put(misses)
        self._turn(0.0)
        while len(self._queue) >= self._unit_size() * max(1, self._source.count):
            self._turn(_LOOK_SECONDS)

    def look(self) -> None:
        """Report what is known now, without waiting, and send units to workers that have room."""
        self._turn(0.0)

    def finish(self) -> None:
        """Wait until it is reported what became of all misses. Raises the same errors as `put`."""
        self._to_come = 0
        while self._queue or any(member.flying for member in self._members):
            self._turn(_LOOK_SECONDS)

    def stop(self) -> None:
        """Stop scoring, commit the values that are already computed, and report nothing more.

        This method waits at most 30 seconds for the workers.
        """
        stopping = [member.worker.stop() for member in self._members if member.is_ready]
        wait(stopping, timeout=_LAST_SECONDS)

    def close(self) -> None:
        """End all workers; values that they have not committed are lost."""
        for member in self._members:
            member.worker.end()
        self._members = []

    def work(self) -> Work:
        return self._work

    def _unit_size(self) -> int:
        left = len(self._queue) + self._to_come
        return unit_size(left, max(1, self._source.count), self._rate.per_second(), self._unit_sequences)

    def _turn(self, patience: float) -> None:
        """Hand out misses to workers that have room, and report what is known; wait at most `patience` seconds for news."""
        self._check()
        self._keep_up_workers()
        self._give()
        with contextlib.suppress(queue.Empty):
            news = self._news.get(timeout=patience) if patience else self._news.get_nowait()
            while True:
                member, answer = news
                if member in self._members:  # otherwise it was lost, and its units are queued again
                    self._arrived(member, answer)
                news = self._news.get_nowait()
        self._end_hanging_workers()

    def _end_hanging_workers(self) -> None:
        self._clock.tick()
        for member in [member for member in self._members if member.worker.place]:
            if (problem := member.pulse.problem(member.longest())) is not None:
                self._gone(member, problem, True)

    def _keep_up_workers(self) -> None:
        if not (self._queue or self._members):
            return
        if self._failed_starts < _FAILED_STARTS:
            is_any_placed = any(member.worker.place for member in self._members)
            for worker in self._source.begin(len(self._members), is_any_placed):
                self._members.append(member := _Member(worker, Pulse(self._clock, worker.progress)))
                self._follow(member, worker.prepare())
        if not self._members:
            died = f"{self._failed_starts} workers in a row were lost before they were ready"
            what = died if self._failed_starts else "all workers were lost, and none could be started in their place"
            raise EngineError(f"{what}; the last one: {self._last_reason}")

    def _follow(self, member: _Member, answer: Future[Any]) -> None:
        answer.add_done_callback(lambda answered: self._news.put((member, answered)))

    def _give(self) -> None:
        """Send units to workers that have room, one unit to each worker in turn, so that the last units are spread evenly."""
        for count in range(IN_FLIGHT):
            for member in self._members:
                if member.is_ready and len(member.flying) == count and self._may_have_more(member):
                    unit = self._queue.take(self._unit_size())
                    if unit is None:
                        return
                    self._send(member, unit)

    def _send(self, member: _Member, unit: Unit) -> None:
        content, problems = encode(unit.misses)
        for miss, problem in problems.items():
            self._report(Failed(miss, problem))
        unit.misses = [miss for miss in unit.misses if miss not in problems]
        if unit.misses:
            self._note_given(len(unit.misses))
            answer = member.worker.score(content, unit.again)
            member.flying[answer] = (unit, time.monotonic())
            self._follow(member, answer)

    def _may_have_more(self, member: _Member) -> bool:
        """A suspect unit (see Unit) is sent only to an idle worker, and that worker gets no other unit until it has scored the
        suspect unit.
        """
        if not member.flying:
            return True
        oldest, _ = next(iter(member.flying.values()))
        return not (oldest.suspect or self._queue.is_suspect())

    def _arrived(self, member: _Member, answer: Future[Any]) -> None:
        try:
            value = answer.result()
        except WorkerGoneError as error:
            self._gone(member, str(error), error.blamed)
        except Exception as error:
            is_only = not member.is_ready and not self._work.workers and self._members == [member]
            if is_only or not isinstance(error, EngineError):
                raise _named(member.worker.place or "a new worker", error) from error
            self._losses += member.is_ready  # the device may be unusable now
            self._gone(member, str(error), True)
            if self._losses >= _LOSSES:
                raise EngineError(f"{self._losses} workers in a row were lost; the last one: {error}") from error
        else:
            if answer in member.flying:
                self._landed(member, answer, value)
            else:
                member.pulse.note_loaded()
                record("load model", time.monotonic() - member.begun_at, worker=member.worker.place)
                member.is_ready, self._failed_starts = True, 0
                self._work.provenance = self._work.provenance or value
                self._work.workers = max(self._work.workers, sum(member.is_ready for member in self._members))

    def _landed(self, member: _Member, answer: Future[Any], value: dict[str, Any]) -> None:
        unit, sent_at = member.flying.pop(answer)
        self._losses = self._killers_in_a_row = 0
        self._note_returned(len(unit.misses))
        self._work.token_counts += TokenCounts(*value["token_counts"])
        now = time.monotonic()
        tokens = sum(len(miss.sequence) for miss in unit.misses)
        where = {"worker": member.worker.place, "snapshot": value["snapshot"]}
        record("score and commit", now - sent_at, sequences=len(unit.misses), tokens=tokens, **where)
        if not unit.again:  # part of a retried unit may have been stored already
            self._rate.add(len(unit.misses), now - max(sent_at, member.landed_at))
        member.landed_at = now
        self._clock.longest = max(self._clock.longest, *(len(miss.sequence) for miss in unit.misses))
        problems = dict(value["problems"])
        good = [miss for index, miss in enumerate(unit.misses) if index not in problems]
        if value["snapshot"] is not None:
            self._report(Scored(good))
            self._report(Committed(good, value["snapshot"]))
        for index, problem in problems.items():
            self._report(Failed(unit.misses[index], problem))

    def _gone(self, member: _Member, reason: str, blamed: bool) -> None:
        """Remove a lost worker and queue its units again; `blamed` is True if one of these units may have caused the loss."""
        self._members.remove(member)
        member.worker.end()
        if blamed:
            where = f"a worker on {member.worker.place}" if member.worker.place else "a worker"
            warnings.warn(f"{where} was lost: {reason}", stacklevel=2)
            self._last_reason = reason
            self._failed_starts += not member.is_ready
        for unit, sent_at in reversed(member.flying.values()):
            seconds = time.monotonic() - sent_at
            record(
                "score and commit",
                seconds,
                worker=member.worker.place,
                sequences=len(unit.misses),
                error=shortened_without_secrets(reason),
            )
            self._note_returned(len(unit.misses))
            if not blamed:
                self._queue.put_back(unit)
            elif (killer := self._queue.died_at(unit)) is not None:
                self._found_killer(killer, reason)

    def _found_killer(self, miss: Miss, reason: str) -> None:
        self._report(Failed(miss, f"the sequence killed two workers ({reason})"))
        self._killers_in_a_row += 1
        if self._killers_in_a_row >= _KILLERS:
            raise EngineError(
                f"{self._killers_in_a_row} sequences in a row killed two workers each, so the cause is probably the model "
                f"or the device, not the rows: {reason}"
            )

    def _note_given(self, count: int) -> None:
        if not self._at_workers:
            self._busy_since = time.monotonic()
        self._at_workers += count

    def _note_returned(self, count: int) -> None:
        self._at_workers -= count
        if not self._at_workers:
            self._work.seconds += time.monotonic() - self._busy_since


def _named(place: str, error: Exception) -> ReflogpError:
    """Convert a worker's error to an error of the same kind, or to EngineError, whose message says where the worker runs."""
    kind = next((kind for kind in (UsageError, StoreUnavailableError) if isinstance(error, kind)), EngineError)
    said = str(error) if isinstance(error, ReflogpError) else f"{type(error).__name__}: {error}"
    return kind(f"on {place}: {said}")


def settle(future: Future[Any], value: Any, error: BaseException | None) -> None:
    """Set a future's result or error. If the future already has a result or an error, do nothing."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
