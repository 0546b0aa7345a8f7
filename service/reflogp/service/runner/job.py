"""Run one job: score the dataset's sequences that have no stored values, then write the result.

A job calls `score_dataset`, as the `reflogp score` command does. In addition, it reports progress and can be stopped.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from reflogp.scoring.data.tokenize import StoppedError
from reflogp.scoring.data.tokenizer_files import TokenizerFiles, read_tokenizer_files
from reflogp.scoring.errors import DatasetError
from reflogp.scoring.runs.callbacks import ProgressCallbacks
from reflogp.scoring.runs.scheduler import Scheduler, Workers
from reflogp.scoring.runs.score import score_dataset
from reflogp.scoring.runs.summary import ScoreSummary
from reflogp.scoring.tracing import run_span, span
from reflogp.scoring.vision import load_processor
from reflogp.service.confined_paths import OpenDataset
from reflogp.service.runner.job_dataset import JobDataset, cache_name, delete_oldest
from reflogp.service.runner.order import JobOrder
from reflogp.service.runner.reader import Reading, default_memory
from reflogp.service.runner.result import bad_row_reasons, write_result
from reflogp.store import Store
from reflogp.store.texts import hide_secrets, shortened
from reflogp.store.windows import TrainerSettings

#: Minimum seconds between progress reports, and the number of seconds over which the current rate is averaged.
_REPORT_SECONDS, _RATE_SECONDS = 0.25, 5.0
#: Maximum number of bad rows. A file of a few kilobytes can hold any number of rows without values.
_MOST_BAD_ROWS = 1_000_000


class JobStoppedError(Exception):
    """The job must stop. The error's text is the reason: "cancelled", "interrupted" (by a more urgent job) or "end"."""


class Progress(ProgressCallbacks):
    """Tracks a running job's progress. Reports it at most four times per second, and also after each commit and at the end.

    `problems` maps row numbers to the reasons why these rows have no values.
    """

    def __init__(self, report: Callable[[dict[str, Any], bool], None], check: Callable[[], None]) -> None:
        self.problems: dict[int, str] = {}
        self._send, self._check = report, check
        self._began = time.monotonic()
        self._sent = 0.0
        self._rows = self._sequences = self._done = self._hits = self._scored = self._tokens = 0
        self._read_at = self._began
        self._scoring_since: float | None = None  # time of the last call of `read` before values were computed
        self._recent: deque[tuple[float, int]] = deque()

    def begin(self, sequences: int) -> None:
        self._sequences = sequences
        self._report()

    def read(self, rows: int) -> None:
        self._rows = rows
        self._read_at = time.monotonic()
        self._report()

    def hits(self, sequences: int) -> None:
        self._hits += sequences

    def advance(self, sequences: int, tokens: int) -> None:
        self._done += sequences
        self._scored += sequences if tokens else 0
        self._tokens += tokens
        if tokens and self._scoring_since is None:
            self._scoring_since = self._read_at
        self._report()

    def bad_row(self, row: int, problem: str) -> None:
        """Record why a row has no values. Raises DatasetError for too many bad rows."""
        if len(self.problems) == _MOST_BAD_ROWS:
            raise DatasetError(f"more than {_MOST_BAD_ROWS:,} rows are bad; the last, row {row}: {shortened(problem)}")
        self.problems[row] = sys.intern(shortened(problem))

    def committed(self, snapshot: int) -> None:
        self._report(committed=True)

    def finish(self, summary: ScoreSummary) -> None:
        """Report the final counts, and the rate of the whole run."""
        self._sequences = self._done = summary.sequences
        self._report(rate=summary.tokens_per_second)

    def _report(self, committed: bool = False, rate: float | None = None) -> None:
        """Report progress. `rate` is the rate to report at the end; while the job runs, it is that of the last seconds."""
        self._check()
        moment = time.monotonic()
        if not committed and rate is None and moment - self._sent < _REPORT_SECONDS:
            return
        self._sent = moment
        self._recent.append((moment, self._tokens))
        while len(self._recent) > 2 and moment - self._recent[1][0] > _RATE_SECONDS:
            self._recent.popleft()
        (since, before) = self._recent[0]
        if rate is None:
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
    workers: Workers,
    report: Callable[[dict[str, Any], bool], None],
    check: Callable[[], None],
) -> dict[str, Any]:
    """Run a job.

    Return the summary that `reflogp score --json` prints, with two additional entries: `image_files` is True if any row names
    an image file, and `bad_row_reasons` says why rows have no values.

    The job opens the dataset's files once, fails if their content does not match the digest in the ledger, and reads the
    tokenizer from the model's folder. It also fails if a dataset or tokenizer file is modified while it runs. Values computed
    before stay valid, because their keys are computed from the token ids. The digest does not cover images that rows name by
    path; if such an image changes, so do the keys of its rows.

    Args:
        report: called with the job's progress (a dict with the fields of JobProgress in service.models), and with True if
            values have been committed since the last call, otherwise False.
        check: called repeatedly; raises JobStoppedError to stop the job. Values computed before the job stops are still
            committed.

    Raises:
        JobStoppedError: the job must stop now. The job continues later unless it was cancelled.
        ReflogpError, OSError: the job failed.
    """
    reference, progress = order.reference, Progress(report, check)
    asked = order.claim.settings
    settings = TrainerSettings(asked.max_length, asked.truncation_mode, asked.ld_alpha)
    with (
        run_span(
            "reflogp job",
            order.claim.traceparent,
            stops=(JobStoppedError, StoppedError),
            job_id=order.claim.id,
            request_id=order.claim.request,
            reference_id=reference.reference_id,
            store=hide_secrets(order.context.store),
        ),
        open_dataset(order, check) as (dataset, _),
    ):
        scheduler = Scheduler(workers=workers, check=check)
        try:
            table = Store(order.context.store).values_table(reference, order.model.top_k)
            summary = score_dataset(dataset, table, scheduler, settings=settings, watcher=progress)
        finally:
            scheduler.close()  # gives the workers back
        with span("write result"):
            result = order.context.result(order.claim.id)
            write_result(dataset, table.base.snapshot(), settings, progress.problems, result, check)
    delete_oldest(order.context.tokens, order.context.max_tokens_bytes)
    progress.finish(summary)
    reasons = bad_row_reasons(progress.problems)
    return asdict(summary) | {"image_files": dataset.names_image_files, "bad_row_reasons": reasons}


@contextmanager
def open_dataset(order: JobOrder, check: Callable[[], None]) -> Iterator[tuple[JobDataset, TokenizerFiles]]:
    """Open a job's dataset, and find the tokenizer that its model's folder contains at the time of the call.

    Raises FileChangedError if a file of the dataset is modified in the `with` block, and the errors of `run_job`.
    """
    form, source, trusts = order.claim.settings.format, order.claim.source, order.model.trust_remote_code
    root = None if order.root is None else Path(order.root)
    folder = order.model.folder()
    tokenizer = read_tokenizer_files(folder, trusts)
    with OpenDataset(root, Path(source["file"]), source["digest"]) as files:
        reading = Reading(
            str(files.readable),
            source["split"],
            form,
            order.root,
            str(files.path),
            tokenizer.model,
            tokenizer.trust_remote_code,
            tokenizer.digest,
            order.context.row_seconds,
            default_memory(),
        )
        kept = order.context.tokens / cache_name(source["digest"], tokenizer.digest, form, source["split"])
        load_vision = partial(load_processor, folder, folder, None, trusts)
        try:
            yield JobDataset(reading, kept, files.check, load_vision, check), tokenizer
        except DatasetError as error:
            files.check()  # if a file has changed, report the change rather than the error it caused
            raise DatasetError(str(error).replace(str(files.readable), source["file"])) from error
