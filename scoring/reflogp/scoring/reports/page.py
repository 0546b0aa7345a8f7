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
from reflogp.scoring.reports.findings import Finding, verdict
from reflogp.scoring.reports.measures import Comparison, Duplicates, Figures, OutlierKind, PairPreference
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
