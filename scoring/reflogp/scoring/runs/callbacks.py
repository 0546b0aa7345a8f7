"""Define callbacks for the progress of a scoring run, a join or a report, and implement them with a tqdm progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reflogp.store.texts import counted

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

    def bad_row(self, row: int, problem: str) -> None:
        """Report a row that cannot be used or scored; `problem` is the reason."""

    def committed(self, snapshot: int) -> None:
        """Report a commit; `snapshot` is the number of the new snapshot."""


#: Maximum number of bad rows that are printed; further bad rows are only counted.
_PRINTED_ROWS = 10


class ProgressBar(ProgressCallbacks):
    def __init__(self, bar: tqdm) -> None:
        self._bar = bar
        self._tokens = 0
        self._bad: list[str] = []
        self._bad_rows = 0

    def begin(self, sequences: int) -> None:
        self._bar.total = sequences or None
        self._bar.refresh()

    def advance(self, sequences: int, tokens: int) -> None:
        self._tokens += tokens
        self._bar.set_postfix_str(f"{self._tokens:,} tokens" if self._tokens else "", refresh=False)
        self._bar.update(sequences)

    def bad_row(self, row: int, problem: str) -> None:
        self._bad_rows += 1
        if len(self._bad) < _PRINTED_ROWS:
            self._bad.append(f"row {row} was left out: {problem}")

    def print_bad_rows(self) -> None:
        for line in self._bad:
            self._bar.write(line)
        if self._bad_rows > len(self._bad):
            self._bar.write(f"… and {counted(self._bad_rows - len(self._bad), 'more row')}")


@contextmanager
def progress_bar(label: str, show: bool | None) -> Iterator[ProgressBar]:
    """Show a progress bar while the `with` block runs. When the block ends, print the first bad rows unless `show` is False."""
    from tqdm.auto import tqdm  # the command line has its own bar, and can be installed without tqdm

    with tqdm(desc=label, unit=" sequences", disable=None if show is None else not show) as bar:
        progress = ProgressBar(bar)
        try:
            yield progress
        finally:
            if show is not False:
                progress.print_bad_rows()
