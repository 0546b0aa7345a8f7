"""Draw the parts that all SVG charts share: the SVG element with title and description, grid lines, and axes with ticks.

The SVG elements have CSS classes; their colors and fonts are set in the stylesheet (`STYLE`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup

from reflogp.store.texts import short_number

#: Stylesheet for reports and for the pages of a service, including their charts.
STYLE = Path(__file__).parent / "templates" / "style.css"

#: Size and margins of a chart, in SVG units. The plot is inside the margins, and the page scales the chart.
WIDTH, HEIGHT = 400.0, 180.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 26.0, 10.0, 42.0
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


def chart(name: str, title: str, described: str, plot: Markup) -> Markup:
    """Return the SVG of a chart.

    Args:
        name: name of the chart, unique within the page. It may contain letters, digits and hyphens.
        described: description of the chart for screen readers.
        plot: SVG elements inside the chart, such as grid lines, axes and bars.
    """
    return Markup(
        '<svg class="chart" role="img" viewBox="0 0 {:.0f} {:.0f}" aria-labelledby="{name}-title {name}-desc">'
        '<title id="{name}-title">{}</title><desc id="{name}-desc">{}</desc>{}</svg>'
    ).format(WIDTH, HEIGHT, title, described, plot, name=name)


def message(text: str) -> Markup:
    return Markup('<text class="message" x="{}" y="{}">{}</text>').format(WIDTH / 2, HEIGHT / 2, text)


def grid(ticks: Sequence[float], low: float, high: float, write: Callable[[float], str] = short_number) -> Markup:
    """Return horizontal grid lines with labels. A line at or below `low` is drawn in the style of the x axis."""
    return Markup("").join(
        Markup(
            '<line class="{}" x1="{}" x2="{}" y1="{y}" y2="{y}"/><text class="y" x="{}" y="{y}" dy="0.32em">{}</text>'
        ).format("grid" if tick > low else "axis", LEFT, WIDTH - RIGHT, LEFT - 7, write(tick), y=written(y_at(tick, low, high)))
        for tick in ticks
    )


def x_axis(ticks: Sequence[float], low: float, high: float, write: Callable[[float], str], unit: str) -> Markup:
    """Return the tick marks, tick labels and unit of the x axis. Ticks outside the range are left out."""
    floor = TOP + PLOT_HEIGHT
    shown = [tick for tick in ticks if low <= tick <= high]
    marks = Markup("").join(
        Markup('<line class="tick" x1="{x}" x2="{x}" y1="{}" y2="{}"/><text class="x" x="{x}" y="{}">{}</text>').format(
            floor, floor + 4, floor + 18, write(tick), x=written(x_at(tick, low, high))
        )
        for tick in shown
    )
    return marks + Markup('<text class="unit" x="{}" y="{}">{}</text>').format(LEFT + PLOT_WIDTH / 2, HEIGHT - 6, unit)


def round_ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Return evenly spaced round numbers (integers if `whole`) that cover the range in about `about` steps."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * count, 12) for count in range(first, last + 1)]


def x_at(value: float, low: float, high: float) -> float:
    return LEFT + PLOT_WIDTH * (value - low) / (high - low)


def y_at(value: float, low: float, high: float) -> float:
    return TOP + PLOT_HEIGHT * (1 - (value - low) / (high - low))


def written(place: float) -> str:
    return f"{place:.2f}".rstrip("0").rstrip(".")


def plain(value: float) -> str:
    """Format a number. If it differs from zero only by a rounding error, it becomes 0."""
    return short_number(0.0 if abs(value) < 1e-12 else value)
