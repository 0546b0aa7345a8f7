"""A report's page: one file, without scripts, that fetches nothing.

Knows templates, and the policy that keeps a browser from running or fetching anything a dataset says. Called by `build`.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from reflogp.scoring.data.formats import duration, moment, number, percent
from reflogp.scoring.report import drawings
from reflogp.scoring.report.chart_frame import STYLE
from reflogp.scoring.report.collect import ALIKE, Collected
from reflogp.scoring.report.duplicates import Duplicates
from reflogp.scoring.report.figures import Figures
from reflogp.scoring.report.findings import Finding
from reflogp.scoring.report.folder import MARK
from reflogp.scoring.report.outliers import OutlierKind
from reflogp.scoring.report.preference import LabelPreference, PairPreference
from reflogp.scoring.report.shown import LEVELS, Shown
from reflogp.scoring.report.sketches import MOST_SKETCHED, NEAR, RUN_TOKENS
from reflogp.scoring.report.truncation import Cut
from reflogp.scoring.report.visible import visible
from reflogp.store import Reference

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Setting:
    """What a report is of; stands on its last lines.

    Attributes:
        score: the command line that scores what is missing.
    """

    data: str
    model: str
    store: str
    reference: Reference
    snapshot: int
    max_length: int | None
    truncation_mode: str
    score: str


@dataclass(frozen=True)
class Content:
    """All that the page shows.

    Attributes:
        noun: what an example is called: pair or row.
        at: what the trainer's max_length cuts; `cuts`: what others would.
        alike: places of pairs that hardly differ, the most alike first, with their similarity.
        shown: the examples that are shown, by place.
    """

    setting: Setting
    noun: str
    verdict: str
    findings: list[Finding]
    collected: Collected
    figures: Figures
    pairs: PairPreference | None
    labels: LabelPreference | None
    at: Cut
    cuts: list[Cut]
    enough: int
    duplicates: Duplicates
    outliers: list[OutlierKind]
    alike: list[tuple[int, float]]
    alike_count: int
    shown: dict[int, Shown]
    seconds: float


def render_page(content: Content) -> str:
    """The whole page as HTML."""
    # Every text of a dataset is escaped by the template; the policy is a second lock, under which nothing runs or loads.
    environment = Environment(autoescape=True, loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": number, "percent": percent, "duration": duration, "signed": _signed, "visible": visible}
    style = STYLE.read_text(encoding="utf-8") + (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        content=content,
        draw=drawings,
        mark=Markup(MARK),
        style=Markup(style),
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        name=Path(content.setting.data).name or content.setting.data,
        made=moment(datetime.now(UTC)),
        version=version("reflogp"),
        levels=LEVELS,
        near=NEAR,
        alike_from=ALIKE,
        run_tokens=RUN_TOKENS,
        most_sketched=MOST_SKETCHED,
    )


def _signed(value: float) -> str:
    """+1.23 or −1.23."""
    return f"{value:+.2f}".replace("-", "−")
