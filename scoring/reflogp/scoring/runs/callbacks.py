"""Define callbacks for the progress of a scoring run, a join or a report, and implement them with a tqdm progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm.auto import tqdm


class ProgressCallbacks:
    """Callbacks for the progress of a scoring run, a join or a report.

    A callback does nothing unless a subclass overrides it. Joins and reports call only `begin`, `advance` and `bad_row`, and
    pass numbers of rows instead of numbers of sequences.
    """

    def begin(self, sequences: int) -> None:
        """Report the estimated number of sequences in the dataset.

        This method is called once, when the first rows have been read.
        """

    def read(self, rows: int) -> None:
        """Report that `rows` rows have been read and tokenized so far."""

    def advance(self, sequences: int, tokens: int) -> None:
        """Report that further sequences are done; `sequences` is their number.

        `tokens` is the number of tokens that the engine processed for these sequences. It is 0 if the engine was not needed,
        for example because the store already has the values, or if the sequences cannot be scored.
        """

    def hits(self, sequences: int) -> None:
        """Report how many of the sequences that are done next had values in the store when the run began."""

    def bad_row(self, row: int, problem: str) -> None:
        """Report a row that cannot be used or scored; `problem` is the reason."""

    def committed(self, snapshot: int) -> None:
        """Report a commit; `snapshot` is the number of the new snapshot."""


#: Maximum number of bad rows that are named; further ones are only counted.
_NAMED_ROWS = 10


class BadRows(ProgressCallbacks):
    """Counts bad rows, and keeps the first ten: `first_bad` is a list of (row number, reason)."""

    def __init__(self) -> None:
        self.bad_rows = 0
        self.first_bad: list[tuple[int, str]] = []

    def bad_row(self, row: int, problem: str) -> None:
        self.bad_rows += 1
        if len(self.first_bad) < _NAMED_ROWS:
            self.first_bad.append((row, problem))

    def bad_row_lines(self) -> list[str]:
        if not self.bad_rows:
            return []
        were = "1 row was" if self.bad_rows == 1 else f"{self.bad_rows:,} rows were"
        lines = [f"{were} skipped; remove them before training. Row numbers start at 0:"]
        lines += [f"  row {row}: {problem}" for row, problem in self.first_bad]
        if more := self.bad_rows - len(self.first_bad):
            lines.append(f"  … and {more:,} more")
        return lines


class ProgressBar(BadRows):
    def __init__(self, bar: tqdm) -> None:
        super().__init__()
        self._bar = bar
        self._tokens = 0

    def begin(self, sequences: int) -> None:
        self._bar.total = sequences or None
        self._bar.refresh()

    def advance(self, sequences: int, tokens: int) -> None:
        self._tokens += tokens
        self._bar.set_postfix_str(f"{self._tokens:,} tokens" if self._tokens else "", refresh=False)
        self._bar.update(sequences)


@contextmanager
def progress_bar(label: str, show: bool | None) -> Iterator[ProgressBar]:
    """Show a progress bar while the `with` block runs. When the block ends, print the first bad rows unless `show` is False."""
    from tqdm.auto import tqdm  # the command line has its own bar, and can be installed without tqdm

    with tqdm(desc=label, unit=" sequences", disable=None if show is None else not show) as bar:
        progress = ProgressBar(bar)
        try:
            yield progress
        finally:
            for line in progress.bad_row_lines() if show is not False else ():
                bar.write(line)
