"""Format numbers, sizes and times for pages and reports."""

from __future__ import annotations

import math
from datetime import UTC, datetime

#: (size, suffix), largest size first.
_DECIMAL = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")]
_BINARY = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]


def number(value: float) -> str:
    """Format a number: 12,345, or 12.3 for a value below a hundred with a fraction."""
    if isinstance(value, float) and (not math.isfinite(value) or (abs(value) < 100 and not value.is_integer())):
        return f"{value:.3g}".replace("-", "−")
    return f"{round(value):,}".replace("-", "−")


def short_number(value: float) -> str:
    """Format a number for a chart's axis: 12.3k."""
    for size, suffix in _DECIMAL:
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


def percent(part: float, whole: float) -> str:
    """Format a share: 31.4%, rounded down so that only the whole is 100%; a dash if the whole is 0."""
    if whole <= 0:
        return "–"
    if 0 < part / whole < 0.001:
        return "<0.1%"
    return f"{math.floor(1000 * part / whole) / 10:.1f}".removesuffix(".0") + "%"


def byte_count(value: int) -> str:
    """Format a size: 12.3 MiB."""
    for size, suffix in _BINARY:
        if value >= size:
            return f"{value / size:.1f} {suffix}"
    return f"{value:,} B"


def duration(seconds: float) -> str:
    """Format a duration: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min, 4 d 3 h."""
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            count, rest = whole // size, whole % size // smaller
            return f"{count} {unit} {rest} {small_unit}" if rest else f"{count} {unit}"
    raise AssertionError("60 seconds and more are minutes")


def moment(when: datetime) -> str:
    """Format a time: 2026-11-20 21:55:13 UTC."""
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def machine_moment(when: datetime) -> str:
    """Format a time for HTML's <time datetime>: 2026-11-20T21:55:13Z."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
