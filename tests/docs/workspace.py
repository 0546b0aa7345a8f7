"""A folder in which the docs' blocks and the docstrings' examples run, with a service.

It has a small model, data and a store under the names that the docs use. `reflogp` commands, Python blocks and examples run in
this process, one after the other; a service is a process of its own, as are the few other programs. What cannot run here is
parsed as far as it can be: see `parse`.
"""

from __future__ import annotations

import ast
import doctest
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer
import yaml
from packaging.requirements import Requirement

from reflogp.cli import demo, main
from reflogp.cli.main import app
from reflogp.scoring.data.shape import detect_format, examples_of, output_columns, token_row
from reflogp.service.settings import ServerSettings, read_settings
from reflogp.trainer.options import Options, read_options
from tests.conftest import REPOSITORY
from tests.docs.blocks import Block
from tests.service.serving import Service

_ADDRESS = "http://127.0.0.1:8311"
_SERVE = ("serve", "--store", "./logps", "--model", "sft=./sft-model")
#: A CPU, few steps, nothing written: put into every config of a trainer that a block makes.
_STEPS = 2
_ON_CPU = "use_cpu=True, bf16=False, "
_SHORT = f"max_steps={_STEPS}, report_to=[], save_strategy='no', disable_tqdm=True, "
_SHORT_OF = {
    "RLOOConfig": _SHORT + "max_completion_length=8, ",
    "GRPOConfig": _SHORT + "max_completion_length=8, ",
    "OnlineDPOConfig": _SHORT + "max_new_tokens=8, ",
}
_CONFIG = re.compile(r"\b((?:DPO|KTO|RLOO|GRPO|OnlineDPO)Config)\(")
#: Files and folders of the repository that a command names.
_FILE = re.compile(r"(benchmarks|docker|examples|tests)/")


class Workspace:
    """Runs blocks in `folder`, the current directory.

    Args:
        folder: holds ./sft-model, pairs.jsonl and what else the docs name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._service: Service | None = None
        self._served: tuple[str, ...] = ()
        self._names: dict[str, dict[str, Any]] = {}

    def close(self) -> None:
        if self._service is not None:
            self._service.stop()

    def begin_page(self, blocks: list[Block]) -> None:
        """Remove what other pages scored. A page that scores nothing is about a store that has the values of pairs.jsonl."""
        self.close()
        self._service, self._served = None, ()
        shutil.rmtree(self.folder / "logps", ignore_errors=True)
        if not any("reflogp score" in block.text for block in blocks):
            _reflogp(["score", "./sft-model", "pairs.jsonl", "--store", "./logps", "--dtype", "bfloat16"])

    def run_python(self, block: Block) -> None:
        """Run it in the page's names, which the page's later blocks see."""
        text = _short(self._here(block.text))
        names = self._names.setdefault(block.page, {"__name__": "docs"})
        exec(compile("\n" * block.line + text, str(REPOSITORY / block.page), "exec"), names)
        if "trainer.train()" in text:
            assert names["trainer"].state.global_step == _STEPS, f"{block}: it did not train"

    def run_examples(self, name: str, docstring: str) -> None:
        """Run a docstring's `>>>` examples in names of their own; what they show is compared, and … stands for anything."""
        test = doctest.DocTestParser().get_doctest(_short(self._here(docstring)), {}, name, None, 0)
        assert test.examples, f"{name} has no example"
        runner, said = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), []
        assert runner.run(test, out=said.append).failed == 0, "".join(said)

    def run_toml(self, block: Block) -> None:
        """Read it as a service's settings; the store is given where the block has none."""
        file = self.folder / "settings.toml"
        file.write_text(block.text, encoding="utf-8")
        given = {} if "store" in tomllib.loads(block.text) else {"store": "./logps"}
        read_settings(str(file), **given)

    def run_json(self, block: Block) -> None:
        """Read each line as a row of a dataset."""
        for line in block.text.splitlines():
            columns = json.loads(line)
            form = detect_format(columns)
            if form == "tokens":
                token_row(columns, output_columns(form, columns))
            else:
                examples_of(columns, form, images="images" in columns)

    def run_line(self, line: str) -> None:
        """Run one line of a sh block."""
        words, target = _redirected([os.path.expandvars(word) for word in shlex.split(self._here(line), comments=True)])
        match words:
            case ["reflogp", "serve", *options]:
                self._serve(("serve", *options))
            case ["reflogp", "demo"]:
                # It finds a model, which it would otherwise train, and trains for few steps.
                shutil.copytree("sft-model", "reflogp-demo/model", dirs_exist_ok=True)
                with patch.object(demo, "_STEPS", _STEPS):
                    _reflogp(["demo"])
            case ["reflogp", *arguments]:
                printed = _reflogp(arguments)
                if target is not None:
                    Path(target).write_text(printed, encoding="utf-8")
            case ["curl", *_]:
                subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=120)
            case _:
                raise AssertionError(f"nothing here runs {words[0]!r}: name it in NOT_RUN, with the reason")

    def _here(self, text: str) -> str:
        """`text` with the address of the service that runs here; one is started where none was."""
        if _ADDRESS not in text:
            return text
        if self._service is None:
            self._serve(_SERVE)
        assert self._service is not None
        return text.replace(_ADDRESS, self._service.url)

    def _serve(self, words: tuple[str, ...]) -> None:
        if words == self._served:
            return  # the same service, on another page
        self.close()
        self._service, self._served = Service(*words[1:]), words
        self._service.worker_ready()


def _short(text: str) -> str:
    """`text` with configs of trainers that take few steps on a CPU. A text that chooses its device keeps it."""
    device = _ON_CPU if "use_cpu=" not in text else ""
    return _CONFIG.sub(lambda found: found[0] + device + _SHORT_OF.get(found[1], _SHORT), text)


def lines_of(block: Block) -> list[str]:
    """The commands of a sh block: continued lines in one, without those that only hold a comment."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in lines if shlex.split(line, comments=True)]


def parse(line: str) -> None:
    """Check a line of a sh block that cannot run here: our commands and options, and files of the repository that it names.

    Raises what the program's own parser raises, or AssertionError.
    """
    words, _ = _redirected(shlex.split(line, comments=True))
    for word in words:
        assert not _FILE.match(word) or (REPOSITORY / word).exists(), f"there is no {word}"
    match words:
        case [program, *arguments] if Path(program).name == "reflogp":
            parse_reflogp(arguments)
        case ["docker", "run", *_, "reflogp:cpu"]:
            pass
        case ["docker", "run", *options] if "reflogp:cpu" in options:
            parse_reflogp(options[options.index("reflogp:cpu") + 1 :])
        case ["deepspeed", "--module", module, *arguments] | ["python", "-m", module, *arguments] if "reflogp" in module:
            assert (REPOSITORY / "trainer_ext" / f"{module.replace('.', '/')}.py").is_file(), f"there is no module {module}"
            read_options(module, arguments, "")
        case ["make", target]:
            subprocess.run(["make", "--dry-run", target], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        case [pip, "install", *requirements] if Path(pip).name == "pip":
            project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            for requirement in map(Requirement, requirements):
                known = requirement.extras <= project["optional-dependencies"].keys()
                assert requirement.name == "reflogp" and known, requirement


def parse_reflogp(arguments: list[str]) -> None:
    """Have the real command line read these arguments, and do nothing."""
    command: Any = typer.main.get_command(app)
    context = None
    name = "reflogp"
    while True:
        context = command.make_context(name, list(arguments), parent=context)
        if not hasattr(command, "commands"):
            return
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])


def parse_python(block: Block) -> None:
    """Parse it, and import what it imports from reflogp."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reflogp"):
            exec(ast.unparse(node), {})


def parse_ini(block: Block) -> None:
    """A systemd unit: its command is parsed."""
    [command] = re.findall(r"^ExecStart=(.*)$", block.text, re.MULTILINE)
    parse(command)


def parse_yaml(block: Block) -> None:
    """A part of axolotl's file, whose classes of reflogp are there, or of Compose's, whose variables are settings."""
    settings = yaml.safe_load(block.text)
    Options(**settings.get("reflogp", {"store": ""}))
    source = (REPOSITORY / "trainer_ext" / "reflogp" / "trainer" / "axolotl.py").read_text(encoding="utf-8")
    for name in re.findall(r"\bStored\w+", block.text):
        assert f"class {name}(" in source, name
    for name in re.findall(r"\bREFLOGP_\w+", block.text):
        assert name.removeprefix("REFLOGP_").lower() in ServerSettings.model_fields, name


def _reflogp(arguments: list[str]) -> str:
    """What the command prints; it has to end well."""
    argv, sys.argv = sys.argv, ["reflogp", *arguments]
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            main()
        code: Any = 0
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.argv = argv
    assert code == 0, f"reflogp {shlex.join(arguments)}: exit code {code}"
    return printed.getvalue()


def _redirected(words: list[str]) -> tuple[list[str], str | None]:
    """(the command, the file that its output goes to)."""
    return (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, None)
