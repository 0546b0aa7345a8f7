"""Score a dataset: read and tokenize rows, look up the keys of their sequences in the store, and pass misses to a scheduler.

Misses are sequences that the store lacks. The scheduler has their values computed and committed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reflogp.scoring.data.tokenize import RowCount, StoppedError, TokenizedRows, TokenizedWindows
from reflogp.scoring.errors import EngineError
from reflogp.scoring.runs.callbacks import ProgressCallbacks
from reflogp.scoring.runs.pipeline import Committed, EngineScheduler, Event, Failed, Miss, Scored
from reflogp.scoring.runs.scheduler import Scheduler
from reflogp.scoring.runs.summary import ScoreSummary
from reflogp.scoring.torch_engine.sequences import Sequence, SequenceImages
from reflogp.scoring.tracing import record, run_span, span
from reflogp.store.joins import windows_of
from reflogp.store.storage import split_table_uri
from reflogp.store.texts import hide_secrets
from reflogp.store.top import ValuesFound, ValuesSnapshot, ValuesTable
from reflogp.store.windows import TrainerSettings, Windows, check_truncation

#: Maximum number of windows (groups of consecutive rows) that wait in a queue after their keys were looked up.
_WINDOWS_AHEAD = 2
#: Fields of the summary that become attributes of the trace's root span.
_TRACED = ("rows", "bad_rows", "sequences", "hits", "duplicates", "scored", "failed", "tokens", "snapshot")
#: Maximum number of row numbers that a summary lists; further rows are only counted.
NAMED_ROWS = 100
#: Problem of a row with a completion that has no token to score.
EMPTY_COMPLETION = "a completion is empty (or a single token without a prompt): it has no token to score"


def score_dataset(
    dataset: TokenizedWindows,
    table: ValuesTable,
    scheduler: EngineScheduler | Scheduler,
    *,
    settings: TrainerSettings | None = None,
    watcher: ProgressCallbacks | None = None,
    strict_engine: str | None = None,
) -> ScoreSummary:
    """Score those sequences of a dataset that have no log-probs in a table.

    If an error or KeyboardInterrupt stops the run, the values that are already computed are committed; see Scheduler.stop.

    Args:
        table: the table of the reference that scores. If it has most probable tokens, the scheduler's engines must compute as
            many.
        scheduler: object that computes and commits values. It loads no model if the table already has all values.
        settings: the trainer's max_length and truncation_mode. With "keep_start", the first max_length tokens of a sequence are
            scored, and with "keep_end", the last max_length tokens. ld_alpha is ignored. If `settings` is None, whole sequences
            are scored.
        strict_engine: name of the only engine whose stored values are accepted; None accepts values from any engine.

    Raises:
        EngineError: an engine other than `strict_engine` computed a row's stored values.
    """
    settings = settings or TrainerSettings()
    check_truncation(settings.max_length, settings.truncation_mode)
    started = time.monotonic()
    store, reference_id = split_table_uri(table.uri)
    with run_span(
        "reflogp score",
        stops=(StoppedError,),
        flush_at_end=True,
        reference_id=reference_id,
        store=hide_secrets(store),
    ) as attributes:
        before = table.snapshot()
        summary = ScoreSummary(reference_id=reference_id, snapshot=before.number, store=store)
        run = _Run(table, before, scheduler, summary, watcher or ProgressCallbacks(), strict_engine)
        scheduler.open(table, run.note)
        looked_up = _looked_up(dataset, before, settings)
        with closing(_WindowsAhead(looked_up)) as ahead:
            try:
                for window in ahead.windows(scheduler.look):
                    run.take(window)
                run.finish()
            except BaseException:
                dataset.stop()
                scheduler.stop()
                raise
            finally:
                attributes |= {name: getattr(summary, name) for name in _TRACED}
        summary.seconds = time.monotonic() - started
        run.close()
    return summary


@dataclass(frozen=True)
class _Window:
    """A window of tokenized rows, with the values that the store contained for these rows before the run.

    Attributes:
        rows_in_all: number of rows in the dataset, including unreadable rows; None while it is not known.
        looked_up: a tuple for each completion column. It contains the column's sequences (see Windows), their keys, and the
            result of looking up these keys.
    """

    rows: TokenizedRows
    rows_in_all: int | None
    looked_up: list[tuple[Windows, pa.Array, ValuesFound]]
    images: list[SequenceImages | None]


def _looked_up(dataset: TokenizedWindows, before: ValuesSnapshot, settings: TrainerSettings) -> Generator[_Window]:
    """Yield the windows of a dataset, each with the values that the snapshot `before` has for the window's rows.

    This generator runs in its own thread.
    """
    counting = RowCount(dataset)
    began = time.monotonic()
    for window in dataset:
        record("read and tokenize", time.monotonic() - began, rows=len(window.table), tokens=window.tokens())
        with span("look up", rows=len(window.table)) as looking_up:
            cut = settings.max_length, settings.truncation_mode
            views = windows_of(window.table, *cut).values() if len(window.table) else ()
            keys = [view.keys() for view in views]
            looked_up = [(view, own, before.find(own)) for view, own in zip(views, keys, strict=True)]
            hits = sum(int((found.lengths >= view.needed).sum()) for view, _, found in looked_up)
            looking_up |= {"sequences": sum(map(len, keys)), "hits": hits}
        yield _Window(window, counting.rows, looked_up, images_for_engine(window))
        began = time.monotonic()


class _Run:
    def __init__(
        self,
        table: ValuesTable,
        before: ValuesSnapshot,
        scheduler: EngineScheduler | Scheduler,
        summary: ScoreSummary,
        watcher: ProgressCallbacks,
        strict_engine: str | None,
    ) -> None:
        self._table = table
        self._before = before
        self._now = before
        self._scheduler = scheduler
        self._summary = summary
        self._watcher = watcher
        self._strict_engine = strict_engine
        self._rows = self._sides = 0
        self._waiting: dict[bytes, Miss] = {}  # misses whose values are not in `_now`
        self._fresh: list[Miss] = []  # misses that were committed after the snapshot `_now` was read
        self._bad: set[int] = set()
        self._failed: dict[bytes, str] = {}  # key -> reason

    def take(self, window: _Window) -> None:
        """Count the rows of a window, and pass its misses to the scheduler. Return when the scheduler has room for more."""
        tokenized = window.rows
        self._sides = max(self._sides, len(tokenized.table.column_names) - 2)  # all columns except row and prompt_ids
        if window.rows_in_all:
            self._begin(window.rows_in_all)
        self._summary.rows = tokenized.last_row + 1
        self._watcher.read(self._summary.rows)
        for row, problem in tokenized.problems.items():
            self._bad_row(row, problem)
        self._summary.notes += tokenized.notes
        if not window.looked_up:
            return
        rows, views = tokenized.table["row"].to_numpy(), [view for view, _, _ in window.looked_up]
        bare = pc.list_value_length(tokenized.table["prompt_ids"]).to_numpy() == 0
        dropped = views[0].dropped
        empty = np.logical_or.reduce([view.needed == 0 for view in views]) & ~dropped
        self._summary.dropped_rows += int(dropped.sum())
        for row in rows[empty]:
            self._bad_row(int(row), EMPTY_COMPLETION)
        self._summary.empty_prompts += int((bare & ~dropped).sum())
        self._look_again()
        misses: list[Miss] = []
        for view, keys, stored in window.looked_up:
            hit_before = stored.lengths >= view.needed
            hit_now = hit_before
            if self._now is not self._before:
                hit_now = self._now.stored_lengths(keys) >= view.needed
            usable = np.flatnonzero(~dropped & (view.needed > 0))  # without empty completions
            if self._strict_engine is not None:
                _refuse_other_engines(stored, usable, self._strict_engine)
            self._summary.sequences += len(usable)
            hits = int(hit_before[usable].sum())
            self._summary.hits += hits
            self._summary.duplicates += int((hit_now & ~hit_before)[usable].sum())
            self._watcher.hits(hits)
            self._advance(int(hit_now[usable].sum()), 0)
            for at in usable[~hit_now[usable]]:
                if self._is_new(keys[at].as_py(), int(rows[at])):
                    images = window.images[at] if window.images else None
                    misses.append(_miss(keys[at].as_py(), view, int(at), int(rows[at]), images))
                    self._waiting[misses[-1].key] = misses[-1]
        self._scheduler.put(misses, max(0, self._rows - self._summary.rows) * self._sides)

    def _begin(self, rows: int) -> None:
        if not self._rows and self._sides:
            self._rows = rows
            self._watcher.begin(rows * self._sides)

    def finish(self) -> None:
        self._begin(self._summary.rows)
        self._rows = self._summary.rows  # the dataset has no further rows
        self._scheduler.finish()

    def close(self) -> None:
        work = self._scheduler.work()
        summary = self._summary
        summary.provenance, summary.workers, summary.scoring_seconds = work.provenance, work.workers, work.seconds
        if summary.empty_prompts:
            rows = "1 row has" if summary.empty_prompts == 1 else f"{summary.empty_prompts:,} rows have"
            summary.notes.append(
                f"{rows} no prompt tokens: the first completion token is context and has no value, as in TRL's loss"
            )
        if work.seconds > 0:
            summary.tokens_per_second = summary.tokens / work.seconds
        summary.sharing_gain = work.token_counts.sharing_gain

    def note(self, event: Event) -> None:
        match event:
            case Scored(misses):
                tokens = sum(len(miss.sequence) for miss in misses)
                self._summary.scored += len(misses)
                self._summary.tokens += tokens
                self._advance(len(misses), tokens)
            case Failed(miss, problem):
                self._summary.failed += 1
                self._failed[miss.key] = problem
                del self._waiting[miss.key]
                self._advance(1, 0)
                for row in miss.rows:
                    self._bad_row(row, problem)
            case Committed(misses, snapshot):
                self._fresh += misses
                self._summary.snapshot = max(self._summary.snapshot, snapshot)
                self._watcher.committed(snapshot)

    def _is_new(self, key: bytes, row: int) -> bool:
        """Return True if the sequence with this key must be scored; otherwise, count it as a duplicate of an earlier one."""
        failed, waiting = self._failed.get(key), self._waiting.get(key)
        if failed is None and waiting is None:
            return True
        self._summary.duplicates += 1
        self._advance(1, 0)
        if waiting is not None:
            waiting.rows.append(row)
        elif failed is not None:
            self._bad_row(row, failed)
        return False

    def _look_again(self) -> None:
        """If there was a commit since the last call, read a new snapshot, and forget the misses whose values it contains."""
        if not self._fresh:
            return
        self._now = self._table.snapshot()
        # The snapshot may contain another run's values, which then count as duplicates.
        self._summary.snapshot = max(self._summary.snapshot, self._now.number)
        for miss in self._fresh:
            del self._waiting[miss.key]
        self._fresh = []

    def _advance(self, sequences: int, tokens: int) -> None:
        if sequences:
            self._watcher.advance(sequences, tokens)

    def _bad_row(self, row: int, problem: str) -> None:
        if row in self._bad:
            return
        self._bad.add(row)
        self._summary.bad_rows += 1
        if len(self._summary.bad_row_numbers) < NAMED_ROWS:
            self._summary.bad_row_numbers.append(row)
        self._watcher.bad_row(row, problem)


def _miss(key: bytes, view: Windows, at: int, row: int, images: SequenceImages | None) -> Miss:
    completion = view.completion_ids[at].values.to_numpy()
    sequence = Sequence(view.prompt_ids[at].values.to_numpy(), completion[: int(view.needed[at])], images=images)
    return Miss(key, sequence, len(completion), [row])


def images_for_engine(rows: TokenizedRows) -> list[SequenceImages | None]:
    """Return, for each row, its images in the form that engines accept, or None if the row has no images.

    The list is empty if the dataset is text-only.
    """
    vision = rows.vision
    if vision is None:
        return []
    found: list[SequenceImages | None] = []
    for images in rows.images:
        counts = vision.tokens.counts([image.kind for image in images]) if images else ()
        alone = all(vision.tokens.counts([image.kind]) == (count,) for image, count in zip(images, counts, strict=True))
        found.append(SequenceImages(images, counts, vision, alone) if images else None)
    return found


def _refuse_other_engines(stored: ValuesFound, places: npt.NDArray[np.int64], engine: str) -> None:
    others = {str(made.get("engine", "unknown")) for made in stored.provenances(places)} - {engine}
    if others:
        raise EngineError(
            f"the store has values from {', '.join(sorted(others))} for this dataset, but --strict-engine allows only values "
            f"from {engine}; use a different store, or omit --strict-engine (values from different engines differ by rounding)"
        )


#: Maximum number of seconds that `close` waits for the thread. If the thread is still making a window after this time, it ends
#: when the window is finished, or when the process exits.
_LAST_SECONDS = 5.0
#: Seconds between two calls of `meanwhile`. While the queue is full, the thread also checks at this interval whether `close`
#: was called.
_LOOK_SECONDS = 0.1


class _WindowsAhead:
    """The windows of `_looked_up`, which a background thread makes in advance. Close it, so that the thread is stopped.

    The thread runs in a copy of the caller's context, so that its spans belong to the caller's trace.
    """

    def __init__(self, windows: Generator[_Window]) -> None:
        self._windows = windows
        self._made: queue.Queue[_Window | BaseException | None] = queue.Queue(_WINDOWS_AHEAD)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=(self._make,), name="reflogp-read", daemon=True)
        self._thread.start()

    def windows(self, meanwhile: Callable[[], None]) -> Iterator[_Window]:
        """Yield the windows. An error of the thread is raised after all earlier windows have been yielded."""
        while True:
            try:
                made = self._made.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                meanwhile()
                continue
            if made is None:
                return
            if isinstance(made, BaseException):
                raise made
            yield made

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_LAST_SECONDS)

    def _make(self) -> None:
        last: BaseException | None = None
        try:
            with closing(self._windows):  # in this thread, where the generator entered its context managers
                for window in self._windows:
                    if not self._put(window):
                        break
        except BaseException as error:
            last = error
        self._put(last)

    def _put(self, made: _Window | BaseException | None) -> bool:
        while not self._closing.is_set():
            try:
                self._made.put(made, timeout=_LOOK_SECONDS)
                return True
            except queue.Full:
                continue
        return False
