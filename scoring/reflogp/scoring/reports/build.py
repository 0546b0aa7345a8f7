"""Write a report: a self-contained page about a scored dataset, for `reflogp report` and for the jobs of a service.

The dataset is read twice: first to compute statistics, then to read the few examples that the page shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.tokenize import TokenizedDataset, TokenizedRows
from reflogp.scoring.reports import findings
from reflogp.scoring.reports.collect import Collected, ReportSummary, collect
from reflogp.scoring.reports.measures import (
    compare,
    find_duplicates,
    find_outliers,
    label_preference,
    make_figures,
    pair_preference,
)
from reflogp.scoring.reports.page import PAGE_NAME, Content, check_folder, render_page
from reflogp.scoring.reports.shown import read_shown
from reflogp.scoring.reports.truncation import TRL_MAX_LENGTH, cut, cuts, max_length_for_share
from reflogp.scoring.runs.callbacks import ProgressCallbacks
from reflogp.scoring.versus import Versus
from reflogp.store import Snapshot
from reflogp.store.files import write_atomically
from reflogp.store.windows import TrainerSettings, check_truncation

#: The page shows at most this many examples of each kind of outlier, and this many pairs whose completions hardly differ.
_SHOWN = 4
#: The page shows at most this many pairs with the lowest margins of implicit rewards.
_LOWEST = 10
#: The suggested max_length (`max_length_for_share`) leaves at least this fraction of the examples uncut.
_MOST = 0.99


def write_report(
    dataset: TokenizedDataset,
    snapshot: Snapshot,
    output: str,
    settings: TrainerSettings,
    *,
    score: str,
    model: str,
    watcher: ProgressCallbacks | None = None,
    versus: Versus | None = None,
) -> ReportSummary:
    """Write a report about a dataset: `output`/index.html.

    Args:
        settings: the trainer's max_length and truncation_mode. If max_length is None, the log-probs of all tokens are used, but
            the finding about truncation assumes TRL's default max_length.
    """
    started = time.monotonic()
    check_truncation(settings.max_length, settings.truncation_mode)
    folder = Path(output)
    check_folder(folder)
    name = dataset.source.name
    collected = collect(dataset, name, snapshot, settings, watcher, versus)
    page = make_page(
        collected, dataset.only, dataset.tokenizer, snapshot, settings, score=score, data=name, model=model, versus=versus
    )
    dataset.source.check_unchanged()  # the dataset was read twice and must not have changed in between
    with write_atomically(folder / PAGE_NAME) as partial:
        partial.write_bytes(page)
    summary = collected.summary
    summary.output, summary.seconds = str(folder / PAGE_NAME), time.monotonic() - started
    return summary


def make_page(
    collected: Collected,
    only: Callable[[set[int]], Iterable[TokenizedRows]],
    tokenizer: PreTrainedTokenizerBase,
    snapshot: Snapshot,
    settings: TrainerSettings,
    *,
    score: str,
    data: str,
    model: str,
    versus: Versus | None = None,
) -> bytes:
    """Return a report's page, in UTF-8. `collected.summary` is completed, except for `output` and `seconds`."""
    max_length, truncation_mode = settings.max_length, settings.truncation_mode
    duplicates, outliers = find_duplicates(collected, _SHOWN), find_outliers(collected, _SHOWN)
    pairs = pair_preference(collected) if collected.pairs else None
    labels = None if collected.pairs else label_preference(collected)
    comparison = compare(collected, versus, tokenizer, _LOWEST) if versus else None
    lengths = collected.lengths()
    at = cut(lengths, max_length or TRL_MAX_LENGTH, truncation_mode)
    enough = max_length_for_share(lengths, _MOST)

    noun, summary = "pair" if collected.pairs else "row", collected.summary
    said = [
        *findings.coverage_findings(collected, score),
        *findings.value_findings(collected, len(tokenizer)),
        *(findings.pair_findings(pairs, collected) if labels is None else findings.label_findings(labels)),
        *findings.comparison_findings(comparison),
        *findings.truncation_findings(at, max_length is not None, enough, noun),
        *findings.duplicate_findings(duplicates, summary.examples, noun),
        *findings.outlier_findings(outliers, summary.with_values),
    ]
    said.sort(key=lambda finding: ("fix", "check", "fact", "good").index(finding.kind))
    farthest = {place for kind in outliers for place, _ in kind.worst}
    compared = [place for place, _ in duplicates.alike_pairs]
    lowest = [place for place, _ in comparison.lowest] if comparison else []
    shown = read_shown({*farthest, *lowest, *compared}, compared, collected, only, tokenizer, snapshot, settings)
    content = Content(
        data=data,
        model=model,
        snapshot=snapshot,
        settings=settings,
        noun=noun,
        findings=said,
        collected=collected,
        figures=make_figures(collected),
        pairs=pairs,
        comparison=comparison,
        at=at,
        cuts=cuts(lengths, max_length, truncation_mode),
        duplicates=duplicates,
        outliers=outliers,
        shown=shown,
    )
    summary.accuracy = None if pairs is None else pairs.accuracy
    summary.accuracy_per_token = None if pairs is None else pairs.accuracy_per_token
    if comparison:
        summary.versus_missing, summary.implicit_reward_accuracy = comparison.missing, comparison.accuracy
        summary.versus_reference_id = comparison.versus.snapshot.reference_id
    summary.exact_duplicates, summary.contrary = duplicates.exact, duplicates.contrary
    summary.identical, summary.alike = duplicates.identical, duplicates.alike
    summary.outliers = {kind.name: kind.count for kind in outliers}
    summary.truncation = [asdict(one) for one in content.cuts]
    summary.findings = [asdict(finding) for finding in said]
    summary.reference_id, summary.snapshot, summary.store = snapshot.reference_id, snapshot.number, snapshot.store_uri
    return render_page(content).encode("utf-8", "replace")
