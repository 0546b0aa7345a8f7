"""Shared console code: exit codes, progress on stderr, and a JSON object as the last line of stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment

from reflogp.scoring.runs.callbacks import BadRows
from reflogp.store import ReflogpError
from reflogp.store.texts import visible

#: Exit codes for success, failure, incorrect usage, and a dataset in which some rows have no values or cannot be used.
EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_MISSES = 0, 1, 2, 3
#: Exit code after Ctrl-C: 128 plus the signal number of SIGINT, as in shells.
EXIT_INTERRUPTED = 130
#: Seconds between progress lines when stderr is not a terminal.
_LINE_SECONDS = 30.0


class WatchInterruptedError(ReflogpError):
    """The user pressed Ctrl-C while watching a job. The job itself continues on the service."""


class SafeConsole(Console):
    """A console that prints untrusted text safely: on one line, with control and invisible characters escaped.

    Rich markup is interpreted only with `markup=True`; pass untrusted names in it through rich's `escape`.
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


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Name the extra to install if an import in the `with` block fails."""
    try:
        yield
    except ImportError as error:
        raise ReflogpError(f"this command needs reflogp[{extra}]: pip install 'reflogp[{extra}]' ({error})") from error


def print_json(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def print_result(result: dict[str, Any], as_json: bool, *lines: str) -> None:
    if as_json:
        print_json(result)
        return
    for line in lines:
        out.print(line)


class Bar(BadRows):
    """A progress bar with tokens per second and the time left."""

    def __init__(self, progress: Progress, label: str) -> None:
        super().__init__()
        self._progress = progress
        progress.add_task(visible(label), total=None, rate="")
        [self._task] = progress.tasks
        self._tokens = 0

    def begin(self, sequences: int) -> None:
        self._progress.update(self._task.id, total=sequences)

    def advance(self, sequences: int, tokens: int) -> None:
        self._tokens += tokens
        rate = self._tokens / self._task.elapsed if self._task.elapsed else 0.0
        self._progress.update(self._task.id, advance=sequences, rate=_rate(rate))

    def hashed(self, done: int, total: int) -> None:
        """Show that `done` of `total` units, such as bytes of weight files, have been processed."""
        self._progress.update(self._task.id, completed=done, total=total)

    def follow(self, label: str, done: int, total: int, tokens_per_second: float) -> None:
        """Show the progress of work that is done elsewhere."""
        rate = _rate(tokens_per_second)
        self._progress.update(self._task.id, description=visible(label), completed=done, total=total or None, rate=rate)

    def line(self) -> str:
        task = self._task
        total = "" if task.total is None else f" of {task.total:,.0f}"
        seconds = timedelta(seconds=round(task.elapsed or 0))
        return ", ".join(filter(None, (f"{task.description}: {task.completed:,.0f}{total}", task.fields["rate"], str(seconds))))


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""


def print_notes(notes: list[str]) -> None:
    for note in notes:
        err.print(f"note: {note}", style="yellow")


@contextmanager
def progress_bar(label: str) -> Iterator[Bar]:
    """Show progress on stderr while the block runs: a bar if stderr is a terminal, otherwise a line every 30 seconds."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", style="cyan"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=err, disable=not err.is_terminal)
    bar, ended = Bar(progress, label), Event()

    def print_lines() -> None:
        while not (ended.wait(_LINE_SECONDS) or err.is_terminal):
            err.print(bar.line())

    thread = Thread(target=print_lines, name="reflogp-progress", daemon=True)
    thread.start()
    try:
        with progress:
            yield bar
    finally:
        ended.set()
        thread.join()
        for line in bar.bad_row_lines():
            err.print(line, style="yellow")
