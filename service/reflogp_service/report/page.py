"""A report's page: one file, without scripts, that fetches nothing.

Knows templates, and the policy that keeps a browser from running or fetching anything a dataset says. Called by `build`.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from reflogp_service.formats import duration, moment, number, percent
from reflogp_service.report import drawings
from reflogp_service.report.collect import ALIKE
from reflogp_service.report.folder import MARK
from reflogp_service.report.shown import LEVELS
from reflogp_service.report.sketches import MOST_SKETCHED, NEAR, RUN_TOKENS
from reflogp_service.report.visible import visible
from reflogp_service.server import pages

if TYPE_CHECKING:
    from reflogp_service.report.build import Content

_TEMPLATES = Path(__file__).parent / "templates"
#: The service's own pages lend their style.
_SHARED_STYLE = Path(pages.__file__).parent / "static" / "style.css"


def render_page(content: Content) -> str:
    """The whole page as HTML."""
    # Every text of a dataset is escaped by the template; the policy is a second lock, under which nothing runs or loads.
    environment = Environment(autoescape=True, loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": number, "percent": percent, "duration": duration, "signed": _signed, "visible": visible}
    style = _SHARED_STYLE.read_text(encoding="utf-8") + (_TEMPLATES / "report.css").read_text(encoding="utf-8")
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
