"""Render a report's page: one HTML file without scripts, which fetches nothing.

Its content security policy keeps a browser from running or fetching anything that a dataset's texts contain.
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

from reflogp.scoring.reports import drawings
from reflogp.scoring.reports.chart_frame import STYLE
from reflogp.scoring.reports.charts import MARK
from reflogp.scoring.reports.collect import ALIKE, Collected
from reflogp.scoring.reports.duplicates import Duplicates
from reflogp.scoring.reports.figures import Figures, LabelPreference, PairPreference
from reflogp.scoring.reports.findings import Finding
from reflogp.scoring.reports.outliers import OutlierKind
from reflogp.scoring.reports.shown import LEVELS, Shown, visible
from reflogp.scoring.reports.sketches import MOST_SKETCHED, NEAR, RUN_TOKENS
from reflogp.scoring.reports.truncation import Cut
from reflogp.store import Snapshot
from reflogp.store.texts import duration, moment, number, percent
from reflogp.store.windows import TrainerSettings

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Subject:
    """The inputs and settings of a report, printed at the end of the page.

    Attributes:
        score: the command line that scores the missing rows.
    """

    data: str
    model: str
    snapshot: Snapshot
    settings: TrainerSettings
    score: str


@dataclass(frozen=True)
class Content:
    """The content of the page.

    Attributes:
        noun: the name of an example: "pair" or "row".
        at: the effect of the trainer's max_length.
        cuts: the effects of several values of max_length.
        enough: the smallest max_length that leaves 99% of the examples whole.
        alike: (place, similarity) of the shown pairs that hardly differ, most similar first.
        alike_count: number of all pairs that hardly differ.
        shown: place -> example, for the examples on the page.
        seconds: time that the report took.
    """

    subject: Subject
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
    """Return the whole page as HTML."""
    # The template escapes every text of a dataset; the policy is a second protection, under which nothing runs or loads.
    environment = Environment(autoescape=True, loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": number, "percent": percent, "duration": duration, "signed": _signed, "visible": visible}
    style = STYLE.read_text(encoding="utf-8") + (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    images = " img-src data:;" if any(example.images for example in content.shown.values()) else ""
    return environment.get_template("report.html").render(
        content=content,
        draw=drawings,
        mark=Markup(MARK),
        style=Markup(style),
        policy=f"default-src 'none';{images} style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        name=Path(content.subject.data).name or content.subject.data,
        made=moment(datetime.now(UTC)),
        version=version("reflogp"),
        levels=LEVELS,
        near=NEAR,
        alike_from=ALIKE,
        run_tokens=RUN_TOKENS,
        most_sketched=MOST_SKETCHED,
    )


def _signed(value: float) -> str:
    """Format a number with its sign: +1.23 or −1.23."""
    return f"{value:+.2f}".replace("-", "−")
