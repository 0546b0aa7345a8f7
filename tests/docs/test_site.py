"""The site builds under strict rules, fetches nothing, and cannot leave a setting, a route or an option unsaid."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import typer
from fastapi import FastAPI

import mkdocs_hook
from reflogp.cli.main import app
from reflogp.service.settings import ReferenceSettings, ServerSettings, TokenSettings
from tests.conftest import REPOSITORY
from tests.docs.workspace import parse_reflogp

PACKAGES = ("store", "scoring", "service", "client", "cli", "trainer_ext")


@pytest.mark.slow
def test_the_site_has_every_page_and_fetches_nothing(tmp_path):
    """The site as `make docs` builds it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True)
    assert not built.returncode, built.stderr.decode()
    pages = {file.stem for file in (REPOSITORY / "docs").glob("*.md")}
    assert pages <= {file.stem for file in tmp_path.glob("*.html")}
    for file in tmp_path.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe|source)[^>]+src="?(?:https?:)?//[^">\s]+', text)
        fetched += re.findall(r'<link[^>]+rel="?(?:stylesheet|preconnect|preload|icon)[^>]+href="?(?:https?:)?//[^">\s]+', text)
        assert not fetched, (file, fetched)
    for file in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", file.read_text(encoding="utf-8")), file


def test_generated_pages_name_every_setting_route_and_command():
    settings = mkdocs_hook.settings_page()
    for model in (ServerSettings, ReferenceSettings, TokenSettings):
        assert all(f"| `{name}`" in settings for name in model.model_fields)
    commands = mkdocs_hook.commands_page(app)
    assert "| `--max-length MAX_LENGTH` |" in commands and "## reflogp store vacuum" in commands
    api = mkdocs_hook._api("")
    assert "## POST /v1/score" in api and "## DELETE /v1/jobs/{job_id}" in api


def test_what_says_nothing_about_itself_ends_the_build(monkeypatch):
    class More(ServerSettings):
        added: int = 3

    commands, routes = typer.Typer(help="A command line."), FastAPI()

    @commands.command("added")
    def added(text: str = "") -> None:
        """It says what it does."""

    @routes.get("/v1/added", summary="Say nothing")
    async def added_route() -> dict[str, int]:
        """It says what it does."""
        return {}

    monkeypatch.setattr(mkdocs_hook, "ServerSettings", More)
    for page, said in (
        (mkdocs_hook.settings_page, "setting More.added"),
        (lambda: mkdocs_hook.commands_page(commands), "reflogp: option --text"),
        (lambda: mkdocs_hook.api_page(routes.openapi()), "route GET /v1/added: answer 200"),
    ):
        with pytest.raises(mkdocs_hook.UndocumentedError, match=f"{said} is not documented"):
            page()


OWN_PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md", *(f"{folder}/README.md" for folder in PACKAGES)]


@pytest.mark.parametrize("page", OWN_PAGES)
def test_links_of_the_repositorys_own_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", (REPOSITORY / page).read_text(encoding="utf-8")):
        if not re.match(r"https?://", target):
            assert (REPOSITORY / page).parent.joinpath(target.partition("#")[0]).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("folder", PACKAGES)
def test_a_part_has_the_modules_that_its_readme_names(folder):
    modules = {file.name for file in (REPOSITORY / folder).rglob("*") if file.is_file()}
    named = re.findall(r"`(?:\w+/)*(\w+\.py)`", (REPOSITORY / folder / "README.md").read_text(encoding="utf-8"))
    assert named and not set(named) - modules


def test_every_message_of_the_troubleshooting_page_is_the_codes_own():
    messages = re.findall(
        r"^\| `([^`]+)` \|", (REPOSITORY / "docs/troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(messages) > 15
    files = [str(file) for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py")]
    # in a process of its own: Python 3.11 counts the depth of all threads' syntax trees together, and fails at times
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        strings = [text for of_file in alone.map(strings_of, files) for text in of_file]
    for message in messages:
        parts = [part.strip() for part in message.split("…") if len(part.strip()) > 1]
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        assert any(pattern.search(text) for text in strings), f"no string of the code says: {message}"


def strings_of(file: str) -> list[str]:
    """The strings of a source file; what is put into one is …."""
    found = []
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def commands(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its words."""
    if not hasattr(command, "commands"):
        yield " ".join(path), command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, *path, name)


def test_the_help_of_every_command_teaches_by_an_example_that_it_takes():
    found = dict(commands(typer.main.get_command(app)))
    assert len(found) > 20
    for words, command in found.items():
        assert not re.search(r"[^\n]\n[^\n]", command.help), "paragraphs fill the terminal's width"
        examples = re.findall(r"Example: reflogp (.+)", command.help)
        assert examples and all(example.startswith(f"{words} ") for example in examples), words
        for example in examples:
            parse_reflogp(shlex.split(example.partition(" > ")[0]))
