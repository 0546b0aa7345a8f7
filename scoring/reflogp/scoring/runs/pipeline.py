"""Compute values with one engine while earlier values are committed to a table.

Groups of misses (sequences that the store lacks) go in, and events come out.

    put ──▶ groups ──▶ the engine ──▶ passes ──▶ commits ──▶ events
            bounded    its own thread  bounded    their own thread

The threads and queues allow the device to compute while further rows are tokenized and earlier values are committed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.scoring.engines import Engine
from reflogp.scoring.torch_engine.sequences import Outcome, Sequence, TokenCounts, TopLogps, Values, numbers_of, token_logps_of
from reflogp.scoring.tracing import record, span
from reflogp.store.maintenance import small_shards_allowed
from reflogp.store.schema import shard_table
from reflogp.store.top import ValuesTable

#: Maximum numbers of sequences and of seconds between two commits. A crash loses the work since the last commit.
COMMIT_SEQUENCES = 4096
COMMIT_SECONDS = 30.0
#: The first commit comes sooner, so that whoever stops a run early does not lose everything.
FIRST_COMMIT_SECONDS = 10.0


@dataclass(eq=False, slots=True)
class Miss:
    """A sequence that the store lacks, and the rows that need it.

    Attributes:
        key: key of the sequence. With keep_start, it is computed from the whole completion.
        sequence: the sequence as it is scored; its completion may be truncated.
        completion_len: number of tokens in the completion. With keep_start, this includes tokens that are cut off.
        rows: numbers of the rows that need the sequence. Further rows may be added until the miss has failed or is committed.
    """

    key: bytes
    sequence: Sequence
    completion_len: int
    rows: list[int]


@dataclass(frozen=True)
class Scored:
    """Event: these misses have been scored; their values will be committed later."""

    misses: list[Miss]


@dataclass(frozen=True)
class Failed:
    """Event: a miss cannot be scored; `problem` is the reason."""

    miss: Miss
    problem: str


@dataclass(frozen=True)
class Committed:
    """Event: the store contains the values of these misses, in this snapshot and all later snapshots."""

    misses: list[Miss]
    snapshot: int


@dataclass(frozen=True)
class Ended:
    """The last event of a pipeline.

    `error` is the error that stopped the engine or the commits, or None. Computed values are lost only if a commit failed.
    """

    error: BaseException | None


Event = Scored | Failed | Committed


@dataclass
class Work:
    """How long scoring took, how many tokens it computed, and how the values were computed."""

    seconds: float = 0.0
    token_counts: TokenCounts = field(default_factory=TokenCounts)
    provenance: dict[str, Any] | None = None
    workers: int = 0


class Committer:
    def __init__(self, table: ValuesTable) -> None:
        self._table = table
        self._small_shards = small_shards_allowed()

    def commit(
        self,
        keys: pa.Array,
        sequences: list[Sequence],
        completion_lens: npt.NDArray[np.int32],
        values: list[Values],
        provenance: dict[str, Any],
    ) -> int:
        """Append values to the table and return the number of the snapshot that contains them."""
        with span("commit", sequences=len(sequences), tokens=sum(map(len, sequences))) as commit:
            rows = shard_table(
                keys,
                np.array([len(sequence.prompt_ids) for sequence in sequences], np.int32),
                completion_lens,
                pa.array(list(map(token_logps_of, values)), pa.list_(pa.float32())),
                provenance,
                _top([of for of in values if isinstance(of, TopLogps)]) if self._table.top_k else None,
            )
            snapshot = self._table.append(rows).snapshot
            commit["snapshot"] = snapshot
            self._table.compact_if_many(self._small_shards)
        return snapshot


def _top(values: list[TopLogps]) -> tuple[pa.Array, pa.Array]:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([of.ids.size for of in values], out=offsets[1:])
    ids, logps = (np.concatenate([getattr(of, name).ravel() for of in values]) for name in ("ids", "logps"))
    return pa.ListArray.from_arrays(offsets, ids), pa.ListArray.from_arrays(offsets, logps)


#: Maximum number of groups waiting for the engine, and maximum number of passes waiting for a commit. A pass of 65,536 tokens
#: takes about 1 MB of memory, or 34 MB with the 64 most probable tokens of each position, of which fewer passes wait.
_GROUPS, _PASSES, _TOP_PASSES = 1, 32, 4
#: Values are committed when they are this many ids and log-probs, of 4 bytes each.
_COMMIT_NUMBERS = 64 << 20
#: Number of seconds that `stop` waits for the engine's current pass.
_LAST_SECONDS = 20.0
#: Number of seconds to wait, while the engine has nothing to do, before asking it for outcomes again.
_LOOK_SECONDS = 0.005
#: Maximum number of seconds that an EngineScheduler waits for news before it looks again whether the engine has room.
_TURN_SECONDS = 0.02
#: The engine gets the waiting misses early if their images use more than this many bytes of memory.
_IMAGE_BYTES = 256 << 20


class ScoringPipeline:
    """Computes values in one thread and commits them in another. To end the threads, call `finish` or `stop`.

    Args:
        tell: function that is called with each event, in a thread of the pipeline.
        commit_seconds: maximum number of seconds between two commits; the first one comes after at most 10 seconds.
    """

    def __init__(
        self,
        engine: Engine,
        table: ValuesTable,
        provenance: dict[str, Any],
        tell: Callable[[Event | Ended], None],
        commit_sequences: int = COMMIT_SEQUENCES,
        commit_seconds: float = COMMIT_SECONDS,
    ) -> None:
        self.seconds = 0.0
        self._engine = engine
        self._commits = Committer(table)
        self.provenance = provenance
        self._tell = tell
        self._commit_sequences = commit_sequences
        self._commit_seconds = commit_seconds
        self._next_commit_seconds = min(commit_seconds, FIRST_COMMIT_SECONDS)
        self._groups: queue.Queue[_Group] = queue.Queue(_GROUPS)
        self._begun: dict[int, tuple[Miss, _Group]] = {}  # by the engine's number of the sequence
        self._closed = threading.Event()  # no further group comes
        self._passes: queue.Queue[_Pass | Ended] = queue.Queue(_TOP_PASSES if table.top_k else _PASSES)
        self._stopped = threading.Event()
        self._done: list[tuple[Miss, Values]] = []
        self._numbers = 0  # in the values of `_done`
        self._since = 0.0
        self._threads = [
            # A copy of the context makes the threads' spans part of the caller's trace.
            threading.Thread(target=copy_context().run, args=(work,), name=name, daemon=True)
            for work, name in ((self._compute, "reflogp-engine"), (self._commit_passes, "reflogp-commit"))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, misses: list[Miss], at_once: bool = False) -> bool:
        """Queue a group of misses. Return False if there is no room for the group now.

        Args:
            at_once: whether to commit as soon as the whole group has been scored.
        """
        try:
            self._groups.put_nowait(_Group(misses, at_once, len(misses)))
        except queue.Full:
            return False
        return True

    def is_starved(self) -> bool:
        return self._groups.empty()

    def finish(self) -> None:
        """Declare that `put` will not be called again. This method returns at once.

        The event `Ended` is reported when the values of all groups are committed.
        """
        self._closed.set()

    def stop(self) -> None:
        """Start no further pass, commit the values that are already computed, and return.

        This method waits at most 20 seconds for the current pass, because a vLLM pass may take minutes. If the pass takes
        longer, its values are lost.
        """
        self._stopped.set()
        self._closed.set()
        engine, commits = self._threads
        if not commits.is_alive():  # the last event was reported
            return
        engine.join(_LAST_SECONDS)
        if engine.is_alive():
            self._passes.put(Ended(None))
        commits.join()

    def _compute(self) -> None:
        error: BaseException | None = None
        try:
            with closing(self._engine.flow(self._sequences())) as flow:
                since = time.monotonic()
                while not self._stopped.is_set():
                    landed = self._land(flow)
                    if landed is None:
                        break
                    if not landed:
                        time.sleep(_LOOK_SECONDS)
                        since = time.monotonic()
                        continue
                    now = time.monotonic()
                    # This includes the time that the last `_passes.put` waited for room, because the device computes meanwhile.
                    self.seconds += now - since
                    since = now
                    self._passes.put(landed)
        except BaseException as caught:
            error = caught
        self._passes.put(Ended(error))

    def _sequences(self) -> Iterator[list[Sequence]]:
        """Yield the sequences of each group; while no group waits, empty lists, because an engine must not be held up."""
        count = 0
        while True:
            is_closed = self._closed.is_set()
            try:
                group = self._groups.get_nowait()
            except queue.Empty:
                if is_closed:
                    return
                yield []
                continue
            self._begun.update(enumerate(((miss, group) for miss in group.misses), count))
            count += len(group.misses)
            yield [miss.sequence for miss in group.misses]

    def _land(self, flow: Iterator[list[tuple[int, Outcome]]]) -> _Pass | None:
        """Return the outcomes of the engine's next pass.

        Return an empty list if no group is available and no pass is running, and None after the last pass.
        """
        began = time.monotonic()
        numbered = next(flow, None)
        if not numbered:
            return None if numbered is None else []
        landed = [(*self._begun.pop(number), outcome) for number, outcome in numbered]
        tokens = sum(len(miss.sequence) for miss, _, _ in landed)
        record("score", time.monotonic() - began, sequences=len(landed), tokens=tokens)
        return landed

    def _commit_passes(self) -> None:
        """Commit values until the engine has stopped.

        If a commit fails, commit nothing more and wait for the engine to stop.
        """
        error: BaseException | None = None
        is_failed = False
        while True:
            try:
                arrived = self._passes.get(timeout=None if is_failed else self._patience())
            except queue.Empty:
                arrived = []
            is_last = isinstance(arrived, Ended)
            if isinstance(arrived, Ended):
                error, arrived = error or arrived.error, []
            if not is_failed:
                try:
                    is_due = self._take(arrived)
                    if is_last or is_due or self._patience() == 0.0:
                        self._commit()
                except BaseException as caught:
                    error, is_failed = error or caught, True
                    self._stopped.set()
                    self._closed.set()
            if is_last:
                self._tell(Ended(error))
                return

    def _patience(self) -> float | None:
        if not self._done:
            return None
        return max(0.0, self._since + self._next_commit_seconds - time.monotonic())

    def _take(self, arrived: _Pass) -> bool:
        """Report the outcomes of a pass, and commit when enough sequences are done.

        Return True if this pass completes a group that must be committed at once.
        """
        is_due = False
        scored: list[Miss] = []
        if not self._done:
            self._since = time.monotonic()
        for miss, group, values in arrived:
            group.left -= 1
            is_due |= group.at_once and not group.left
            if isinstance(values, str):
                self._tell(Failed(miss, values))
            else:
                scored.append(miss)
                self._done.append((miss, values))
                self._numbers += numbers_of(values)
                if self._numbers >= _COMMIT_NUMBERS:
                    self._commit()
        if scored:
            self._tell(Scored(scored))
        while len(self._done) >= self._commit_sequences:
            self._commit(self._commit_sequences)
        return is_due

    def _commit(self, count: int | None = None) -> None:
        done, self._done = self._done[:count], self._done[count:] if count else []
        if not done:
            return
        self._numbers = sum(numbers_of(values) for _, values in self._done)
        misses = [miss for miss, _ in done]
        snapshot = self._commits.commit(
            pa.array([miss.key for miss in misses], pa.binary()),
            [miss.sequence for miss in misses],
            np.array([miss.completion_len for miss in misses], np.int32),
            [values for _, values in done],
            self.provenance,
        )
        self._next_commit_seconds, self._since = self._commit_seconds, time.monotonic()
        self._tell(Committed(misses, snapshot))


@dataclass
class _Group:
    misses: list[Miss]
    at_once: bool
    left: int


#: The outcomes of one pass, each with its miss and the group of the miss.
_Pass = list[tuple[Miss, _Group, Outcome]]


class EngineScheduler:
    """Computes and commits the values of misses with the engine of this process, which is loaded when it gets its first misses.

    Whenever the engine has room, it takes all misses that wait, so that its passes are full. All methods are called from the
    run's thread.

    Args:
        commit_sequences: maximum number of sequences between two commits.
        closes_engine: whether `close` also closes the engine.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], *, commit_sequences: int = COMMIT_SEQUENCES, closes_engine: bool = True
    ) -> None:
        self._make_engine = make_engine
        self._commit_sequences = commit_sequences
        self._closes_engine = closes_engine
        self._engine: Engine | None = None
        self._pipeline: ScoringPipeline | None = None
        self._counted_before = TokenCounts()
        self._table: ValuesTable
        self._report: Callable[[Event], None]
        self._news: queue.SimpleQueue[Event | Ended] = queue.SimpleQueue()
        self._waiting: list[Miss] = []
        self._held = 0  # bytes of memory that the images of the waiting misses use
        self._has_ended = False  # all values are committed

    def open(self, table: ValuesTable, report: Callable[[Event], None]) -> None:
        """Set the table for the values, and the function that is called in the run's thread with what becomes of each miss."""
        self._table, self._report = table, report

    def put(self, misses: list[Miss], to_come: int) -> None:
        """Queue misses, and return when there is room for more."""
        self._waiting += misses
        self._held += sum(picture.held for miss in misses for picture in miss.sequence.pictures)
        self._turn(0.0)
        while len(self._waiting) >= min(self._commit_sequences, COMMIT_SEQUENCES) or self._held > _IMAGE_BYTES:
            self._turn(_TURN_SECONDS)

    def look(self, patience: float = 0.0) -> None:
        """Report what is known, after at most `patience` seconds. Raises the error that stopped the engine or a commit."""
        with suppress(queue.Empty):
            news = self._news.get(timeout=patience) if patience else self._news.get_nowait()
            while True:
                if not isinstance(news, Ended):
                    self._report(news)
                elif news.error is not None:
                    raise news.error
                else:
                    self._has_ended = True
                news = self._news.get_nowait()

    def finish(self) -> None:
        """Wait until it is reported what became of all misses."""
        while self._waiting:
            self._turn(_TURN_SECONDS)
        if self._pipeline is not None:
            self._pipeline.finish()
            while not self._has_ended:
                self.look(patience=1.0)

    def stop(self) -> None:
        """Stop scoring, commit the values that are already computed, and report nothing more."""
        if self._pipeline is not None:
            self._pipeline.stop()

    def close(self) -> None:
        self.stop()
        if self._engine is not None and self._closes_engine:
            self._engine.close()

    def work(self) -> Work:
        if self._engine is None or self._pipeline is None:
            return Work()
        counts = self._engine.token_counts() - self._counted_before
        return Work(self._pipeline.seconds, counts, self._pipeline.provenance, 1)

    def _turn(self, patience: float) -> None:
        if self._waiting and (self._pipeline is None or self._pipeline.is_starved()):
            misses, self._waiting, self._held = self._waiting, [], 0
            pipeline, engine = self._begin()
            problems = engine.problems([miss.sequence for miss in misses])
            for index, problem in problems.items():
                self._news.put(Failed(misses[index], problem))
            if group := [miss for index, miss in enumerate(misses) if index not in problems]:
                pipeline.put(group)
        self.look(patience)

    def _begin(self) -> tuple[ScoringPipeline, Engine]:
        if self._engine is None or self._pipeline is None:
            with span("load model"):
                self._engine = self._make_engine()
            self._counted_before = self._engine.token_counts()
            provenance = {"reflogp": version("reflogp"), **self._engine.provenance()}
            limits = self._commit_sequences, COMMIT_SECONDS
            self._pipeline = ScoringPipeline(self._engine, self._table, provenance, self._news.put, *limits)
        return self._pipeline, self._engine
