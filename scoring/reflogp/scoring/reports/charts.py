"""Draw histograms as SVG. The elements have CSS classes; their colors and fonts are set in the stylesheet (`STYLE`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from reflogp.store.texts import number, short_number

if TYPE_CHECKING:  # the service's own process draws no charts, and needs only the stylesheet
    from reflogp.scoring.reports.measures import Histograms

#: Stylesheet for reports and for the pages of a service, including their charts.
STYLE = Path(__file__).parent / "templates" / "style.css"

#: Size and margins of a chart, in SVG units. The plot is inside the margins, and the page scales the chart.
_WIDTH, _HEIGHT = 400.0, 180.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 26.0, 10.0, 42.0
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_FLOOR = _TOP + _PLOT_HEIGHT


def draw_histograms(name: str, title: str, unit: str, values: Histograms) -> Markup:
    """Return a chart. `name` is unique within the page, and consists of letters, digits and hyphens."""
    low, high = values.edges[0], values.edges[-1]
    most = max(max(counts) for counts in values.counts.values())
    y_ticks = _round_ticks(0, most, 3, whole=True)
    top = max(most, y_ticks[-1])

    def x_at(value: float) -> str:
        return _written(_LEFT + _PLOT_WIDTH * (value - low) / (high - low))

    def y_at(count: float) -> float:
        return _FLOOR - _PLOT_HEIGHT * count / top

    parts = [
        Markup(
            '<line class="{}" x1="{}" x2="{}" y1="{y}" y2="{y}"/><text class="y" x="{}" y="{y}" dy="0.32em">{}</text>'
        ).format("grid" if tick else "axis", _LEFT, _WIDTH - _RIGHT, _LEFT - 7, short_number(tick), y=_written(y_at(tick)))
        for tick in y_ticks
    ]
    parts += [
        Markup('<line class="tick" x1="{x}" x2="{x}" y1="{}" y2="{}"/><text class="x" x="{x}" y="{}">{}</text>').format(
            _FLOOR, _FLOOR + 4, _FLOOR + 18, _plain(tick), x=x_at(tick)
        )
        for tick in _round_ticks(low, high, 5)
        if low <= tick <= high
    ]
    parts.append(Markup('<text class="unit" x="{}" y="{}">{}</text>').format(_LEFT + _PLOT_WIDTH / 2, _HEIGHT - 6, unit))
    bar = Markup('<rect class="bar s{}" x="{}" y="{}" width="{}" height="{}"><title>{}: {} to {}: {}</title></rect>')
    width = max(_PLOT_WIDTH / (len(values.edges) - 1) - 0.6, 0.6)
    for at, (series, counts) in enumerate(values.counts.items()):
        for left, right, count in zip(values.edges, values.edges[1:], counts, strict=False):
            if count:
                y = y_at(count)
                said = series, _plain(left), _plain(right), number(count)
                parts.append(bar.format(at, x_at(left), _written(y), _written(width), _written(_FLOOR - y), *said))
    if values.zero:
        parts.append(Markup('<line class="zero" x1="{x}" x2="{x}" y1="{}" y2="{}"/>').format(_TOP, _FLOOR, x=x_at(0.0)))
    all_series = ", ".join(
        f"{series} ({number(sum(counts))} values, median {number(values.medians[series])})"
        for series, counts in values.counts.items()
    )
    return Markup(
        '<svg class="chart" role="img" viewBox="0 0 {:.0f} {:.0f}" aria-labelledby="{name}-title {name}-desc">'
        '<title id="{name}-title">{}</title><desc id="{name}-desc">{}</desc>{}</svg>'
    ).format(
        _WIDTH,
        _HEIGHT,
        title,
        f"Histogram from {_plain(low)} to {_plain(high)} {unit}: {all_series}.",
        Markup("").join(parts),
        name=name,
    )


def _round_ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Return evenly spaced round numbers (integers if `whole`) that cover the range in about `about` steps."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * count, 12) for count in range(first, last + 1)]


def _written(place: float) -> str:
    return f"{place:.2f}".rstrip("0").rstrip(".")


def _plain(value: float) -> str:
    """Format a number. If it differs from zero only by a rounding error, it becomes 0."""
    return short_number(0.0 if abs(value) < 1e-12 else value)
