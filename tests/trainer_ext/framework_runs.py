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
from tests.conftest import REPOSITORY, save_llama
from tests.service.warm_python import WarmPython
from tests.trainer_ext.distributed_run import torchrun

FOLDER = Path(__file__).parent / "frameworks_env"
SIZE = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
ROWS, EVAL_ROWS, STEPS = 44, 9, 10
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
    found["PYTHONPATH"] = os.pathsep.join(
        [str(FOLDER), *(str(REPOSITORY / part) for part in ("store", "client", "trainer_ext"))]
    )
    found.pop("TQDM_DISABLE", None)  # ms-swift writes to a bar that is switched off
    return found


def run(
    python: WarmPython, module: str, folder: Path, words: list[str], processes: int = 1, check: bool = True
) -> list[dict[str, Any]]:
    """Run a module of a framework in some processes. Returns what each process noted."""
    status, printed = torchrun(python, ["run", str(folder / "notes"), module, *words], processes, timeout=240)
    assert (status == 0) == check, printed[-6000:]
    return [json.loads(file.read_text()) for file in sorted((folder / "notes").glob("rank-*.json"))]


def losses(out: Path) -> list[float]:
    """The losses of every step and evaluation, as the trainer logged them; ms-swift and OpenRLHF have files of their own."""
    if (out / "scalars.jsonl").is_file():
        scalars = map(json.loads, (out / "scalars.jsonl").read_text().splitlines())
        return [value for name, _, value in scalars if name in ("train/loss", "eval/eval_loss")]
    own = out / "logging.jsonl"
    if own.is_file():
        logged = [json.loads(line) for line in own.read_text().splitlines()]
    else:
        logged = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in logged for name in ("loss", "eval_loss") if name in entry]


def record(out: Path) -> dict[str, Any]:
    return json.loads((out / "reflogp.json").read_text())


def words_of(stored: dict[str, Any] | None) -> list[str]:
    """reflogp's options on a command line."""
    pairs = [(f"--reflogp.{name}", value) for name, value in (stored or {}).items()]
    return [word for name, value in pairs for word in ([name] if value is True else [name, str(value)])]


def score_missing(noted: list[dict[str, Any]]) -> str:
    """Do what the error of a run says, which is the same on every process. Returns the error's text."""
    [(error, words)] = {(seen.get("error"), seen.get("words", "")) for seen in noted}
    assert error == "MissingLogpsError", noted
    command = re.search(r"reflogp (score .*?--dtype [\w-]+)", words)
    assert command is not None, words
    run_command(shlex.split(command[1]))
    return words


def run_command(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.exception or done.output


def check_equal(stock: list[float], stored: list[float], allowed: float, steps: int = STEPS) -> None:
    """Check that two runs have the same losses, and that they are those of a run that learns."""
    assert len(stock) == len(stored) >= steps
    assert max(abs(one - other) for one, other in zip(stock, stored, strict=True)) <= allowed
    assert max(stored) - min(stored) > 1e-3, "it learns"


def check_losses(
    train: Any, folder: Path, case: str, options: dict[str, Any], model: str, out: str = "out", bfloat16: str = "bfloat16"
) -> None:
    """Train as the framework does, and on the values that the command in a first run's error scored.

    Args:
        train: train(folder, options, stored, processes, check) -> what each process noted. `stored` are reflogp's options; None
            for the framework alone.
        case: says whether there are "2 processes", "bfloat16", "KTO" (without evaluation) or "LoRA" (without a second model).
        out: the folder of the logged losses.
        bfloat16: the reference's dtype in that case.
    """
    processes, datasets = 2 if "2 processes" in case else 1, {"train"} if "KTO" in case else {"train", "eval"}
    dtype, models = "bfloat16" if "bfloat16" in case else "float32", 1 if "LoRA" in case else 2
    stored = {"store": str(folder / "logps")}
    words = score_missing(train(folder / "missing", options, stored, processes, check=False))
    assert all(f" rows of {name} (rows 0, 1, " in words for name in datasets)
    stock = train(folder / "stock", options, None, processes)
    ours = train(folder / "ours", options, stored, processes)
    check_equal(*(losses(folder / name / out) for name in ("stock", "ours")), EQUAL[dtype])
    assert [seen["loaded"] for seen in stock] == [[model] * models] * processes
    assert [seen["loaded"] for seen in ours] == [[model]] * processes
    seen = record(folder / "ours" / "out")
    assert (seen["step_zero"]["passed"], seen["step_zero"]["sequences"]) == (True, 8 * processes)
    assert {join["reference_dtype"] for join in seen["joins"].values()} == {bfloat16 if dtype == "bfloat16" else dtype}
    assert seen["joins"].keys() == datasets


def check_other_weights(train: Any, tokenizer: Any, folder: Path, options: dict[str, Any], one_step: dict[str, Any]) -> None:
    """Other weights than the reference's are refused before the first step, unless they are meant."""
    other = save_llama(folder / "other", tokenizer, **{**SIZE, "num_hidden_layers": 1})
    stored = {"store": str(folder / "logps"), "model": str(other)}
    score_missing(train(folder / "missing", options, stored, check=False))
    assert {seen["error"] for seen in train(folder / "wrong", options, stored, check=False)} == {"StepZeroError"}
    assert record(folder / "wrong" / "out")["step_zero"]["passed"] is False
    train(folder / "meant", {**options, **one_step}, {**stored, "policy_starts_elsewhere": True})
    assert record(folder / "meant" / "out")["step_zero"].startswith("not compared: the policy does not start from")
