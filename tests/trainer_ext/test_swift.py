"""Real ms-swift on a CPU: the same training with a reference model and with stored values, on one and two processes."""

from __future__ import annotations

import json
import shlex
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import save_llama
from tests.trainer_ext.framework_runs import (
    FOLDER,
    ROWS,
    SIZE,
    Runs,
    check_equal,
    environment_of,
    losses,
    needs,
    python_of,
    report,
    short_rows,
)

STOCK, STORED = "swift.cli.rlhf", "reflogp.trainer.swift.process"
STEPS = 10
#: Largest difference of a loss between a reference model and its stored values, in float32.
EQUAL = 1e-5

PYTHON = python_of("swift")
pytestmark = needs(PYTHON)


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("swift-model"), tokenizer, **SIZE)


@pytest.fixture(scope="module")
def data(pair_rows, tmp_path_factory) -> dict[str, Path]:
    """Datasets in ms-swift's standard format: pairs, pairs to evaluate on, rows with labels."""
    folder = tmp_path_factory.mktemp("swift-data")
    rows = short_rows(pair_rows)
    pairs = [{"messages": row["prompt"] + row["chosen"], "rejected_messages": row["prompt"] + row["rejected"]} for row in rows]
    labelled = [
        {"messages": row["prompt"] + row[side], "label": side == "chosen"} for row in rows for side in ("chosen", "rejected")
    ]
    files = {"pairs": pairs[:ROWS], "new": pairs[ROWS:], "labelled": labelled}
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return {name: folder / f"{name}.jsonl" for name in files}


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return environment_of(PYTHON, tmp_path_factory.mktemp("swift-caches"))


@pytest.fixture(scope="module")
def runs(environment):
    modules = ["swift.pipelines", "swift.pipelines.train.rlhf", "swift.rlhf_trainers", "peft", "reflogp.trainer"]
    modules += ["joblib", "swift.rlhf_trainers.dpo_trainer", "swift.rlhf_trainers.kto_trainer", "swift.callbacks"]
    with closing(Runs(PYTHON, FOLDER, [*modules, "transformers.models.llama.modeling_llama"], environment)) as found:
        yield found


@pytest.fixture(scope="module")
def settings(model, data) -> dict[str, Any]:
    return {
        "rlhf_type": "dpo",
        "model": model,
        "model_type": "llama",
        "template": "default",
        "dataset": data["pairs"],
        "tuner_type": "full",
        "torch_dtype": "float32",
        "bf16": "false",
        "max_length": 400,
        "split_dataset_ratio": 0,
        "logging_steps": 1,
        "max_steps": STEPS,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": "false",
        "learning_rate": 5e-4,
        "warmup_ratio": 0,
        "dataloader_num_workers": 0,
        "dataset_num_proc": 1,
        "report_to": "none",
        "use_cpu": "true",
        "check_model": "false",  # else a run asks ModelScope for files, for 25 s without network
        "seed": 7,
        "add_version": "false",
        "create_checkpoint_symlink": "false",
    }


def words_of(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", *str(value).split())]


@pytest.fixture(scope="module")
def train(runs, settings):
    """train(module, folder, options, words) -> (what each process noted, what they printed)."""

    def run(
        module: str, folder: Path, options: dict[str, Any], words: tuple[str, ...] = (), processes: int = 1, check: bool = True
    ) -> tuple[list[dict[str, Any]], str]:
        given = [*words, *words_of({**settings, "output_dir": folder / "out", **options})]
        return runs.run(module, folder, given, processes, check)

    return run


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """Empty until the module's first run has what it misses scored."""
    return tmp_path_factory.mktemp("swift-store") / "logps"


CASES: dict[str, dict[str, Any]] = {
    "DPO, 2 processes": {"gradient_accumulation_steps": 2, "eval_steps": 5, "eval_strategy": "steps"},
    "IPO, LoRA": {
        "loss_type": "ipo",
        "beta": 0.5,
        "tuner_type": "lora",
        "target_modules": "q_proj v_proj",
        "lora_rank": 4,
        "learning_rate": 1e-2,
    },
    "KTO": {"rlhf_type": "kto"},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_real_reference_model(case, train, data, store, model, tmp_path):
    processes = 2 if "2 processes" in case else 1
    options = dict(CASES[case])
    if "eval_steps" in options:
        options["val_dataset"] = data["new"]
    if case == "KTO":
        options["dataset"] = data["labelled"]
    stock, _ = train(STOCK, tmp_path / "stock", options, processes=processes)
    words = ("--reflogp.store", str(store), "--reflogp.on_miss", "run")
    ours, _ = train(STORED, tmp_path / "ours", options, words, processes)
    check_equal(losses(tmp_path / "stock" / "out"), losses(tmp_path / "ours" / "out"), STEPS, EQUAL)
    has_reference = "LoRA" not in case  # ms-swift switches the adapter off, and loads no second model
    assert [seen["loaded"] for seen in stock] == [[str(model)] * (2 if has_reference else 1)] * processes
    assert [seen["loaded"] for seen in ours] == [[str(model)]] * processes
    seen = report(tmp_path / "ours" / "out")
    assert seen["verdict"] == "passed"
    assert seen["step_zero"]["sequences"] == 8 * processes
    assert seen["forwards"]["policy_passes"] == seen["forwards"]["micro_batches"] * (2 if case == "KTO" else 1)


def test_rows_without_values_are_named_with_the_command(train, reflogp, tmp_path):
    words = ("--reflogp.store", str(tmp_path / "logps"))
    [seen], _ = train(STORED, tmp_path, {"max_steps": 1}, words, check=False)
    assert seen["error"] == "MissingLogpsError"
    assert f"{ROWS} of {ROWS} rows of train" in seen["words"]
    command = shlex.split(seen["words"].split("Score them: ")[1])
    assert command[:2] == ["reflogp", "score"]
    assert reflogp(*command[1:])[0] == 0
    train(STORED, tmp_path, {"max_steps": 1}, words)


def test_a_wrong_reference_is_refused_before_the_first_step(train, tokenizer, tmp_path):
    other = save_llama(tmp_path / "other", tokenizer, **{**SIZE, "num_hidden_layers": 1})
    words = ("--reflogp.store", str(tmp_path / "logps"), "--reflogp.model", str(other), "--reflogp.on_miss", "run")
    [seen], _ = train(STORED, tmp_path, {}, words, check=False)
    assert seen["error"] == "StepZeroError"
    assert report(tmp_path / "out")["verdict"] == "failed"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rlhf_type": "cpo"}, "rlhf_type cpo does not use reference log-probs"),
        ({"padding_free": "true", "attn_impl": "flash_attn"}, "padding_free=True is not supported"),
        ({"packing": "true", "attn_impl": "flash_attn"}, "packing=True is not supported"),
        ({"streaming": "true"}, "is a stream"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, why, train, store, tmp_path):
    [seen], _ = train(STORED, tmp_path, options, ("--reflogp.store", str(store)), check=False)
    assert why in seen["words"], seen


def test_the_command_starts_the_processes_as_ms_swift_does(train, settings, environment, store, tmp_path):
    """The one command of the docs, with two processes; options reach the processes that ms-swift starts."""
    train(STORED, tmp_path / "one", {"max_steps": 1}, ("--reflogp.store", str(store), "--reflogp.on_miss", "run"))
    given = words_of({**settings, "max_steps": 2, "output_dir": tmp_path / "out"})
    command = [str(PYTHON), "-m", "reflogp.trainer.swift.rlhf", "--reflogp.store", str(store), *given]
    found = {**environment, "NPROC_PER_NODE": "2", "PYTHONPATH": str(FOLDER)}
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert report(tmp_path / "out")["verdict"] == "passed"
    assert report(tmp_path / "out")["step_zero"]["sequences"] == 16


def test_help_teaches(environment):
    run = {"env": {**environment, "PYTHONPATH": str(FOLDER)}, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([PYTHON, "-m", "reflogp.trainer.swift.rlhf", "--help"], **run)
    assert done.returncode == 0
    assert "--reflogp.store" in done.stdout and "swift rlhf" in done.stdout


def test_another_revision_is_another_reference(environment):
    code = """
from types import SimpleNamespace as Settings
from reflogp.trainer.batches.options import read_options
from reflogp.trainer.swift import process
asked = []
process.safe_snapshot_download = lambda **given: asked.append((given["model_id_or_path"], given["revision"])) or "/elsewhere"
replacements = process.Replacements(read_options("c", ["--reflogp.store", "s"], "m", "d")[0])
def reference(**given):
    settings = dict(model="org/m", model_dir="/here", model_revision=None, ref_model="org/m", ref_model_revision=None)
    return replacements._reference(Settings(use_hf=True, hub_token=None, **{**settings, **given}))
assert reference() == reference(ref_model=None) == reference(model_revision="v1", ref_model_revision="v1") == "/here"
assert reference(ref_model_revision="v1") == reference(ref_model="org/other") == "/elsewhere"
assert asked == [("org/m", "v1"), ("org/other", None)], asked
print("as expected")
"""
    run = {"env": {**environment, "PYTHONPATH": str(FOLDER)}, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([PYTHON, "-c", code], **run)
    assert "as expected" in done.stdout, done.stderr[-3000:]
