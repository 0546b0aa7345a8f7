"""Render a report's page: a single HTML file with inline SVG charts and without scripts or external resources.

If the dataset's texts contain scripts or links to resources, the page's content security policy prevents browsers from running
or loading them.
"""

from __future__ import annotations

import base64
import hashlib
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from reflogp.scoring.reports.chart_frame import (
    PLOT_HEIGHT,
    PLOT_WIDTH,
    STYLE,
    TOP,
    chart,
    grid,
    plain,
    round_ticks,
    written,
    x_at,
    x_axis,
    y_at,
)
from reflogp.scoring.reports.collect import ALIKE, Collected
from reflogp.scoring.reports.comparison import Comparison
from reflogp.scoring.reports.duplicates import Duplicates
from reflogp.scoring.reports.figures import Density, Figures, Histograms, PairPreference
from reflogp.scoring.reports.findings import Finding, verdict
from reflogp.scoring.reports.outliers import OutlierKind
from reflogp.scoring.reports.shown import LEVELS, Shown, visible
from reflogp.scoring.reports.sketches import MOST_SKETCHED, NEAR, RUN_TOKENS
from reflogp.scoring.reports.truncation import Cut
from reflogp.store import Snapshot, UsageError
from reflogp.store.texts import hide_secrets, moment, number, percent
from reflogp.store.windows import TrainerSettings

PAGE_NAME = "index.html"
#: Tag in the head of every report's page. `check_folder` recognizes an earlier report by this tag.
_MARK = '<meta name="generator" content="reflogp report">'
_HEAD_BYTES = 2048
_TEMPLATES = Path(__file__).parent / "templates"
#: Lower bounds of the shades in the length chart, as fractions of the count in the fullest cell.
_SHADES = (0.0, 0.05, 0.15, 0.3, 0.5, 0.75)


@dataclass(frozen=True)
class Content:
    """The content of a report's page.

    Attributes:
        noun: what an example is called: "pair" or "row".
        pairs: how often the reference prefers chosen; None for KTO or if no pair has values.
        comparison: the comparison with a second model; None if there is none.
        at: the effect of the trainer's max_length on the dataset. If the user set no max_length, the effect of TRL's default.
        cuts: the effects of several values of max_length.
        shown: dict from the index of each displayed example to what the page displays for it.
    """

    data: str
    model: str
    snapshot: Snapshot
    settings: TrainerSettings
    noun: str
    findings: list[Finding]
    collected: Collected
    figures: Figures | None
    pairs: PairPreference | None
    comparison: Comparison | None
    at: Cut
    cuts: list[Cut]
    duplicates: Duplicates
    outliers: list[OutlierKind]
    shown: dict[int, Shown]


def check_folder(folder: Path) -> None:
    """Raise UsageError if the path is a file, a broken link, or a folder with any content other than an earlier report."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise UsageError(
            f"the output {folder} is not a folder, but a report needs one. Use a new or empty folder, or the folder of an "
            "earlier report"
        )
    # If an earlier process was killed while it wrote a report, .partial files may remain.
    names = {entry.name for entry in folder.iterdir() if not entry.name.endswith(".partial")}
    other = sorted(names - {PAGE_NAME} if _is_report(folder / PAGE_NAME) else names)
    if other:
        raise UsageError(
            f"the folder {folder} contains {other[0]}, which is not part of a report; nothing was changed. Use an empty "
            "folder, or the folder of an earlier report"
        )


def _is_report(page: Path) -> bool:
    if not page.is_file():
        return False
    with page.open("rb") as file:
        return _MARK.encode() in file.read(_HEAD_BYTES)


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


def render_page(content: Content) -> str:
    style = STYLE.read_text(encoding="utf-8") + (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    images = " img-src data:;" if any(example.images for example in content.shown.values()) else ""
    return _TEMPLATE.render(
        content=content,
        verdict=verdict(content.findings),
        draw_histograms=draw_histograms,
        draw_density=draw_density,
        mark=Markup(_MARK),
        style=Markup(style),
        policy=f"default-src 'none';{images} style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        zip=zip,
        name=Path(content.data).name or content.data,
        made=moment(datetime.now(UTC)),
        version=version("reflogp"),
        levels=LEVELS,
        near=NEAR,
        alike_from=ALIKE,
        run_tokens=RUN_TOKENS,
        most_sketched=MOST_SKETCHED,
    )


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def draw_histograms(name: str, title: str, unit: str, values: Histograms) -> Markup:
    low, high = values.edges[0], values.edges[-1]
    most = max(max(counts) for counts in values.counts.values())
    ticks = round_ticks(0, most, 3, whole=True)
    top = max(most, ticks[-1])
    parts = [grid(ticks, 0, top), x_axis(round_ticks(low, high, 5), low, high, plain, unit)]
    for at, (series, counts) in enumerate(values.counts.items()):
        for left, right, count in zip(values.edges, values.edges[1:], counts, strict=False):
            if count:
                y, width = y_at(count, 0, top), PLOT_WIDTH * (right - left) / (high - low)
                parts.append(
                    Markup(
                        '<rect class="bar s{}" x="{}" y="{}" width="{}" height="{}"><title>{}: {} to {}: {}</title></rect>'
                    ).format(
                        at,
                        written(x_at(left, low, high)),
                        written(y),
                        written(max(width - 0.6, 0.6)),
                        written(TOP + PLOT_HEIGHT - y),
                        series,
                        plain(left),
                        plain(right),
                        number(count),
                    )
                )
    if values.zero:
        line = Markup('<line class="zero" x1="{x}" x2="{x}" y1="{}" y2="{}"/>')
        parts.append(line.format(TOP, TOP + PLOT_HEIGHT, x=written(x_at(0.0, low, high))))
    said = ", ".join(
        f"{series} ({number(sum(counts))} values, median {number(values.medians[series])})"
        for series, counts in values.counts.items()
    )
    described = f"Histogram from {plain(low)} to {plain(high)} {unit}: {said}."
    return chart(name, title, described, Markup("").join(parts))


def draw_density(name: str, density: Density) -> Markup:
    """Draw the cells of a 2-D histogram, darker for higher counts, and a line through the medians of the columns."""
    left, right, low, high = density.lengths[0], density.lengths[-1], density.means[0], density.means[-1]
    fullest = max(max(column) for column in density.counts)
    ticks = [tick for tick in round_ticks(low, high, 4) if low <= tick <= high]
    parts = [grid(ticks, low, high, plain), _token_axis(left, right, "tokens of the completion")]
    width, height = PLOT_WIDTH / len(density.counts), PLOT_HEIGHT / len(density.counts[0])
    for x, column in zip(density.lengths, density.counts, strict=False):
        for y, count in zip(density.means[1:], column, strict=False):
            if count:
                shade = sum(count / fullest > share for share in _SHADES) - 1
                parts.append(
                    Markup('<rect class="cell d{}" x="{}" y="{}" width="{}" height="{}"/>').format(
                        max(0, shade),
                        written(x_at(x, left, right)),
                        written(y_at(y, low, high)),
                        written(width),
                        written(height),
                    )
                )
    half = (density.lengths[1] - density.lengths[0]) / 2
    medians = [
        (x_at(x + half, left, right), y_at(min(max(median, low), high), low, high))
        for x, median in zip(density.lengths, density.medians, strict=False)
        if median is not None
    ]
    parts.append(
        Markup('<polyline class="line m" points="{}"/>').format(" ".join(f"{written(x)},{written(y)}" for x, y in medians))
    )
    described = (
        f"Histogram of completions by length, from {_tokens(left)} to {_tokens(right)} tokens, and by mean log-prob, from "
        f"{plain(low)} to {plain(high)} nats per token. Rank correlation between length and mean log-prob: "
        f"{number(density.correlation)}."
    )
    return chart(name, "Mean log-prob per token against length", described, Markup("").join(parts))


def _token_axis(low: float, high: float, unit: str) -> Markup:
    """Return an x axis for numbers of tokens, with at most about seven ticks at powers of two. Bounds are given as log2."""
    powers = [float(power) for power in range(math.ceil(low), math.floor(high) + 1)]
    return x_axis(powers[:: math.ceil(len(powers) / 7) or 1], low, high, _tokens, unit)


def _tokens(power: float) -> str:
    return number(round(2**power))


#: Compiled when this module is imported, because compiling takes longer than writing a small report.
_TEMPLATE = _compiled()
