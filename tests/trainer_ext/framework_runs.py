"""Runs of OpenRLHF, LLaMA-Factory, ms-swift, axolotl and unsloth in environments of their own: what their tests share."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reflogp.cli.main import app
from tests.conftest import REPOSITORY
from tests.trainer_ext.warm import Warm

FOLDER = Path(__file__).parent / "frameworks_env"
SIZE = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
ROWS, EVAL_ROWS = 44, 9
#: Largest difference of a loss between a reference model and its stored values, by dtype.
EQUAL = {"float32": 1e-5, "bfloat16": 0.02}


def short_rows(pair_rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(pair_rows, key=lambda row: len(str(row)))[: ROWS + EVAL_ROWS]


def python_of(framework: str) -> Path:
    """The Python of a framework's environment: "openrlhf", "llamafactory", "swift", "axolotl" or "unsloth"."""
    return REPOSITORY / f".venv-{framework}" / "bin" / "python"


def needs(python: Path) -> list[pytest.MarkDecorator]:
    """Marks of the tests that run a framework."""
    reason = f"there is no {python.parent.parent.name}: make setup-frameworks"
    return [pytest.mark.slow, pytest.mark.skipif(not python.is_file(), reason=reason)]


def environment_of(python: Path, caches: Path) -> dict[str, str]:
    found = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    found |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(caches / "datasets"), "MODELSCOPE_CACHE": str(caches / "models")}
    found |= {"REFLOGP_CACHE_DIR": str(caches / "reflogp"), "PATH": f"{python.parent}:{os.environ['PATH']}"}
    found["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *(str(REPOSITORY / part) for part in ("store", "client", "trainer_ext"))])
    found.pop("TQDM_DISABLE", None)  # ms-swift writes to a bar that is switched off
    return found


class Runs:
    """Starts runs in processes that have imported a framework.

    Args:
        python: of the framework's environment.
        folder: has run.py, whose `main` runs a module.
        modules: imported before the first run.
        environment: of all runs.
    """

    def __init__(self, python: Path, folder: Path, modules: list[str], environment: dict[str, str]) -> None:
        self._environment = environment
        self._warm = Warm(str(python), folder, ["run", *modules], environment)

    def run(
        self, module: str, folder: Path, words: list[str], processes: int = 1, check: bool = True
    ) -> tuple[list[dict[str, Any]], str]:
        """Run a module in some processes. Returns what each process noted, and what they printed."""
        folder.mkdir(parents=True, exist_ok=True)
        output = folder / "output.txt"
        arguments = [str(folder / "notes"), module, *words]
        group = self._warm.start("run:main", arguments, self._environment, output, processes)
        try:
            status = self._warm.wait(group, timeout=240)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{output.read_text()[-6000:]}") from error
        finally:
            self._warm.kill(group)
        printed = output.read_text()
        assert (status == 0) == check, printed[-6000:]
        return [json.loads(file.read_text()) for file in sorted((folder / "notes").glob("rank-*.json"))], printed

    def close(self) -> None:
        self._warm.close()


def losses(out: Path) -> list[float]:
    """The losses of every step and evaluation, as the trainer logged them; ms-swift has a file of its own for them."""
    own = out / "logging.jsonl"
    if own.is_file():
        logged = [json.loads(line) for line in own.read_text().splitlines()]
    else:
        logged = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in logged for name in ("loss", "eval_loss") if name in entry]


def record(out: Path) -> dict[str, Any]:
    return json.loads((out / "reflogp.json").read_text())


def command_in(error: str) -> list[str]:
    """The words after `reflogp` of the command that an error names."""
    command = re.search(r"reflogp (score .*?--dtype [\w-]+)", error)
    assert command is not None, error
    return shlex.split(command[1])


def score_missing(noted: list[dict[str, Any]]) -> str:
    """Do what the error of a run says, which is the same on every process. Returns the error's text."""
    [(error, words)] = {(seen.get("error"), seen.get("words", "")) for seen in noted}
    assert error == "MissingLogpsError", noted
    run_command(command_in(words))
    return words


def run_command(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.exception or done.output


def check_equal(stock: list[float], stored: list[float], steps: int, allowed: float) -> None:
    """Check that two runs have the same losses, and that they are those of a run that learns."""
    assert len(stock) == len(stored) >= steps
    assert max(abs(one - other) for one, other in zip(stock, stored, strict=True)) <= allowed
    assert max(stored) - min(stored) > 1e-3, "it learns"
