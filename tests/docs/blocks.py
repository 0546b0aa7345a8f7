"""The code blocks of the docs: every fenced block of README.md, CONTRIBUTING.md and docs/, in the order of the site.

Knows Markdown's fences. Does not know what a block means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.conftest import REPOSITORY

_FENCE = re.compile(r"( *)```(\S*)\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str  # as the repository names it
    line: int  # of its opening fence, from 1
    language: str  # what stands behind the fence; empty where nothing does
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """README.md, the site's pages in the order of its navigation, any other below docs/, CONTRIBUTING.md."""
    navigation = re.findall(r": (\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    there = sorted(str(file.relative_to(REPOSITORY / "docs")) for file in (REPOSITORY / "docs").rglob("*.md"))
    return ["README.md", *(f"docs/{name}" for name in dict.fromkeys([*navigation, *there])), "CONTRIBUTING.md"]


def blocks_of(page: str) -> list[Block]:
    """The page's blocks. Raises ValueError for one that is indented instead of fenced, or not closed."""
    found: list[Block] = []
    opened: tuple[int, str, str] | None = None
    inside: list[str] = []
    before = ""
    for number, line in enumerate((REPOSITORY / page).read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            at, indent, language = opened
            if fence and not fence[2]:
                found.append(Block(page, at, language, "\n".join(inside) + "\n"))
                opened = None
            else:
                inside.append(line.removeprefix(indent))
        elif fence:
            opened, inside = (number, fence[1], fence[2]), []
        elif line.startswith("    ") and not before.strip():
            raise ValueError(f"{page}:{number}: an indented block; put it between fences that name its language")
        before = line
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: a block that is not closed")
    return found
