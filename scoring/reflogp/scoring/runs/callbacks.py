"""Callbacks with which a scoring run, a join or a report tells its caller how far it is."""

from __future__ import annotations


class ProgressCallbacks:
    """Callbacks for the progress of a scoring run, a join or a report. Each does nothing unless a subclass overrides it."""

    def begin(self, sequences: int) -> None:
        """Report the estimated number of sequences in the dataset; called once, when the first rows were read."""

    def read(self, rows: int) -> None:
        """Report that `rows` rows in total are read and tokenized."""

    def advance(self, sequences: int, tokens: int) -> None:
        """Report that `sequences` more sequences are done, and that `tokens` tokens were computed for them."""

    def bad_row(self, row: int, problem: str) -> None:
        """Report a row that has no values after this run, and why."""

    def note(self, row: int, remark: str) -> None:
        """Report a remark about a row that has values."""

    def committed(self, snapshot: int) -> None:
        """Report a commit; `snapshot` is the number of the new snapshot."""
