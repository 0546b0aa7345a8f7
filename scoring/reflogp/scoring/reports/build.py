"""Write a report: a self-contained page about a scored dataset, for `reflogp report` and for the jobs of a service.

The dataset is read twice: first to compute statistics, then to read the few examples that the page shows.

The page is a single HTML file with inline SVG charts and without scripts or external resources. If the dataset's texts contain
scripts or links to resources, the page's content security policy prevents browsers from running or loading them.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from transformers import PreTrainedTokenizerBase

from reflogp.scoring.data.tokenize import TokenizedDataset, TokenizedRows
from reflogp.scoring.reports import findings
from reflogp.scoring.reports.charts import STYLE, draw_histograms
from reflogp.scoring.reports.collect import ALIKE, Collected, ReportSummary, collect
from reflogp.scoring.reports.findings import Finding, verdict
from reflogp.scoring.reports.measures import (
    compare,
    find_duplicates,
    find_outliers,
    label_preference,
    make_figures,
    pair_preference,
)
from reflogp.scoring.reports.shown import LEVELS, Shown, read_shown, visible
from reflogp.scoring.reports.truncation import TRL_MAX_LENGTH, cut, cuts, max_length_for_share
from reflogp.scoring.runs.callbacks import ProgressCallbacks
from reflogp.scoring.versus import Versus
from reflogp.store import Snapshot, UsageError
from reflogp.store.files import write_atomically
from reflogp.store.texts import hide_secrets, moment, number, percent
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
    all_cuts = cuts(lengths, max_length, truncation_mode)
    summary.accuracy = None if pairs is None else pairs.accuracy
    summary.accuracy_per_token = None if pairs is None else pairs.accuracy_per_token
    if comparison:
        summary.versus_missing, summary.implicit_reward_accuracy = comparison.missing, comparison.accuracy
        summary.versus_reference_id = comparison.versus.snapshot.reference_id
    summary.exact_duplicates, summary.contrary = duplicates.exact, duplicates.contrary
    summary.identical, summary.alike = duplicates.identical, duplicates.alike
    summary.outliers = {kind.name: kind.count for kind in outliers}
    summary.truncation = [asdict(one) for one in all_cuts]
    summary.findings = [asdict(finding) for finding in said]
    summary.reference_id, summary.snapshot, summary.store = snapshot.reference_id, snapshot.number, snapshot.store_uri
    page = render_page(
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
        cuts=all_cuts,
        duplicates=duplicates,
        outliers=outliers,
        shown=shown,
    )
    return page.encode("utf-8", "replace")


PAGE_NAME = "index.html"
#: Tag in the head of every report's page. `check_folder` recognizes an earlier report by this tag.
_MARK = '<meta name="generator" content="reflogp report">'
_HEAD_BYTES = 2048
_TEMPLATES = Path(__file__).parent / "templates"


def check_folder(folder: Path) -> None:
    """Raise UsageError if `folder` is a file, or if the page would replace a file that is not a report."""
    page = folder / PAGE_NAME
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise UsageError(f"the output {folder} is not a folder, but a report needs one")
    if page.exists() and _MARK.encode() not in page.read_bytes()[:_HEAD_BYTES]:
        raise UsageError(f"{page} is not a report; nothing was changed. Use another folder")


def _compiled() -> Template:
    # The template escapes all text from the dataset. As a second line of defense, the content security policy blocks scripts
    # and requests.
    environment = Environment(autoescape=True, loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "number": number,
        "percent": percent,
        "signed": _signed,
        "visible": visible,
        "hide_secrets": hide_secrets,
    }
    return environment.get_template("report.html")


def render_page(data: str, findings: list[Finding], shown: dict[int, Shown], **content: Any) -> str:
    style = STYLE.read_text(encoding="utf-8") + (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    images = " img-src data:;" if any(example.images for example in shown.values()) else ""
    return _TEMPLATE.render(
        content={"data": data, "findings": findings, "shown": shown, **content},
        verdict=verdict(findings),
        draw_histograms=draw_histograms,
        mark=Markup(_MARK),
        style=Markup(style),
        policy=f"default-src 'none';{images} style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        name=Path(data).name or data,
        made=moment(datetime.now(UTC)),
        version=version("reflogp"),
        levels=LEVELS,
        alike_from=ALIKE,
    )


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


#: Compiled when this module is imported, because compiling takes longer than writing a small report.
_TEMPLATE = _compiled()
