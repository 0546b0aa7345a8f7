"""Load and unload the engines of a worker, and share them between online requests and a job.

Online requests are served first. Requests with the same reference and temperature are computed together, in one round, if they
fit into the engine's token budget. After each round, the loop runs one forward pass of the job, if the job has work, so that
neither waits long. While online requests keep arriving, the job's passes are kept short. The thread that calls `preload` and
`run` owns the engines. All other public methods of EngineLoop may be called from any other thread.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from reflogp.scoring.engines import PassEngine
from reflogp.scoring.errors import OutOfMemoryError, WorkerGoneError
from reflogp.scoring.torch_engine import Outcome, Sequence
from reflogp.scoring.torch_engine.sequences import TokenCounts
from reflogp.store import CheckpointError, ReflogpError, UsageError

#: Maximum number of computed passes whose results the job has not read yet.
_AHEAD = 64
#: If the maximum number of engines is loaded, an engine is unloaded to make room for another only after it has been loaded for
#: _RESIDENT_SECONDS or unused for _IDLE_SECONDS. If loading an engine runs out of memory, other engines are unloaded at once.
_RESIDENT_SECONDS, _IDLE_SECONDS = 15.0, 3.0
#: A request waits for other requests to join its round only if two requests overlapped at most this many seconds ago. Requests
#: overlap if one arrives while another is waiting or being computed. With a single caller, waiting would gain nothing.
_OVERLAP_SECONDS = 1.0

#: For _ONLINE_SECONDS after the last request, each pass of a job takes at most about _PASS_SECONDS of device time. A request
#: then waits for the pass in progress and for the next pass, which is already queued on the device.
_ONLINE_SECONDS, _PASS_SECONDS = 10.0, 0.2
#: Seconds between checks of whether a model may be unloaded to make room for another, or whether the job has read results of
#: computed passes (see _AHEAD).
_LOOK_AGAIN_SECONDS = 0.02
#: Seconds between checks for newly read sequences of a job, once the engine has computed all sequences read so far.
_LOOK_FOR_GROUPS_SECONDS = 0.005

#: The results of one forward pass: a list of tuples, each with the index and the outcome of a sequence. The list is empty if
#: there was nothing to compute yet.
Landed = list[tuple[int, Outcome]]


def _unloaded() -> WorkerGoneError:
    return WorkerGoneError("the job's model was unloaded to make room for another model", blamed=False)


@dataclass
class OnlineRequest:
    """An online request: sequences to score while a client waits."""

    id: str
    reference_id: str
    sequences: list[Sequence]
    temperature: float
    alone: bool  # it must not share its round, because it may have crashed a worker before
    arrived: float = field(default_factory=time.monotonic)
    request: str | None = None
    top_k: int = 0  # number of most probable tokens of each position that the client wants
    write: bool = False  # whether the values may be stored
    outcomes: list[Outcome | None] = field(default_factory=list)  # of each sequence, None if unknown; empty before the round
    left: int = 0  # number of sequences whose outcomes are not known yet

    def tokens(self) -> int:
        return sum(map(len, self.sequences))


@dataclass(frozen=True)
class Answer:
    """The response to an online request: the outcomes in `request.outcomes`, or one `error` for the whole request."""

    request: OnlineRequest
    engine: PassEngine | None
    engine_seconds: float = 0.0
    queue_seconds: float = 0.0
    error: str | None = None
    is_permanent: bool = False  # whether sending the request again leads to the same error


@dataclass
class _Work:
    """The sequences that the engine loop computes for a job, and the state of their computation."""

    reference_id: str
    groups: Iterable[list[Sequence]]
    #: Of each forward pass, its results and token counts; then None, or an error if the computation cannot continue.
    out: queue.SimpleQueue[tuple[Landed, TokenCounts] | BaseException | None] = field(default_factory=queue.SimpleQueue)
    engine: PassEngine | None = None
    #: When `groups` is checked again for new sequences (time.monotonic()); 0 if there were new ones at the last check.
    idle_until: float = 0.0
    passes: Iterator[tuple[Landed, TokenCounts]] | None = None

    def begin(self, engine: PassEngine) -> Iterator[tuple[Landed, TokenCounts]]:
        """Compute the passes and yield their results, in the thread that owns the engine."""
        passes = engine.flow(self.groups)
        while True:
            so_far = engine.token_counts()
            landed = next(passes, None)
            if landed is None:
                break
            yield landed, engine.token_counts() - so_far


@dataclass(eq=False)
class Engines:
    """The loaded engines of one device, by reference id. Only the engine loop's thread may use it."""

    make: Callable[[str], PassEngine]  # may raise EngineError and the errors of `describe_reference`
    capacity: int  # maximum number of loaded engines; if it is 1, the pinned engine and one other may be loaded
    pinned: str | None  # id of a reference whose engine is never unloaded
    on_change: Callable[[list[str]], None]  # called with the ids of all loaded engines when one was loaded or unloaded
    admit: Callable[[str], None]  # called before others make room for an engine; raises an error if it cannot be loaded
    _loaded: dict[str, PassEngine] = field(default_factory=dict)  # ordered from least to most recently used
    _loaded_at: dict[str, float] = field(default_factory=dict)
    _used_at: dict[str, float] = field(default_factory=dict)

    def get(self, reference_id: str) -> PassEngine:
        """Return the engine of a reference. If loading it runs out of memory, all others but the pinned one are unloaded."""
        engine = self._loaded.pop(reference_id, None)
        if engine is None:
            self.admit(reference_id)
            for victim in self.displaced_by(reference_id):
                self._unload(victim)
            try:
                engine = self.make(reference_id)
            except OutOfMemoryError:
                if not self._movable():
                    raise
            if engine is None:  # in the `except` clause, the traceback would keep the memory of the partly loaded model
                for other in self._movable():
                    self._unload(other)
                engine = self.make(reference_id)
            self._loaded_at[reference_id] = time.monotonic()
            self._loaded[reference_id] = engine
            self.on_change(list(self._loaded))
        self._loaded[reference_id] = engine
        self._used_at[reference_id] = time.monotonic()
        return engine

    def peek(self, reference_id: str) -> PassEngine | None:
        """Return the engine of a reference, or None if it is not loaded. The call does not count as a use of the engine."""
        return self._loaded.get(reference_id)

    def displaced_by(self, reference_id: str) -> list[str]:
        """Return the references whose engines would be unloaded to make room for this one, least recently used first."""
        if reference_id in self._loaded:
            return []
        too_many = len(self._loaded) + 1 - self.capacity
        return self._movable()[: max(0, too_many)]

    def may_get(self, reference_id: str) -> bool:
        """Return whether all engines that would make room for this one were loaded long ago, or not used for a while."""
        now = time.monotonic()
        return all(
            now - self._loaded_at[other] >= _RESIDENT_SECONDS or now - self._used_at[other] >= _IDLE_SECONDS
            for other in self.displaced_by(reference_id)
        )

    def _movable(self) -> list[str]:
        return [other for other in self._loaded if other != self.pinned]

    def _unload(self, reference_id: str) -> None:
        self._loaded.pop(reference_id).close()
        self.on_change(list(self._loaded))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class EngineLoop:
    """The loop that alternates between online requests and one job.

    Args:
        on_round: called before each round with the ids of the round's requests.
        on_answer: called with the Answer for each request.
        window_seconds: time that a request waits for other requests to join its round, if requests have overlapped recently
            (see _OVERLAP_SECONDS).
    """

    def __init__(
        self,
        engines: Engines,
        on_round: Callable[[list[str]], None],
        on_answer: Callable[[Answer], None],
        window_seconds: float,
    ) -> None:
        self._engines = engines
        self._on_round = on_round
        self._on_answer = on_answer
        self._window = window_seconds
        self._lock = threading.Lock()  # of `_online` and `_work`
        self._news = threading.Event()  # set to wake the loop
        self._online: deque[OnlineRequest] = deque()
        self._work: _Work | None = None
        self._closing = False
        self._serving = False
        self._overlapped = -_OVERLAP_SECONDS
        self._asked_at = -_ONLINE_SECONDS
        self._at: tuple[str, float] | None = None

    def doing(self) -> tuple[str, float] | None:
        """Return the operation in progress ("load" or "pass") and the seconds since it began, or None if there is none."""
        at = self._at
        return None if at is None else (at[0], time.monotonic() - at[1])

    def ask(self, request: OnlineRequest) -> None:
        with self._lock:
            if self._online or self._serving:
                self._overlapped = time.monotonic()
            self._asked_at = time.monotonic()
            self._online.append(request)
        self._news.set()

    def forget(self, request_id: str) -> None:
        """Remove a request that no client is waiting for any more, unless the engine has started it."""
        with self._lock:
            self._online = deque(request for request in self._online if request.id != request_id)

    def flow(
        self, reference_id: str, groups: Iterable[list[Sequence]], check: Callable[[], None]
    ) -> Iterator[tuple[Landed, TokenCounts]]:
        """Yield the outcomes of each forward pass of a job, with the token counts of the pass. Call this in another thread.

        Each outcome comes with the index of its sequence among all sequences in `groups`.

        Args:
            groups: yields an empty group while no sequences are available: online requests would wait for one that blocks. The
                engine may read it in a background thread.
            check: called repeatedly in the calling thread; raises an error to stop the job.

        Raises:
            WorkerGoneError: the model was unloaded to make room for another model. The job can start again later.
            EngineError, or another ReflogpError: the model cannot be loaded.
        """
        return self._follow(_Work(reference_id, groups), check)

    def engine(self, reference_id: str, check: Callable[[], None]) -> PassEngine:
        """Return the engine of a reference, loading it if necessary. Raises as `flow`.

        Call only those methods of the returned engine that run no forward pass.
        """
        work = _Work(reference_id, [])
        for _ in self._follow(work, check):
            pass
        assert work.engine is not None
        return work.engine

    def _follow(self, work: _Work, check: Callable[[], None]) -> Iterator[tuple[Landed, TokenCounts]]:
        with self._lock:
            self._work = work
        self._news.set()
        try:
            while True:
                check()
                try:
                    landed = work.out.get(timeout=0.2)
                except queue.Empty:
                    continue
                if landed is None:
                    return
                if isinstance(landed, BaseException):
                    raise landed
                yield landed
        finally:
            self._drop(work)

    def close(self) -> None:
        self._closing = True
        self._news.set()

    def preload(self, reference_id: str) -> None:
        self._engine(reference_id)

    def run(self) -> None:
        """Alternate between online requests and the job until `close` is called.

        Raises EngineError if a forward pass fails: the device may be unusable, so the process must exit; until then, `flow`
        waits.
        """
        jobs_turn = False
        while not self._closing:
            work = self._ready_work()
            batch = [] if jobs_turn and work is not None else self._next_round()
            if batch:
                self._serving = True
                self._serve(batch)
                self._serving = False
                jobs_turn = True
            elif work is not None:
                self._advance(work)
                jobs_turn = False
            else:
                self._news.wait(self._pause())
                self._news.clear()

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        self._at = (what, time.monotonic())
        try:
            yield
        finally:
            self._at = None

    def _engine(self, reference_id: str) -> PassEngine:
        with self._doing("load"):
            return self._engines.get(reference_id)

    def _pause(self) -> float | None:
        """Return how many seconds the loop may sleep before it checks for work; None: until it is woken."""
        if self._work is not None and self._work.idle_until > time.monotonic():
            return _LOOK_FOR_GROUPS_SECONDS
        return _LOOK_AGAIN_SECONDS if self._online or self._work else None

    def _ready_work(self) -> _Work | None:
        """Return the job's work if the loop should run one of the job's passes now.

        It should not while the job waits for new sequences to be read, while the results of _AHEAD passes are waiting to be
        read by the job, or while the pass would displace a model that was both loaded and used recently.
        """
        work = self._work
        if work is None or work.out.qsize() >= _AHEAD or work.idle_until > time.monotonic():
            return None
        return work if self._engines.may_get(work.reference_id) else None

    def _advance(self, work: _Work) -> None:
        if work.passes is not None and self._engines.peek(work.reference_id) is not work.engine:
            work.out.put(_unloaded())
            self._drop(work)
            return
        if not work.idle_until:  # a check for a new group does not count as a use of the engine
            try:
                work.engine = self._engine(work.reference_id)
            except ReflogpError as error:
                work.out.put(error)
                self._drop(work)
                return
        assert work.engine is not None
        if work.passes is None:
            work.passes = work.begin(work.engine)
        is_online = time.monotonic() - self._asked_at < _ONLINE_SECONDS
        work.engine.pass_seconds = _PASS_SECONDS if is_online else None
        with self._doing("pass"):
            landed = next(work.passes, None)
        work.out.put(landed)
        if landed is None:
            self._drop(work)
        else:
            work.idle_until = 0.0 if landed[0] else time.monotonic() + _LOOK_FOR_GROUPS_SECONDS

    def _drop(self, work: _Work) -> None:
        with self._lock:
            if self._work is work:
                self._work = None

    def _next_round(self) -> list[OnlineRequest]:
        """Remove the next round's requests from the queue and return them; return an empty list if none may be served now.

        Taken together, they fit into the engine's token budget, unless the first one alone exceeds it.
        """
        first = self._first_servable()
        if first is None:
            return []
        now = time.monotonic()
        pause = first.arrived + self._window - now
        if pause > 0 and not first.alone and now - self._overlapped < _OVERLAP_SECONDS:
            time.sleep(pause)
        if self._engines.peek(first.reference_id) is None:
            self._on_round([first.id])  # if loading the model ends this process, this request is to blame
        try:
            budget = self._engine(first.reference_id).token_budget
        except ReflogpError as error:
            is_permanent = isinstance(error, CheckpointError | UsageError)  # others, such as a server that is away, may pass
            self._on_answer(Answer(first, None, error=str(error), is_permanent=is_permanent))
            return []
        batch, tokens = [first], first.tokens()
        with self._lock:
            kept: deque[OnlineRequest] = deque()
            for request in self._online:
                fits = (
                    not request.alone
                    and not first.alone
                    and request.reference_id == first.reference_id
                    and request.temperature == first.temperature
                    and tokens + request.tokens() <= budget
                )
                (batch if fits else kept).append(request)
                tokens += request.tokens() if fits else 0
            self._online = kept
        return batch

    def _first_servable(self) -> OnlineRequest | None:
        with self._lock:
            first = next((request for request in self._online if self._engines.may_get(request.reference_id)), None)
            if first is not None:
                self._online.remove(first)
        work = self._work
        if first is not None and work is not None and work.reference_id in self._engines.displaced_by(first.reference_id):
            work.out.put(_unloaded())
            self._drop(work)
        return first

    def _serve(self, batch: list[OnlineRequest]) -> None:
        engine = self._engine(batch[0].reference_id)
        self._on_round([request.id for request in batch])
        began = time.monotonic()
        sequences: list[Sequence] = []
        owners: list[tuple[OnlineRequest, int]] = []
        for request in batch:
            request.outcomes = [None] * len(request.sequences)
            request.left = len(request.sequences)
            owners += [(request, at) for at in range(len(request.sequences))]
            sequences += request.sequences

        def settle(index: int, outcome: Outcome) -> None:
            request, at = owners[index]
            request.outcomes[at] = outcome
            request.left -= 1
            if not request.left:
                now = time.monotonic()
                self._on_answer(Answer(request, engine, now - began, began - request.arrived))

        engine.pass_seconds = None  # no limit here: only jobs' passes are kept short, so that online requests run sooner
        problems = engine.problems(sequences)
        for index, problem in problems.items():
            settle(index, problem)
        passes = engine.passes(sequences, skip=problems, temperature=batch[0].temperature)
        while True:
            with self._doing("pass"):
                landed = next(passes, None)
            if landed is None:
                break
            for index, outcome in landed:
                settle(index, outcome)
