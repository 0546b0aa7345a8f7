"""The reference of the Python API: every public name is on its page, described in full, with an example that runs."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from dataclasses import fields, is_dataclass
from typing import Any

import griffe
import pytest
from transformers import PrinterCallback

from reflogp.scoring import score
from tests.conftest import REPOSITORY
from tests.docs.workspace import Workspace

PARTS = {"store": "store", "scoring": "scoring", "client": "client", "trainer": "trainer_ext"}
NAMES = [f"reflogp.{part}.{name}" for part in PARTS for name in importlib.import_module(f"reflogp.{part}").__all__]
#: Results that the example of another name shows.
SHOWN_BY = {
    "reflogp.store.Join": "join_logps",
    "reflogp.store.Reference": "describe_reference",
    "reflogp.trainer.CachedKTOTrainer": "CachedDPOTrainer",
    "reflogp.trainer.RemoteRLOOTrainer": "RemoteGRPOTrainer",
    "reflogp.trainer.RemoteOnlineDPOTrainer": "RemoteGRPOTrainer",
    **{
        f"reflogp.client.{name}": "Client"
        for name in ("Job", "JobPage", "JobProgress", "Lookup", "ReferenceInfo", "Scores", "UploadInfo")
    },
    "reflogp.client.ServicePath": "Client.submit, which describes it",
    "reflogp.client.ServiceUri": "Client.submit, which describes it",
    "reflogp.client.Uploaded": "Client.submit, which describes it",
}
#: Arguments that TRL's trainers describe.
TRLS = {"model", "ref_model", "args", "more", "kwargs"}


def public(name: str) -> Any:
    part, _, last = name.rpartition(".")
    return getattr(importlib.import_module(part), last)


def is_error(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, Exception)


EXAMPLES = [name for name in NAMES if not is_error(public(name)) and name not in SHOWN_BY]


@pytest.fixture(scope="module")
def scored(workspace) -> Workspace:
    """The workspace, with the values of pairs.jsonl in ./logps."""
    score("./sft-model", "pairs.jsonl", "./logps", dtype="bfloat16")
    return workspace


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name, scored, monkeypatch):
    monkeypatch.setattr(PrinterCallback, "on_log", lambda *_, **__: None)  # it prints between the lines that are compared
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scored.run_examples(name, inspect.getdoc(public(name)))


@pytest.fixture(scope="module")
def source() -> griffe.ModulesCollection:
    """The parts as the site's build reads them."""
    loader = griffe.GriffeLoader(search_paths=[REPOSITORY / folder for folder in PARTS.values()], docstring_parser="google")
    for part in PARTS:
        loader.load(f"reflogp.{part}")
    loader.resolve_aliases(implicit=False)
    return loader.modules_collection


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_names_every_argument_field_and_result(name, source):
    found = source[name]
    sections = {section.kind.value: section.value for section in found.docstring.parsed}
    assert sections["text"], "no summary"
    if found.is_function:
        assert not arguments_of(found) - named(sections, "parameters")
        assert "returns" in sections
    elif is_dataclass(public(name)):
        assert {field.name for field in fields(public(name))} == named(sections, "attributes")
    elif "__init__" in found.members and not is_error(public(name)):
        trls = TRLS if name.endswith(("Trainer", "Mixin")) else set()
        assert not arguments_of(found.members["__init__"]) - named(sections, "parameters") - trls


def arguments_of(function: griffe.Function) -> set[str]:
    return {entry.name for entry in function.parameters} - {"self"}


def named(sections: dict[str, Any], kind: str) -> set[str]:
    return {entry.name for entry in sections.get(kind, [])}


@pytest.mark.parametrize("part", PARTS)
def test_the_page_of_a_part_has_its_names(part):
    page = (REPOSITORY / "docs" / f"api-{part}.md").read_text(encoding="utf-8")
    on_page = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert {name for name in NAMES if name.startswith(f"reflogp.{part}.")} <= set(on_page)
