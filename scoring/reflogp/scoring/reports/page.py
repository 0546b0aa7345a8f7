"""Render a report's page: a single HTML file with inline SVG charts and without scripts or external resources.

If the dataset's texts contain scripts or links to resources, the page's content security policy prevents browsers from running
or loading them.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from reflogp.scoring.reports.charts import STYLE, draw_histograms
from reflogp.scoring.reports.collect import ALIKE, Collected
from reflogp.scoring.reports.comparison import Comparison
from reflogp.scoring.reports.duplicates import Duplicates
from reflogp.scoring.reports.figures import Figures, PairPreference
from reflogp.scoring.reports.findings import Finding, verdict
from reflogp.scoring.reports.outliers import OutlierKind
from reflogp.scoring.reports.shown import LEVELS, Shown, visible
from reflogp.scoring.reports.truncation import Cut
from reflogp.store import Snapshot, UsageError
from reflogp.store.texts import hide_secrets, moment, number, percent
from reflogp.store.windows import TrainerSettings

PAGE_NAME = "index.html"
#: Tag in the head of every report's page. `check_folder` recognizes an earlier report by this tag.
_MARK = '<meta name="generator" content="reflogp report">'
_HEAD_BYTES = 2048
_TEMPLATES = Path(__file__).parent / "templates"


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
        mark=Markup(_MARK),
        style=Markup(style),
        policy=f"default-src 'none';{images} style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        name=Path(content.data).name or content.data,
        made=moment(datetime.now(UTC)),
        version=version("reflogp"),
        levels=LEVELS,
        alike_from=ALIKE,
    )


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


#: Compiled when this module is imported, because compiling takes longer than writing a small report.
_TEMPLATE = _compiled()
