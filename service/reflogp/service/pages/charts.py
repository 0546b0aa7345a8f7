"""Draw the charts of the web pages as inline SVG: histograms, and the throughput of a job over time.

Colors and fonts come from the CSS classes in the stylesheet. Every chart has a title and a text description.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
from reflogp.store.texts import counted, duration, number

#: Possible distances between two ticks on a time axis, in seconds: 1, 2, 5, 10, 15 and 30 seconds or minutes, and 1, 2, 5 and
#: 10 hours. Longer distances are multiples of half a day.
_TIME_STEPS = [size * count for size in (1, 60, 3600) for count in (1, 2, 5, 10, 15, 30) if size * count < 43200]


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


def throughput(name: str, title: str, points: Sequence[tuple[float, float]]) -> Markup:
    """Draw tokens per second over the running time of a job.

    Args:
        name: id that is unique on the page, made of letters, digits and hyphens.
        title: title of the chart.
        points: throughput at several times, in chronological order. Each point is a pair (seconds since the start, tokens
            per second).
    """
    points = [(second, rate) for second, rate in points if math.isfinite(second) and math.isfinite(rate)]
    if not points:
        return chart(name, title, "There are no measurements yet.", message("no measurements yet"))
    rates = [rate for _, rate in points]
    end = max(points[-1][0], 1e-3)
    described = (
        f"{counted(len(points), 'measurement')} over {duration(end)}: minimum {number(round(min(rates)))}, "
        f"maximum {number(round(max(rates)))}, latest {number(round(rates[-1]))} tokens per second."
    )
    ticks = round_ticks(0, max(*rates, 1.0), 3)
    top = ticks[-1]
    places = [f"{written(x_at(second, 0, end))},{written(y_at(rate, 0, top))}" for second, rate in points]
    floor = written(TOP + PLOT_HEIGHT)
    outline = f"{places[0].partition(',')[0]},{floor} {' '.join(places)} {places[-1].partition(',')[0]},{floor}"
    x, y = places[-1].split(",")
    plot = Markup(
        '{}{}<polygon class="area" points="{}"/><polyline class="line" points="{}"/>'
        '<circle class="last" cx="{}" cy="{}" r="3.5"/>'
    ).format(grid(ticks, 0, top), x_axis(_time_ticks(end), 0, end, duration, "running time"), outline, " ".join(places), x, y)
    return chart(name, title, described, plot)


def _time_ticks(end: float) -> list[float]:
    """Return the positions of up to six ticks on a time axis from 0 to `end`, in seconds."""
    if end < 4:
        return round_ticks(0, end, 4)
    step = next((step for step in _TIME_STEPS if end / step <= 5), None)
    if step is None:
        step = 43200 * math.ceil(end / 5 / 43200)
    return [float(second) for second in range(0, int(end) + 1, step)]


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
