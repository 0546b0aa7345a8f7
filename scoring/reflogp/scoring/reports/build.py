"""Write the output of `reflogp report`: a self-contained page about a scored dataset.

`write_report` reads the dataset twice: first to compute statistics, then to read the few examples that the page shows.
`write_report` loads no model and does not write to the store.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reflogp.scoring.data.tokenized import TokenizedDataset
from reflogp.scoring.reports import findings
from reflogp.scoring.reports.collect import ALIKE, Collected, collect
from reflogp.scoring.reports.duplicates import find_duplicates
from reflogp.scoring.reports.figures import label_preference, make_figures, pair_preference
from reflogp.scoring.reports.outliers import find_outliers
from reflogp.scoring.reports.page import PAGE_NAME, Content, check_folder, render_page
from reflogp.scoring.reports.shown import read_shown
from reflogp.scoring.reports.truncation import TRL_MAX_LENGTH, cut, cuts, max_length_for_share
from reflogp.scoring.runs.callbacks import ProgressCallbacks
from reflogp.store import Snapshot
from reflogp.store.files import write_atomically
from reflogp.store.texts import counted, short_repr
from reflogp.store.windows import TrainerSettings, check_truncation

#: The page shows at most this many examples of each kind of outlier, this many pairs whose completions hardly differ, and this
#: many near duplicates (each with the earlier example that it nearly repeats).
_SHOWN = 4
#: The suggested max_length (`max_length_for_share`) leaves at least this fraction of the examples uncut.
_MOST = 0.99


@dataclass
class ReportSummary:
    """The statistics and findings of a report.

    Attributes:
        rows: number of rows read.
        examples: number of tokenized examples. A row is one example, or two if pairs are split for KTO.
        with_values: number of examples with log-probs.
        missing: number of tokenized examples whose log-probs are not in the snapshot.
        missing_row_numbers: 0-based row numbers of the first hundred missing examples.
        bad_rows: number of rows that cannot be read or tokenized, have an empty completion, or have damaged values.
        bad_row_numbers: 0-based row numbers of the first hundred bad rows.
        dropped_rows: number of examples that TRL drops because of max_length. They are counted in `examples`, but not in
            `with_values` or `missing`.
        coverage: with_values / (with_values + missing + bad_rows).
        accuracy: fraction of pairs whose chosen completion has the higher sum of log-probs; None for KTO or if no pair has
            values.
        accuracy_per_token: fraction of pairs whose chosen completion has the higher mean log-prob per token; None for KTO or if
            no pair has values.
        exact_duplicates: number of examples that exactly repeat an earlier example (`Duplicates.exact`).
        contrary: number of examples that also occur with the opposite preference (`Duplicates.contrary`).
        identical: number of pairs whose completions are the same (`Duplicates.identical`).
        near_duplicates: estimated number of examples that nearly repeat an earlier example (`Duplicates.near`).
        alike: number of pairs whose completions hardly differ but are not identical.
        outliers: dict from each kind of outlier, such as "very unlikely completions", to its number of examples. Kinds without
            examples are left out.
        truncation: one dict for each max_length that the report compares. Its keys are the fields of `truncation.Cut`.
        findings: the findings at the top of the page, as dicts with the keys `kind` ("fix", "check", "fact" or "good"), `text`
            and `command` (None if there is no command to run).
        seconds: number of seconds that it took to write the report.
        reference_id: id of the reference whose values are reported, 32 hexadecimal digits.
        snapshot: number of the snapshot that the values were read from.
        store: URI of the store.
        output: path of the page.
    """

    rows: int = 0
    examples: int = 0
    with_values: int = 0
    missing: int = 0
    missing_row_numbers: list[int] = field(default_factory=list)
    bad_rows: int = 0
    bad_row_numbers: list[int] = field(default_factory=list)
    dropped_rows: int = 0
    coverage: float = 0.0
    accuracy: float | None = None
    accuracy_per_token: float | None = None
    exact_duplicates: int = 0
    contrary: int = 0
    identical: int = 0
    near_duplicates: int = 0
    alike: int = 0
    outliers: dict[str, int] = field(default_factory=dict)
    truncation: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    reference_id: str = ""
    snapshot: int = 0
    store: str = ""
    output: str = ""

    def __repr__(self) -> str:
        accuracy = f", accuracy {100 * self.accuracy:.1f}%" if self.accuracy is not None else ""
        return short_repr(
            "ReportSummary",
            f"{self.with_values:,} of {counted(self.examples, 'example')} with values{accuracy}",
            *(f"{finding['kind']}: {finding['text']}" for finding in self.findings if finding["kind"] in ("fix", "check")),
            f"reference {self.reference_id}, snapshot {self.snapshot} of {self.store}",
            f"{self.output}, written in {self.seconds:.1f} s",
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def write_report(
    dataset: TokenizedDataset,
    snapshot: Snapshot,
    output: str,
    settings: TrainerSettings,
    *,
    score: str,
    model: str,
    watcher: ProgressCallbacks | None = None,
) -> ReportSummary:
    """Write a report about a dataset: `output`/index.html.

    Args:
        dataset: the tokenized dataset.
        snapshot: the snapshot to read values from.
        output: folder for the report.
        settings: the trainer's max_length and truncation_mode. If max_length is None, the log-probs of all tokens are used, but
            the finding about truncation assumes TRL's default max_length.
        score: command that the page shows for scoring the missing rows.
        model: model name or path as the user gave it.
        watcher: callbacks that report progress.

    Raises:
        UsageError: the settings are invalid, the dataset cannot be used, or `output` is a file, contains something other than a
            report, or cannot be written.
        FileChangedError: a file of the dataset was changed while the report was being written.
    """
    started = time.monotonic()
    source, max_length, truncation_mode = dataset.source, settings.max_length, settings.truncation_mode
    check_truncation(max_length, truncation_mode)
    folder = Path(output)
    check_folder(folder)
    collected = collect(dataset, snapshot, settings, watcher)
    duplicates, outliers = find_duplicates(collected, _SHOWN), find_outliers(collected, _SHOWN)
    pairs = pair_preference(collected) if collected.pairs else None
    labels = None if collected.pairs else label_preference(collected)
    alike = _alike(collected)
    lengths = collected.lengths()
    at = cut(lengths, max_length or TRL_MAX_LENGTH, truncation_mode)
    enough = max_length_for_share(lengths, _MOST)

    noun, coverage = "pair" if collected.pairs else "row", collected.coverage
    said = [
        *findings.coverage_findings(coverage, score),
        *findings.value_findings(collected, len(dataset.tokenizer)),
        *(findings.pair_findings(pairs, collected) if labels is None else findings.label_findings(labels)),
        *findings.truncation_findings(at, max_length is not None, enough, noun),
        *findings.duplicate_findings(duplicates, coverage.examples, noun),
        *findings.outlier_findings(outliers, coverage.with_values),
    ]
    said.sort(key=lambda finding: ("fix", "check", "fact", "good").index(finding.kind))
    near = {place for pair in duplicates.near_pairs for place in (pair.first, pair.second)}
    farthest = {place for kind in outliers for place, _ in kind.worst}
    compared = [place for place, _ in alike[:_SHOWN]]
    shown = read_shown({*near, *farthest, *compared}, compared, collected, dataset, snapshot, settings)
    content = Content(
        data=source.name,
        model=model,
        snapshot=snapshot,
        settings=settings,
        noun=noun,
        findings=said,
        collected=collected,
        figures=make_figures(collected, truncation_mode),
        pairs=pairs,
        at=at,
        cuts=cuts(lengths, max_length, truncation_mode),
        duplicates=duplicates,
        outliers=outliers,
        alike=alike[:_SHOWN],
        alike_count=len(alike),
        shown=shown,
    )
    source.check_unchanged()  # the dataset was read twice and must not have changed in between
    with write_atomically(folder / PAGE_NAME) as partial:
        partial.write_text(render_page(content), encoding="utf-8", errors="replace")
    return ReportSummary(
        rows=coverage.rows,
        examples=coverage.examples,
        with_values=coverage.with_values,
        missing=coverage.missing,
        missing_row_numbers=coverage.missing_row_numbers,
        bad_rows=coverage.bad_rows,
        bad_row_numbers=[row for row, _ in coverage.problems],
        dropped_rows=coverage.dropped,
        coverage=coverage.share(),
        accuracy=None if pairs is None else pairs.accuracy,
        accuracy_per_token=None if pairs is None else pairs.accuracy_per_token,
        exact_duplicates=duplicates.exact,
        contrary=duplicates.contrary,
        identical=duplicates.identical,
        near_duplicates=duplicates.near,
        alike=len(alike),
        outliers={kind.name: kind.count for kind in outliers},
        truncation=[asdict(one) for one in content.cuts],
        findings=[asdict(finding) for finding in said],
        seconds=time.monotonic() - started,
        reference_id=snapshot.reference_id,
        snapshot=snapshot.number,
        store=snapshot.store_uri,
        output=str(folder / PAGE_NAME),
    )


def _alike(collected: Collected) -> list[tuple[int, float]]:
    """Return (index in `collected`, similarity) for each pair whose completions hardly differ, most similar first.

    Pairs with identical completions are left out.
    """
    if collected.similarity is None:
        return []
    chosen, rejected = (side.keys for side in collected.sides.values())
    places = np.flatnonzero((collected.similarity >= ALIKE) & (chosen != rejected))
    order = np.argsort(-collected.similarity[places], kind="stable")
    return [(int(place), float(collected.similarity[place])) for place in places[order]]
