"""The site builds under strict rules, fetches nothing, and cannot leave a setting, a route or an option unsaid."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import reflogp.service.app
import reflogp.service.settings
from reflogp.cli.main import app
from tests.conftest import REPOSITORY
from tests.docs.workspace import parse_reflogp

PACKAGES = ("store", "scoring", "service", "client", "cli", "trainer_ext")


def build_site(folder: Path) -> None:
    build(load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(folder)))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as `make docs` builds it: in a process of its own.

    In Python 3.11, a finalizer of another test's garbage that raises while griffe parses a source ends that parse: a
    SystemError (its traceback parses an AST, too: python/cpython#106905).
    """
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True)
    assert not built.returncode, built.stderr.decode()
    return folder


@pytest.mark.slow
def test_the_site_has_every_page_and_fetches_nothing(site):
    pages = {file.stem for file in (REPOSITORY / "docs").glob("*.md")}
    assert pages <= {file.stem for file in site.glob("*.html")}
    for file in site.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe|source)[^>]+src="?(?:https?:)?//[^">\s]+', text)
        fetched += re.findall(r'<link[^>]+rel="?(?:stylesheet|preconnect|preload|icon)[^>]+href="?(?:https?:)?//[^">\s]+', text)
        assert not fetched, (file, fetched)
    for file in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", file.read_text(encoding="utf-8")), file


def test_generated_pages_name_every_setting_route_and_command(site):
    settings = (site / "settings.html").read_text(encoding="utf-8")
    for model in ("ServerSettings", "ReferenceSettings", "TokenSettings"):
        for name in getattr(reflogp.service.settings, model).model_fields:
            assert f"<code>{name}</code>" in settings
    commands = (site / "commands.html").read_text(encoding="utf-8")
    assert "<code>--max-length MAX_LENGTH</code>" in commands and 'id="reflogp-store-vacuum"' in commands
    api = (site / "api.html").read_text(encoding="utf-8")
    assert "POST /v1/score" in api and "DELETE /v1/jobs/{job_id}" in api


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """mkdocs_hook.py as MkDocs has loaded it, once for all builds of this process."""
    return load_config(str(REPOSITORY / "mkdocs.yml")).hooks["mkdocs_hook.py"]


def undocumented_setting(hook, monkeypatch):
    class More(reflogp.service.settings.ServerSettings):
        added: int = 3

    monkeypatch.setattr(hook, "ServerSettings", More)
    return "setting More.added is not documented"


def undocumented_route(hook, monkeypatch):
    before = reflogp.service.app.health_router

    def more(*given: Any) -> Any:
        router = before(*given)

        @router.get("/v1/added", summary="Say nothing")
        async def added_route() -> dict[str, int]:
            """It says what it does."""
            return {}

        return router

    monkeypatch.setattr(reflogp.service.app, "health_router", more)
    return "route GET /v1/added: answer 200 is not documented"


def undocumented_option(hook, monkeypatch):
    more = typer.Typer(help="A command line.")

    @more.command("added")
    def added(text: str = "") -> None:
        """It says what it does."""

    @more.command("other")
    def other() -> None:
        """So does this."""

    monkeypatch.setattr(hook, "app", more)
    return "reflogp added: option --text is not documented"


@pytest.mark.slow
@pytest.mark.parametrize("add", [undocumented_setting, undocumented_route, undocumented_option])
def test_the_build_fails_for_what_says_nothing_about_itself(add, hook, monkeypatch, tmp_path, caplog):
    said = add(hook, monkeypatch)
    with pytest.raises(Abort):
        build_site(tmp_path)
    assert said in caplog.text


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
    strings = [text for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py") for text in strings_of(file)]
    for message in messages:
        parts = [part.strip() for part in message.split("…") if len(part.strip()) > 1]
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        assert any(pattern.search(text) for text in strings), f"no string of the code says: {message}"


def strings_of(file: Path) -> list[str]:
    """The strings of a source file; what is put into one is …."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_every_example_of_the_help_is_a_command_that_the_command_line_takes():
    def examples(command: Any) -> list[str]:
        found = re.findall(r"Example: reflogp (.+(?:\n(?!\s*\n).+)*)", command.help or "")
        return found + [text for child in getattr(command, "commands", {}).values() for text in examples(child)]

    found = examples(typer.main.get_command(app))
    assert len(found) > 10
    for example in found:
        parse_reflogp(shlex.split(example.partition(" > ")[0]))
