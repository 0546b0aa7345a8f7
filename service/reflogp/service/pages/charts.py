"""Draw the histograms of the web pages as inline SVG.

Colors and fonts come from the CSS classes in the stylesheet. Every histogram has a title and a text description.
"""

from __future__ import annotations

import math

from markupsafe import Markup

from reflogp.scoring.reports.chart_frame import (
    PLOT_HEIGHT,
    PLOT_WIDTH,
    TOP,
    chart,
    grid,
    message,
    plain,
    round_ticks,
    written,
    x_at,
    x_axis,
    y_at,
)
from reflogp.service.models import Histogram
from reflogp.store.texts import counted


def histogram(name: str, title: str, unit: str, values: Histogram) -> Markup:
    """Draw a histogram as a bar chart.

    Args:
        name: id that is unique on the page, made of letters, digits and hyphens.
        title: chart title that says what is counted.
        unit: unit of the values, shown below the axis.
        values: counts and edges of the bars. The bars may differ in width.
    """
    total = sum(values.counts)
    low, high = (values.edges[0], values.edges[-1]) if values.edges else (0.0, 0.0)
    if not total or not (math.isfinite(low) and math.isfinite(high)):
        return chart(name, title, "There are no values.", message("no values"))
    if high <= low:
        low, high = low - 0.5, high + 0.5
    most = max(values.counts)
    fullest = values.counts.index(most)
    described = (
        f"{counted(total, 'value')}, in bars from {plain(values.edges[0])} to {plain(values.edges[-1])} {unit}. "
        f"The tallest bar, {plain(values.edges[fullest])} to {plain(values.edges[fullest + 1])}, has {counted(most, 'value')}. "
        f"The median is about {plain(_median(values))}."
    )
    ticks = round_ticks(0, most, 3, whole=True)
    top = max(most, ticks[-1])
    parts = [grid(ticks, 0, top), x_axis(round_ticks(low, high, 5), low, high, plain, unit)]
    for left, right, count in zip(values.edges, values.edges[1:], values.counts, strict=False):
        if right <= left:
            left, right = low, high
        if count:
            x, width = x_at(left, low, high), PLOT_WIDTH * (right - left) / (high - low)
            y = y_at(count, 0, top)
            parts.append(
                Markup('<rect class="bar" x="{}" y="{}" width="{}" height="{}"><title>{} to {}: {}</title></rect>').format(
                    written(x),
                    written(y),
                    written(max(width - 0.6, 0.6)),
                    written(TOP + PLOT_HEIGHT - y),
                    plain(left),
                    plain(right),
                    count,
                )
            )
    return chart(name, title, described, Markup("").join(parts))


def _median(values: Histogram) -> float:
    """Estimate the median of a histogram's values.

    The estimate assumes that the values within each bar are evenly distributed.
    """
    half, below = sum(values.counts) / 2, 0
    for left, right, count in zip(values.edges, values.edges[1:], values.counts, strict=False):
        if count and below + count >= half:
            return left + (right - left) * (half - below) / count
        below += count
    return values.edges[-1]
