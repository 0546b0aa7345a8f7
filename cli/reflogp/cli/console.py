"""Shared console code: exit codes, progress on stderr, and a JSON object as the last line of stdout."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from reflogp.scoring.runs.callbacks import ProgressCallbacks
from reflogp.store import ReflogpError
from reflogp.store.texts import counted, visible

#: Exit codes for success, failure, incorrect usage, and a dataset in which some rows have no values or cannot be used.
EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_MISSES = 0, 1, 2, 3
#: Exit code after Ctrl-C: 128 plus the signal number of SIGINT, as in shells.
EXIT_INTERRUPTED = 130
#: Maximum number of rows that `_Rows.print` prints. Further rows are only counted.
_PRINTED_ROWS = 10
#: Seconds between progress lines when stderr is not a terminal.
_LINE_SECONDS = 30.0


class WatchInterruptedError(ReflogpError):
    """The user pressed Ctrl-C while watching a job. The job itself continues on the service.

    Attributes:
        hints: lines to print below the message.
    """

    hints: tuple[str, ...] = ()


class SafeConsole(Console):
    """A console that prints untrusted text safely: on one line, with control and invisible characters escaped.

    Rich markup is interpreted only with `markup=True`. In text with markup, pass untrusted names through rich's `escape`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(soft_wrap=True, highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(visible(thing) if isinstance(thing, str) else thing for thing in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape unsafe characters in all output. Every table, progress bar and text passes through this method."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text, keep="\n"), segment.style)


out = SafeConsole()
err = SafeConsole(stderr=True)


def missing_extra(extra: str, error: ImportError) -> ReflogpError:
    """Return the error to raise if a subcommand needs an extra that is not installed."""
    return ReflogpError(f"this command needs reflogp[{extra}]: pip install 'reflogp[{extra}]' ({error})")


def print_dropped(rows: int) -> None:
    """Print how many rows are dropped because their prompts fill --max-length. TRL also drops these rows."""
    if rows:
        err.print(f"dropped {counted(rows, 'row')}, as TRL does, because the prompt alone fills --max-length", style="yellow")


def print_json(summary: dict[str, Any]) -> None:
    """Print an object as one line of JSON on stdout."""
    sys.stdout.write(json.dumps(summary) + "\n")
    sys.stdout.flush()


def quiet_libraries() -> None:
    """Hide FutureWarnings, and the progress bars and log messages (except errors) of the libraries that load models."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for library in ("accelerate", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        elapsed = task.finished_time if task.finished else task.elapsed
        tokens = task.fields.get("tokens", 0)
        return Text(f"{tokens / elapsed:,.0f} tokens/s" if tokens and elapsed else "", style="cyan")


class Bar(ProgressCallbacks):
    """A progress bar with tokens per second and the time left.

    The method `report` prints how many rows were skipped, and the first of these rows.
    """

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=None, tokens=0)
        self._tokens = 0
        self._bad = _Rows()

    def begin(self, sequences: int) -> None:
        self._progress.update(self._task, total=sequences)

    def advance(self, sequences: int, tokens: int) -> None:
        self._tokens += tokens
        self._progress.update(self._task, advance=sequences, tokens=self._tokens)

    def bad_row(self, row: int, problem: str) -> None:
        self._bad.add(row, problem)

    def hashed(self, done: int, total: int) -> None:
        """Show that `done` of `total` units, such as bytes of weight files, have been processed."""
        self._progress.update(self._task, completed=done, total=total)

    def line(self) -> str:
        """Return the progress as one line of plain text."""
        [task] = self._progress.tasks
        total = "" if task.total is None else f" of {task.total:,.0f}"
        tokens = f", {self._tokens:,} tokens" if self._tokens else ""
        return f"{task.description}: {task.completed:,.0f}{total}{tokens}, {timedelta(seconds=round(task.elapsed or 0))}"

    def report(self) -> None:
        self._bad.print("skipped (other rows are not affected)")


class _Rows:
    """Row numbers, each with a message. `add` counts every row, but keeps only the first few for `print`."""

    def __init__(self) -> None:
        self._first: list[tuple[int, str]] = []
        self._count = 0

    def add(self, row: int, text: str) -> None:
        self._count += 1
        if len(self._first) < _PRINTED_ROWS:
            self._first.append((row, text))

    def print(self, what: str) -> None:
        if not self._count:
            return
        rows = "1 row was" if self._count == 1 else f"{self._count} rows were"
        err.print(f"{rows} {what}; row numbers start at 0:", style="yellow")
        for row, text in self._first:
            err.print(f"  row {row}: {text}")
        if self._count > len(self._first):
            err.print(f"  … and {self._count - len(self._first)} more")


def print_notes(notes: list[str]) -> None:
    """Print sentences about a dataset that a user should read."""
    for note in notes:
        err.print(f"note: {note}", style="yellow", markup=False)


@contextmanager
def lines_of(line: Callable[[], str]) -> Iterator[None]:
    """Print the result of `line` on stderr every 30 seconds while the block runs, unless stderr is a terminal."""
    if err.is_terminal:
        yield
        return
    ended = Event()

    def print_lines() -> None:
        while not ended.wait(_LINE_SECONDS):
            err.print(line())

    thread = Thread(target=print_lines, name="reflogp-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def progress_bar(label: str) -> Iterator[Bar]:
    """Show progress on stderr while the block runs: a bar if stderr is a terminal, otherwise a line every 30 seconds."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bar: Bar | None = None
    try:
        with Progress(*columns, console=err, disable=not err.is_terminal) as progress:
            bar = Bar(progress, visible(label))
            with lines_of(bar.line):
                yield bar
    finally:
        if bar is not None:
            bar.report()
