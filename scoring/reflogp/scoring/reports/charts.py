"""Write a report's charts as PNG files, and check the folder that the report is written to.

The report's HTML page contains the same charts as SVG; the PNG files are for slides and GitHub issues. The folder must be new
or empty, or contain only an earlier report. A folder with any other content must never be changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from reflogp.scoring.reports.figures import Curve, Density, Figures, Histograms
from reflogp.store import UsageError
from reflogp.store.files import write_atomically

_COLORS = ("#1f5fae", "#c4601d", "#6b7280")
_SIZE, _DPI = (7.2, 4.0), 110
#: Names of all PNG files that a report's folder may contain.
PNG_NAMES = ("logps.png", "margins.png", "margins-per-token.png", "length.png", "truncation.png")


def write_pngs(figures: Figures, folder: Path, heading: str, marked: int) -> list[str]:
    """Write a PNG file for each chart that has data; return the file names.

    Args:
        heading: the dataset's name, printed above each chart.
        marked: the max_length to mark in the truncation chart.
    """
    draw: dict[str, Callable[[Any], None]] = {}
    if figures.logps is not None:
        draw["logps.png"] = partial(_histograms, values=figures.logps)
    if figures.margins is not None:
        draw["margins.png"] = partial(_histograms, values=figures.margins)
    if figures.margins_per_token is not None:
        draw["margins-per-token.png"] = partial(_histograms, values=figures.margins_per_token)
    if figures.density is not None:
        draw["length.png"] = partial(_density, density=figures.density)
    draw["truncation.png"] = partial(_truncation, curve=figures.truncation, marked=marked)
    for name, paint in draw.items():
        figure = Figure(_SIZE, dpi=_DPI, layout="constrained")
        paint(figure.add_subplot())
        figure.suptitle(heading, fontsize=9, color="#555e69", parse_math=False)
        with write_atomically(folder / name) as unfinished, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a dataset's name may contain letters that the font lacks
            FigureCanvasAgg(figure).print_png(str(unfinished))
    return list(draw)


def _histograms(axes: Any, values: Histograms) -> None:
    for color, (series, counts) in zip(_COLORS, values.counts.items(), strict=False):
        axes.stairs(counts, values.edges, fill=True, alpha=0.55, color=color, label=f"{series} ({sum(counts):,})")
    if values.zero:
        axes.axvline(0, color="#1b1f24", linewidth=1)
    axes.set(title=values.title, xlabel=values.unit)
    axes.legend(frameon=False)


def _density(axes: Any, density: Density) -> None:
    counts = np.array(density.counts, float).T
    edges = 2 ** np.array(density.lengths)
    axes.pcolormesh(edges, density.means, np.where(counts > 0, counts, np.nan), cmap="Blues", vmin=-0.2 * counts.max())
    middles = np.sqrt(edges[:-1] * edges[1:])
    medians = [np.nan if median is None else median for median in density.medians]
    axes.plot(middles, medians, color=_COLORS[1], linewidth=2, label="median")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axes.set(title="Mean log-prob per token against length", xlabel="completion tokens", ylabel="nats per token")
    axes.legend(frameon=False)


def _truncation(axes: Any, curve: Curve, marked: int) -> None:
    for color, (series, shares) in zip(_COLORS, curve.shares.items(), strict=False):
        axes.plot(curve.max_lengths, [100 * share for share in shares], color=color, linewidth=2, label=series)
    axes.axvline(marked, color="#6b7280", linewidth=1, linestyle="--", label=f"{marked:,}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axes.set(title="What each max_length would cut", xlabel="max_length, tokens", ylabel="%", ylim=(0, 101))
    axes.legend(frameon=False)


PAGE_NAME = "index.html"
#: Tag in the head of every report's page. `check_folder` recognizes an earlier report by this tag.
MARK = '<meta name="generator" content="reflogp report">'
_HEAD_BYTES = 2048


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
    is_report = _is_report(folder / PAGE_NAME)
    other = sorted(names - {*PNG_NAMES, PAGE_NAME} if is_report else names)
    if not other:
        return
    raise UsageError(
        f"the folder {folder} contains {other[0]}, which is not part of a report; nothing was changed. Use an empty folder, or "
        "the folder of an earlier report"
    )


def forget_other_charts(folder: Path, written: list[str]) -> None:
    """Delete those charts of an earlier report that the new report did not overwrite."""
    for name in set(PNG_NAMES) - set(written):
        (folder / name).unlink(missing_ok=True)


def _is_report(page: Path) -> bool:
    if not page.is_file():
        return False
    with page.open("rb") as file:
        return MARK.encode() in file.read(_HEAD_BYTES)
