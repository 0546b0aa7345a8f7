"""One job in a worker: a dataset, scored where the store lacks it, then its result and report.

The same `score_dataset` as on the command line; what is added is progress, being stopped, and the engine's turns. Runs in the
worker's job thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reflogp.scoring.data.bounds import ReadBounds
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.rooted import OpenDataset
from reflogp.scoring.data.row_process import RowLimits
from reflogp.scoring.data.tokenized import TokenizedDataset, forget_oldest, kept_name
from reflogp.scoring.data.tokenizer_files import NamedTokenizer
from reflogp.scoring.errors import DatasetError
from reflogp.scoring.runs.local import LocalScorer
from reflogp.scoring.runs.score import ScoreSummary, score_dataset
from reflogp.scoring.runs.spread.scorer import ParallelScorer, Workers
from reflogp.service.worker.engine_loop import EngineLoop
from reflogp.service.worker.job_engine import JobEngine
from reflogp.service.worker.protocol import JobOrder
from reflogp.service.worker.result import write_result
from reflogp.store import FileChangedError, OtherContentError, Reference, Store
from reflogp.store.texts import shortened

logger = logging.getLogger(__name__)

#: Beginnings of a job whose files are touched while it reads them.
_ATTEMPTS = 3
#: Seconds between two reports of progress, and the span of time over which a rate is taken.
_REPORT_SECONDS, _RATE_SECONDS = 0.25, 5.0

#: Of a helper's unit at the most: units pass through the service's process.
_UNIT_SEQUENCES = 1024
#: Different texts about bad rows that a job keeps in memory, and what stands for another one.
_TEXTS, _ANOTHER = 10_000, "it cannot be used"


class JobStoppedError(Exception):
    """The job shall not go on here: cancelled, interrupted by a more urgent one, or the worker shall end."""


@dataclass(frozen=True)
class JobPlace:
    """What jobs of a worker share.

    Attributes:
        store: where values go.
        tokens: folder for kept token ids, and bytes of them at the most.
        commit_seconds: the longest that computed values wait for a commit.
        bounds: of reading datasets.
        rows: what tokenising a row may take.
    """

    store: Store
    tokens: Path
    max_tokens_bytes: int
    commit_seconds: float
    bounds: ReadBounds
    rows: RowLimits


class Progress:
    """Counts of a running job, sent on now and then; a Watcher of scoring.

    Args:
        send: gets (progress as the HTTP answer has it, whether work became durable since the last time).
        check: called at every step; raises to stop.
    """

    def __init__(self, send: Callable[[dict[str, Any], bool], None], check: Callable[[], None]) -> None:
        self.problems: dict[int, str] = {}
        self._texts: dict[str, str] = {}
        self._send = send
        self._check = check
        self._began = time.monotonic()
        self._sent = 0.0
        self._rows = self._sequences = self._done = self._hits = self._scored = self._tokens = 0
        self._read_at = self._began
        self._scoring_since: float | None = None  # the engine is asked when a window is read
        self._recent: deque[tuple[float, int]] = deque()

    def begin(self, sequences: int) -> None:
        self._sequences = sequences
        self._report()

    def read(self, rows: int) -> None:
        self._rows = rows
        self._read_at = time.monotonic()
        self._report()

    def advance(self, sequences: int, tokens: int) -> None:
        self._done += sequences
        self._hits += 0 if tokens else sequences
        self._scored += sequences if tokens else 0
        self._tokens += tokens
        if tokens and self._scoring_since is None:
            self._scoring_since = self._read_at
        self._report()

    def bad_row(self, row: int, problem: str) -> None:
        """Keep why a row has no values; equal texts are kept once, and beyond some thousand only that there was one."""
        problem = shortened(problem)
        if problem not in self._texts:
            if len(self._texts) == _TEXTS:
                problem = _ANOTHER
            self._texts[problem] = problem
        self.problems[row] = self._texts[problem]

    def note(self, row: int, remark: str) -> None:
        """A remark changes no value; the result has the value."""

    def committed(self, snapshot: int) -> None:
        self._report(committed=True)

    def finish(self, sequences: int, hits: int) -> None:
        """Send the last counts; so many sequences it were, and hits among them without what came twice."""
        self._sequences = self._done = sequences
        self._hits = hits
        self._report(now=True)

    def _report(self, committed: bool = False, now: bool = False) -> None:
        self._check()
        moment = time.monotonic()
        if not committed and not now and moment - self._sent < _REPORT_SECONDS:
            return
        self._sent = moment
        self._recent.append((moment, self._tokens))
        while len(self._recent) > 2 and moment - self._recent[1][0] > _RATE_SECONDS:
            self._recent.popleft()
        (since, before) = self._recent[0]
        rate = (self._tokens - before) / (moment - since) if moment > since else 0.0
        left = None
        if self._scoring_since is not None:
            left = max(0, self._sequences - self._done) * (moment - self._scoring_since) / self._scored
        self._send(
            {
                "rows": self._rows,
                "sequences": self._sequences,
                "done": self._done,
                "hits": self._hits,
                "scored": self._scored,
                "bad_rows": len(self.problems),
                "tokens": self._tokens,
                "tokens_per_second": rate,
                "seconds": moment - self._began,
                "seconds_left": left,
            },
            committed,
        )


def run_job(
    order: JobOrder,
    place: JobPlace,
    reference: Reference,
    find_tokenizer: Callable[[], NamedTokenizer],
    loop: EngineLoop,
    helpers: Workers,
    new_progress: Callable[[], Progress],
    announce: Callable[[list[str]], None],
    check: Callable[[], None],
) -> dict[str, Any]:
    """Do a job; its summary, as `reflogp score --json` has it.

    What is read is what the job names: the dataset's files are opened once and have the job's digest, and the tokenizer is the
    one that its files are when the job begins. Where one of them was touched meanwhile, the job begins again, and ends with an
    error if the content is another one. Values that were computed stay: they are named by token ids and by weights.

    Args:
        find_tokenizer: says which tokenizer the model's folder has now.
        helpers: other workers that score some of it.
        new_progress: gives what is told how it gets on, from its beginning.
        announce: told the keys that the device is at.
        check: called now and then; raises JobStoppedError to stop. What is computed by then is committed.

    Raises:
        JobStoppedError, DisplacedError: it shall go on later, or not at all.
        ReflogpError: it cannot be done.
    """
    for attempt in range(_ATTEMPTS):
        progress = new_progress()
        try:
            summary = _attempt(order, place, reference, find_tokenizer(), loop, helpers, progress, announce, check)
            break
        except FileChangedError as error:
            if isinstance(error, OtherContentError) or attempt == _ATTEMPTS - 1:
                raise
            logger.info("the job begins again: %s", error, extra={"job": order.job})
    forget_oldest(place.tokens, place.max_tokens_bytes)
    progress.finish(summary.sequences, summary.hits)
    return asdict(summary)


def _attempt(
    order: JobOrder,
    place: JobPlace,
    reference: Reference,
    tokenizer: NamedTokenizer,
    loop: EngineLoop,
    helpers: Workers,
    progress: Progress,
    announce: Callable[[list[str]], None],
    check: Callable[[], None],
) -> ScoreSummary:
    """A job from its beginning to its result; raises FileChangedError as well."""
    form: Any = order.format

    def make_engine() -> JobEngine:
        engine = loop.engine(order.reference_id, check)
        return JobEngine(loop, engine, order.reference_id, order.suspects, order.poison, announce, check)

    file = Path(order.file)
    root = file.parent if order.root is None else Path(order.root)
    with OpenDataset(root, file.relative_to(root).parts, order.digest, order.root is not None) as files:
        try:
            source = RowSource(str(files.readable), order.split, bounds=place.bounds, check=check)
            kept = place.tokens / kept_name(order.digest, tokenizer.digest, form, order.split)
            dataset = TokenizedDataset(
                source, tokenizer.load, form, kept, unchanged=files.check, limits=place.rows, check=check
            )
            summary = score_dataset(
                dataset,
                place.store,
                reference,
                ParallelScorer(helpers, LocalScorer(make_engine, commit_seconds=place.commit_seconds), check, _UNIT_SEQUENCES),
                max_length=order.max_length,
                truncation_mode=order.truncation_mode,
                watcher=progress,
            )
            write_result(
                dataset,
                reference,
                place.store.table(reference.reference_id).snapshot(),
                progress.problems,
                tokenizer.load,
                Path(order.result),
                Path(order.report),
                max_length=order.max_length,
                truncation_mode=order.truncation_mode,
                ld_alpha=order.ld_alpha,
                check=check,
            )
        except DatasetError as error:
            files.check()  # a file that changed explains more than what it led to
            raise DatasetError(str(error).replace(str(files.readable), order.file)) from error
    return summary
