"""Check that a report's output folder is new, empty or an earlier report, and remove old charts from it.

A folder with any other content must never be changed.
"""

from __future__ import annotations

from pathlib import Path

from reflogp.scoring.reports.charts import PNG_NAMES
from reflogp.store import UsageError

PAGE_NAME = "index.html"
#: Mark in the head of every report's page, by which an earlier report is recognised.
MARK = '<meta name="generator" content="reflogp report">'
_HEAD_BYTES = 2048


def check_folder(folder: Path) -> None:
    """Raise UsageError unless the folder does not exist, is empty, or holds only an earlier report."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise UsageError(f"the output {folder} is a file; a report is a folder")
    names = {entry.name for entry in folder.iterdir() if not entry.name.endswith(".partial")}  # left by a killed report
    is_report = _is_report(folder / PAGE_NAME)
    other = sorted(names - {*PNG_NAMES, PAGE_NAME} if is_report else names)
    if not other:
        return
    raise UsageError(
        f"the folder {folder} holds {other[0]}, which is not a report's; nothing was changed. Give an empty folder, or an "
        "earlier report's"
    )


def forget_other_charts(folder: Path, written: list[str]) -> None:
    """Remove the charts of an earlier report that this report did not write."""
    for name in set(PNG_NAMES) - set(written):
        (folder / name).unlink(missing_ok=True)


def _is_report(page: Path) -> bool:
    if not page.is_file():
        return False
    with page.open("rb") as file:
        return MARK.encode() in file.read(_HEAD_BYTES)
