"""The counts and rates of a scoring run, also of a job's. This module imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from reflogp.store.texts import counted, short_repr
from reflogp.store.windows import PROMPT_FILLS


@dataclass
class ScoreSummary:
    """The counts and rates of a scoring run. `sequences` is the sum of `hits`, `duplicates`, `scored` and `failed`.

    Attributes:
        rows: number of rows that were read.
        bad_rows: number of rows that have no values because they cannot be read, tokenized or scored.
        bad_row_numbers: row numbers (counted from 0) of the first hundred bad rows.
        dropped_rows: number of rows whose prompt alone fills max_length. TRL drops such rows before training.
        empty_prompts: number of rows without prompt tokens. The first completion token of such a row serves as context and has
            no value, as in TRL's loss.
        sequences: number of sequences with at least one completion token to score, in the rows that were tokenized and not
            dropped.
        hits: number of sequences whose log-probs were in the store before the run.
        duplicates: number of sequences that occurred earlier in the same run, or that this run found in the store because
            another run had stored them in the meantime.
        scored: number of sequences whose log-probs were computed.
        failed: number of sequences that could not be scored.
        tokens: number of tokens in the scored sequences, including prompts.
        seconds: wall time of the run.
        scoring_seconds: part of `seconds` during which at least one engine was computing.
        tokens_per_second: tokens divided by scoring_seconds.
        sharing_gain: number of tokens in the scored sequences, divided by the number of tokens that the passes computed; at
            least 1. In a pass, tokens that several sequences share count once, and padding does not count. None if nothing was
            computed, or if the engine cannot count the tokens.
        workers: largest number of engines that were computing at the same time; 0 if nothing was computed.
        reference_id: id of the reference that computed the values, 32 hex digits.
        snapshot: number of a snapshot that contains all values. It is the snapshot of the run's last commit. If nothing was
            committed, it is the newest snapshot at the start of the run.
        store: URI of the store.
        provenance: how the values were computed; None if nothing was computed.
        notes: sentences about the dataset that a user should read, such as "2 rows have no prompt tokens: …".
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
    sharing_gain: float | None = None
    workers: int = 0
    reference_id: str = ""
    snapshot: int = 0
    store: str = ""
    provenance: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return short_repr("ScoreSummary", *self.lines())

    def lines(self) -> list[str]:
        """Describe the run in two or three lines of text: counts, rates if anything was scored, reference and snapshot."""
        counts = (
            f"{counted(self.rows, 'row')}, {counted(self.sequences, 'sequence')}: {counted(self.hits, 'hit')}"
            + f", {self.scored:,} scored"
            + (f", {counted(self.duplicates, 'duplicate')}" if self.duplicates else "")
            + (f", {self.failed:,} failed" if self.failed else "")
            + (f"; {counted(self.bad_rows, 'bad row')}" if self.bad_rows else "")
            + (f"; {counted(self.dropped_rows, 'row')} dropped ({PROMPT_FILLS})" if self.dropped_rows else "")
        )
        rates = (
            f"{self.tokens:,} tokens in {self.scoring_seconds:.1f} s: {self.tokens_per_second:,.0f} tokens/s"
            + (f", sharing gain {self.sharing_gain:.1f}×" if self.sharing_gain else "")
            + (f", {self.workers} workers" if self.workers > 1 else "")
        )
        where = f"reference {self.reference_id}, snapshot {self.snapshot} of {self.store} ({self.seconds:.1f} s)"
        return [counts, *([rates] if self.scored else []), where]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
