"""The main path: dataset file -> tokens -> keys -> minus what the snapshot has -> engine -> one shard, one commit.

Reads top to bottom in `score_dataset`. Knows every part's interface and no part's inside. Called by the command line and by
the service's workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reflogp_service.data.tokenize import TokenizedRows
from reflogp_service.data.tokenized import TokenizedDataset
from reflogp_service.engine.sequences import Sequence
from reflogp_store import LogprobStore, LogprobTable, Reference, Snapshot
from reflogp_store.compaction import compact_if_many, small_shards_allowed
from reflogp_store.joins import completion_columns
from reflogp_store.schema import shard_table
from reflogp_store.windows import check_truncation, windows

#: A commit at least this often, in sequences and in seconds: what a crash can lose.
COMMIT_SEQUENCES = 4096
COMMIT_SECONDS = 30.0
#: Row numbers that a summary names in full; the rest is counted.
NAMED_ROWS = 100


class Engine(Protocol):
    """What scoring needs of an engine; reflogp_service.engine.TorchEngine is one."""

    def problems(self, sequences: list[Sequence]) -> dict[int, str]: ...
    def stream(self, sequences: list[Sequence], skip: Any = ()) -> Iterator[tuple[int, npt.NDArray[np.float32] | str]]: ...
    def provenance(self) -> dict[str, Any]: ...
    def flops(self, sequence: Sequence) -> float: ...
    def peak_flops_per_second(self) -> float: ...


class Watcher(Protocol):
    """Told how a scoring run gets on."""

    def begin(self, sequences: int) -> None:
        """How many sequences the dataset has, as far as can be told before reading it."""

    def read(self, rows: int) -> None:
        """So many rows are read and tokenised."""

    def advance(self, sequences: int, tokens: int) -> None:
        """So many more sequences are done, for which so many tokens were computed."""

    def bad_row(self, row: int, problem: str) -> None:
        """A row that has no values after this run, and why."""

    def note(self, row: int, remark: str) -> None:
        """A row that has values, and something worth knowing about it."""

    def committed(self, snapshot: int) -> None:
        """What is computed so far is in the store, as of that snapshot."""


@dataclass
class ScoreSummary:
    """What a scoring run did. `sequences` is hits + duplicates + scored + failed.

    Attributes:
        rows: rows read.
        bad_rows: rows without values after the run; `bad_row_numbers` names the first hundred.
        dropped_rows: rows whose prompt alone fills max_length, which TRL drops before training.
        empty_prompts: rows without a prompt; the first completion token is context and has no value, as in TRL's loss.
        sequences: sequences of usable rows.
        hits: of these, ones that the store had before the run.
        duplicates: ones that came up earlier in the same run.
        scored: ones that the engine computed.
        failed: ones that it could not.
        tokens: prompt and completion tokens of the scored ones.
        seconds: wall time of the run; `scoring_seconds` is the engine's part of it.
        tokens_per_second: tokens over scoring_seconds.
        model_flops_utilization: useful arithmetic over a matrix product's rate on this device; None where nothing ran.
        reference_id, snapshot, store: where the values are.
        provenance: how they were made; None where nothing ran.
    """

    rows: int = 0
    bad_rows: int = 0
    bad_row_numbers: list[int] = field(default_factory=list)
    dropped_rows: int = 0
    empty_prompts: int = 0
    sequences: int = 0
    hits: int = 0
    duplicates: int = 0
    scored: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    scoring_seconds: float = 0.0
    tokens_per_second: float = 0.0
    model_flops_utilization: float | None = None
    reference_id: str = ""
    snapshot: int = 0
    store: str = ""
    provenance: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def score_dataset(
    dataset: TokenizedDataset,
    store: LogprobStore,
    reference: Reference,
    make_engine: Callable[[], Engine],
    *,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    watcher: Watcher | None = None,
    commit_sequences: int = COMMIT_SEQUENCES,
    commit_seconds: float = COMMIT_SECONDS,
) -> ScoreSummary:
    """Score what the store lacks of a dataset.

    Args:
        dataset: what to score.
        store: where values go.
        reference: the model that `make_engine` loads.
        make_engine: called on the first miss; a run of hits loads no model.
        max_length: score no token past this position (keep_start), or only the last so many (keep_end).
        truncation_mode: "keep_start" or "keep_end".
        watcher: told of progress and of bad rows.
        commit_sequences, commit_seconds: commit when either is reached.

    Returns:
        What was done. An interrupt (KeyboardInterrupt) or an engine's error commits what is computed and passes on.

    Raises:
        UsageError and its kin for input that cannot be used; StoreError when the store cannot be written.
    """
    check_truncation(max_length, truncation_mode)
    started = time.monotonic()
    table = store.create_table(reference)
    before = table.snapshot()
    before.require_whole()  # what a damaged shard held could be stored a second time, differently
    summary = ScoreSummary(reference_id=reference.reference_id, snapshot=before.number, store=store.uri)
    run = _Run(table, before, make_engine, summary, watcher, commit_sequences, commit_seconds)
    for window in dataset:
        if watcher and not summary.rows:
            watcher.begin(dataset.count() * max(1, len(window.table.column_names) - 2))  # all but row and prompt_ids
        if watcher:
            watcher.read(window.last_row + 1)
        run.take(window, max_length, truncation_mode)
    run.flush()
    summary.seconds = time.monotonic() - started
    run.close()
    return summary


@dataclass
class _Pending:
    """A sequence to score, and the rows that wait for it."""

    key: bytes
    sequence: Sequence
    completion_len: int
    rows: list[int]


class _Run:
    """State of one scoring run: what waits for the engine, what waits for a commit, what was counted."""

    def __init__(
        self,
        table: LogprobTable,
        before: Snapshot,
        make_engine: Callable[[], Engine],
        summary: ScoreSummary,
        watcher: Watcher | None,
        commit_sequences: int,
        commit_seconds: float,
    ) -> None:
        self._table = table
        self._before = before
        self._now = before
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._summary = summary
        self._watcher = watcher
        self._commit_sequences = commit_sequences
        self._commit_seconds = commit_seconds
        self._pending: dict[bytes, _Pending] = {}
        self._bad: set[int] = set()
        self._flops = 0.0
        self._small_shards = small_shards_allowed()

    def take(self, window: TokenizedRows, max_length: int | None, truncation_mode: str) -> None:
        """Count a window's rows and put its misses in line."""
        self._summary.rows = window.last_row + 1
        for row, problem in window.problems.items():
            self._bad_row(row, problem)
        columns = list(completion_columns(window.table.column_names)) if len(window.table) else []
        views = [windows(window.table["prompt_ids"], window.table[c], max_length, truncation_mode) for c in columns]
        if not views:
            return
        rows = window.table["row"].to_numpy()
        dropped = views[0].dropped
        empty = np.logical_or.reduce([view.needed == 0 for view in views]) & ~dropped
        self._summary.dropped_rows += int(dropped.sum())
        for row in rows[empty]:
            self._bad_row(int(row), "a completion is empty: it has no token to score")
        bare = pc.list_value_length(window.table["prompt_ids"]).to_numpy() == 0
        for row in rows[bare & ~dropped]:
            self._summary.empty_prompts += 1
            if self._watcher:
                self._watcher.note(int(row), "its prompt is empty: the first completion token is context and has no value")
        for view in views:
            keys = view.keys()
            hit_before = self._before.stored_lengths(keys) >= view.needed
            hit_now = self._now.stored_lengths(keys) >= view.needed
            usable = np.flatnonzero(~dropped & (view.needed > 0))  # an empty side counts 0, the other is still needed
            self._summary.sequences += len(usable)
            self._summary.hits += int(hit_before[usable].sum())
            self._summary.duplicates += int((hit_now & ~hit_before)[usable].sum())
            self._advance(int(hit_now[usable].sum()), 0)
            for at in usable[~hit_now[usable]]:
                self._wait(keys[at].as_py(), view, int(at), int(rows[at]))
        if len(self._pending) >= self._commit_sequences:
            self.flush()

    def flush(self) -> None:
        """Score and commit everything in line."""
        if not self._pending:
            return
        pending, self._pending = list(self._pending.values()), {}
        if self._engine is None:
            self._engine = self._make_engine()
            self._summary.provenance = {"reflogp": version("reflogp"), **self._engine.provenance()}
        sequences = [p.sequence for p in pending]
        problems = self._engine.problems(sequences)
        done: list[tuple[_Pending, npt.NDArray[np.float32]]] = []
        committed_at = time.monotonic()
        try:
            stream = self._engine.stream(sequences, skip=problems)
            while (item := self._timed_next(stream)) is not None:
                index, logps = item
                if isinstance(logps, str):
                    problems[index] = logps
                    continue
                done.append((pending[index], logps))
                self._summary.scored += 1
                self._summary.tokens += len(sequences[index])
                self._flops += self._engine.flops(sequences[index])
                self._advance(1, len(sequences[index]))
                if len(done) >= self._commit_sequences or time.monotonic() - committed_at > self._commit_seconds:
                    self._commit(done)
                    done, committed_at = [], time.monotonic()
        finally:
            self._commit(done)
        for index, problem in problems.items():
            self._summary.failed += 1
            for row in pending[index].rows:
                self._bad_row(row, problem)

    def close(self) -> None:
        """Finish the summary's rates."""
        summary = self._summary
        if self._engine is not None and summary.scoring_seconds > 0:
            summary.tokens_per_second = summary.tokens / summary.scoring_seconds
            peak = self._engine.peak_flops_per_second()
            summary.model_flops_utilization = self._flops / summary.scoring_seconds / peak

    def _wait(self, key: bytes, view: Any, at: int, row: int) -> None:
        needed = int(view.needed[at])
        waiting = self._pending.get(key)
        if waiting is not None:
            self._summary.duplicates += 1
            self._advance(1, 0)
            waiting.rows.append(row)
            if len(waiting.sequence.completion_ids) >= needed:
                return
        completion = view.completion_ids[at].values.to_numpy()
        sequence = Sequence(view.prompt_ids[at].values.to_numpy(), completion[:needed])
        rows = waiting.rows if waiting is not None else [row]
        self._pending[key] = _Pending(key, sequence, len(completion), rows)

    def _timed_next(self, stream: Iterator[Any]) -> Any:
        start = time.monotonic()
        try:
            return next(stream, None)
        finally:
            self._summary.scoring_seconds += time.monotonic() - start

    def _commit(self, done: list[tuple[_Pending, npt.NDArray[np.float32]]]) -> None:
        if not done:
            return
        rows = shard_table(
            pa.array([p.key for p, _ in done], pa.binary()),
            np.array([len(p.sequence.prompt_ids) for p, _ in done], np.int32),
            np.array([p.completion_len for p, _ in done], np.int32),
            pa.array([logps for _, logps in done], pa.list_(pa.float32())),
            self._summary.provenance or {},
        )
        self._summary.snapshot = self._table.append(rows).snapshot
        compact_if_many(self._table, self._small_shards)
        self._now = self._table.snapshot()
        if self._watcher:
            self._watcher.committed(self._summary.snapshot)

    def _advance(self, sequences: int, tokens: int) -> None:
        if self._watcher and sequences:
            self._watcher.advance(sequences, tokens)

    def _bad_row(self, row: int, problem: str) -> None:
        if row in self._bad:
            return
        self._bad.add(row)
        self._summary.bad_rows += 1
        if len(self._summary.bad_row_numbers) < NAMED_ROWS:
            self._summary.bad_row_numbers.append(row)
        if self._watcher:
            self._watcher.bad_row(row, problem)
