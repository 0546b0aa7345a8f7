"""Charts as SVG that stands in a page: a histogram, and throughput over time.

Knows numbers and SVG; colours and fonts are the stylesheet's, by class. Every chart has a title and a description in words.
Called by the pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from reflogp_service.server.models import Histogram
from reflogp_service.server.pages.formats import duration, number, short_number

#: Of a chart, in the SVG's own units; the page scales it. The plot lies inside the margins.
_WIDTH, _HEIGHT = 400.0, 180.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 26.0, 10.0, 42.0
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
#: Seconds between two ticks of time: 1, 2, 5, 10, 15 and 30 of seconds, minutes, hours; then days.
_TIME_STEPS = [size * count for size in (1, 60, 3600) for count in (1, 2, 5, 10, 15, 30) if size * count < 43200]


def histogram(name: str, title: str, unit: str, values: Histogram) -> Markup:
    """Bars between edges.

    Args:
        name: unique in the page; letters, digits and hyphens.
        title: what is counted.
        unit: of the edges, below the axis.
        values: equal or unequal widths.
    """
    total = sum(values.counts)
    low, high = (values.edges[0], values.edges[-1]) if values.edges else (0.0, 0.0)
    if not total or not (math.isfinite(low) and math.isfinite(high)):
        return _chart(name, title, "There are no values.", _message("no values"))
    if high <= low:
        low, high = low - 0.5, high + 0.5
    most = max(values.counts)
    fullest = values.counts.index(most)
    described = (
        f"{number(total)} values from {_plain(values.edges[0])} to {_plain(values.edges[-1])} {unit}. "
        f"The fullest bar, {_plain(values.edges[fullest])} to {_plain(values.edges[fullest + 1])}, holds {number(most)}. "
        f"The median lies near {_plain(_median(values))}."
    )
    ticks = _ticks(0, most, 3, whole=True)
    top = max(most, ticks[-1])
    parts = [_grid(ticks, top), _x_axis(_ticks(low, high, 5), low, high, _plain, unit)]
    for left, right, count in zip(values.edges, values.edges[1:], values.counts, strict=False):
        if right <= left:
            left, right = low, high
        if count:
            x, width = _x(left, low, high), _PLOT_WIDTH * (right - left) / (high - low)
            y = _y(count, top)
            parts.append(
                Markup('<rect class="bar" x="{}" y="{}" width="{}" height="{}"><title>{} to {}: {}</title></rect>').format(
                    _at(x), _at(y), _at(max(width - 0.6, 0.6)), _at(_TOP + _PLOT_HEIGHT - y), _plain(left), _plain(right), count
                )
            )
    return _chart(name, title, described, Markup("").join(parts))


def throughput(name: str, title: str, points: Sequence[tuple[float, float]]) -> Markup:
    """Tokens per second over the seconds of a run.

    Args:
        name: unique in the page; letters, digits and hyphens.
        title: what is shown.
        points: (seconds running, tokens per second), in order of time.
    """
    points = [(second, rate) for second, rate in points if math.isfinite(second) and math.isfinite(rate)]
    if not points:
        return _chart(name, title, "Nothing is measured yet.", _message("nothing measured yet"))
    rates = [rate for _, rate in points]
    end = max(points[-1][0], 1e-3)
    described = (
        f"{len(points)} measurements over {duration(end)}: least {number(round(min(rates)))}, "
        f"most {number(round(max(rates)))}, last {number(round(rates[-1]))} tokens per second."
    )
    ticks = _ticks(0, max(*rates, 1.0), 3)
    top = ticks[-1]
    places = [f"{_at(_x(second, 0, end))},{_at(_y(rate, top))}" for second, rate in points]
    floor = _at(_TOP + _PLOT_HEIGHT)
    outline = f"{places[0].partition(',')[0]},{floor} {' '.join(places)} {places[-1].partition(',')[0]},{floor}"
    x, y = places[-1].split(",")
    plot = Markup(
        '{}{}<polygon class="area" points="{}"/><polyline class="line" points="{}"/>'
        '<circle class="last" cx="{}" cy="{}" r="3.5"/>'
    ).format(_grid(ticks, top), _x_axis(_time_ticks(end), 0, end, duration, "time running"), outline, " ".join(places), x, y)
    return _chart(name, title, described, plot)


def _chart(name: str, title: str, described: str, plot: Markup) -> Markup:
    return Markup(
        '<svg class="chart" role="img" viewBox="0 0 {:.0f} {:.0f}" aria-labelledby="{name}-title {name}-desc">'
        '<title id="{name}-title">{}</title><desc id="{name}-desc">{}</desc>{}</svg>'
    ).format(_WIDTH, _HEIGHT, title, described, plot, name=name)


def _message(text: str) -> Markup:
    return Markup('<text class="message" x="{}" y="{}">{}</text>').format(_WIDTH / 2, _HEIGHT / 2, text)


def _grid(ticks: Sequence[float], top: float) -> Markup:
    """Horizontal lines with their numbers, the lowest one the axis."""
    return Markup("").join(
        Markup(
            '<line class="{}" x1="{}" x2="{}" y1="{y}" y2="{y}"/><text class="y" x="{}" y="{y}" dy="0.32em">{}</text>'
        ).format("grid" if tick else "axis", _LEFT, _WIDTH - _RIGHT, _LEFT - 7, short_number(tick), y=_at(_y(tick, top)))
        for tick in ticks
    )


def _x_axis(ticks: Sequence[float], low: float, high: float, write: Callable[[float], str], unit: str) -> Markup:
    """Numbers below the plot, and what they count."""
    floor = _TOP + _PLOT_HEIGHT
    shown = [tick for tick in ticks if low <= tick <= high]
    marks = Markup("").join(
        Markup('<line class="tick" x1="{x}" x2="{x}" y1="{}" y2="{}"/><text class="x" x="{x}" y="{}">{}</text>').format(
            floor, floor + 4, floor + 18, write(tick), x=_at(_x(tick, low, high))
        )
        for tick in shown
    )
    return marks + Markup('<text class="unit" x="{}" y="{}">{}</text>').format(_LEFT + _PLOT_WIDTH / 2, _HEIGHT - 6, unit)


def _ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Round numbers, evenly apart: the first at or below `low`, the last at or above `high`."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * count, 12) for count in range(first, last + 1)]


def _time_ticks(end: float) -> list[float]:
    """Ticks from 0 to `end` seconds, four or five."""
    if end < 4:
        return _ticks(0, end, 4)
    step = next((step for step in _TIME_STEPS if end / step <= 5), None)
    if step is None:
        step = 43200 * math.ceil(end / 5 / 43200)
    return [float(second) for second in range(0, int(end) + 1, step)]


def _median(values: Histogram) -> float:
    """As if the values of a bar lay evenly in it."""
    half, below = sum(values.counts) / 2, 0
    for left, right, count in zip(values.edges, values.edges[1:], values.counts, strict=False):
        if count and below + count >= half:
            return left + (right - left) * (half - below) / count
        below += count
    return values.edges[-1]


def _x(value: float, low: float, high: float) -> float:
    return _LEFT + _PLOT_WIDTH * (value - low) / (high - low)


def _y(value: float, top: float) -> float:
    return _TOP + _PLOT_HEIGHT * (1 - value / top)


def _at(place: float) -> str:
    return f"{place:.2f}".rstrip("0").rstrip(".")


def _plain(value: float) -> str:
    """An edge or a tick."""
    return short_number(0.0 if abs(value) < 1e-12 else value)
