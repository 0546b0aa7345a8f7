"""Real OpenRLHF on DeepSpeed, two processes on a CPU: the same training with a reference model and with stored values.

In the environment of `make setup-openrlhf`; frameworks_env/openrlhf_on_cpu.py says what differs there from a GPU's run.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import save_llama, write_rows
from tests.service.serving import running, settings_file
from tests.trainer_ext import framework_runs as frameworks

STOCK, STORED = "openrlhf.cli.train_dpo", "reflogp.trainer.openrlhf"
#: 80 rows in batches of 16 are 5 optimizer steps an epoch; 2 rows at a time on 2 processes are 4 micro-batches a step.
ROWS, EVAL_ROWS, BATCH, MICRO, STEPS = 80, 11, 16, 2, 10
RUNS = {"float32": {"ds.param_dtype": "fp32"}, "bfloat16": {"ds.param_dtype": "bf16", "ds.zero_stage": 3}}
SHORT = {"train.max_epochs": 1, "data.max_samples": 32, "eval.dataset": None, "ckpt.save_steps": -1}

PYTHON = frameworks.python_of("openrlhf")
pytestmark = frameworks.needs(PYTHON)


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("openrlhf-model"), tokenizer, **frameworks.SIZE)


@pytest.fixture(scope="module")
def train(model, pair_rows, tmp_path_factory):
    """train(module, folder, options) -> what each process noted. An option of None removes a default."""
    rows = [row for row in pair_rows if len(row["prompt"][0]["content"]) < 220]  # OpenRLHF drops longer prompts
    data = tmp_path_factory.mktemp("openrlhf-data")
    train, evaluated = write_rows(data / "train.jsonl", rows[:ROWS]), write_rows(data / "eval.jsonl", rows[ROWS:][:EVAL_ROWS])
    settings = {"model.model_name_or_path": model, "data.dataset": train, "eval.dataset": evaluated, "eval.split": "train"}
    settings |= {
        "data.apply_chat_template": "",
        "data.prompt_key": "prompt",
        "data.max_len": 160,
    }  # half of the rows are longer
    settings |= {"train.micro_batch_size": MICRO, "train.batch_size": BATCH, "train.max_epochs": 2, "adam.lr": 3e-4}
    settings |= {"ds.param_dtype": "fp32", "ds.attn_implementation": "sdpa", "logger.wandb.run_name": "run"}
    settings |= {"eval.steps": 5, "ckpt.save_steps": 4}
    environment = {**frameworks.environment_of(PYTHON, tmp_path_factory.mktemp("caches")), "DS_ACCELERATOR": "cpu"}
    modules = ["openrlhf_on_cpu", "peft", "transformers.models.llama.modeling_llama", "reflogp.trainer"]
    with closing(frameworks.Runs(PYTHON, frameworks.FOLDER, modules, environment)) as runs:

        def run(module: str, folder: Path, options: dict[str, Any], check: bool = True) -> list[dict[str, Any]]:
            folders = {"ckpt.output_dir": "out", "ckpt.path": "checkpoints", "logger.tensorboard_dir": "logs"}
            chosen = {**settings, **{name: folder / value for name, value in folders.items()}, **options}
            words = [word for name, value in chosen.items() if value is not None for word in (f"--{name}", str(value)) if word]
            return runs.run(module, folder, words, processes=2, check=check)[0]

        yield run


def logged(folder: Path, name: str) -> dict[int, float]:
    lines = map(json.loads, (folder / "logs" / "run" / "scalars.jsonl").read_text().splitlines())
    return {step: value for metric, step, value in lines if metric == name}


def apart(one: Path, other: Path, name: str) -> float:
    """Largest difference of a logged metric, at the steps that both logged."""
    left, right = logged(one, name), logged(other, name)
    assert left.keys() & right.keys()
    return max(abs(left[step] - right[step]) for step in left.keys() & right.keys())


@pytest.fixture(scope="module", params=RUNS)
def stored(request, train, tmp_path_factory) -> SimpleNamespace:
    """A training with what its own error had scored."""
    folder = tmp_path_factory.mktemp("stored")
    options = {**RUNS[request.param], "reflogp.store": folder / "store"}
    words = frameworks.score_missing(train(STORED, folder / "missing", options, check=False))
    assert (
        f"{ROWS} of {ROWS} rows of train (rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …) and {EVAL_ROWS} of {EVAL_ROWS} rows of" in words
    )
    noted = train(STORED, folder, options)
    return SimpleNamespace(dtype=request.param, options=options, folder=folder, noted=noted)


def test_losses_are_those_of_a_real_reference_model(train, stored, model, tmp_path, record_property):
    stock = train(STOCK, tmp_path, {**RUNS[stored.dtype], "ckpt.save_steps": -1})
    for name in ("train/loss", "train/chosen_reward", "train/reject_reward", "eval/eval_loss"):
        record_property("told", f"OpenRLHF, {stored.dtype}: {name} differs by {apart(tmp_path, stored.folder, name):.1e}")
        assert apart(tmp_path, stored.folder, name) <= frameworks.EQUAL[stored.dtype], name
    losses = logged(stored.folder, "train/loss").values()
    assert max(losses) - min(losses) > 1e-3, "it learns"
    assert [seen["loaded"] for seen in stock] == [[str(model)] * 2] * 2
    assert [seen["loaded"] for seen in stored.noted] == [[str(model)]] * 2
    seen = frameworks.record(stored.folder / "out")
    assert (seen["step_zero"]["passed"], seen["step_zero"]["sequences"]) == (True, 2 * 2 * MICRO)
    assert (seen["step_zero"]["reference_dtype"], seen["step_zero"]["policy_dtype"]) == (stored.dtype, stored.dtype)
    assert {name: join["rows"] for name, join in seen["joins"].items()} == {"train": ROWS, "eval": EVAL_ROWS}


def test_logs_evaluations_and_checkpoints_at_the_optimizer_steps_asked_for(train, stored, tmp_path):
    """With 4 micro-batches a step; and, resumed at step 8, with other intervals."""
    assert sorted(logged(stored.folder, "train/loss")) == list(range(1, STEPS + 1))
    assert sorted(logged(stored.folder, "eval/eval_loss")) == [5, 10]
    saved = [path.name for path in (stored.folder / "checkpoints").glob("global_step*")]
    assert sorted(saved) == ["global_step4", "global_step8"]
    resumed = {"ckpt.load_enable": "", "ckpt.path": stored.folder / "checkpoints", "ckpt.save_steps": -1}
    train(STORED, tmp_path, {**stored.options, **resumed, "logger.logging_steps": 2, "eval.steps": 3})
    assert sorted(logged(tmp_path, "train/loss")) == [10]
    assert sorted(logged(tmp_path, "eval/eval_loss")) == [9]
    assert apart(tmp_path, stored.folder, "train/loss") <= frameworks.EQUAL[stored.dtype]
    why = f"not compared: the run was resumed after {8 * BATCH} samples"
    assert frameworks.record(tmp_path / "out")["step_zero"] == why


def test_other_weights_are_refused_before_the_first_step(train, tokenizer, tmp_path):
    other = save_llama(tmp_path / "other", tokenizer, **{**frameworks.SIZE, "num_hidden_layers": 1})
    options = {**SHORT, "reflogp.store": tmp_path / "store", "reflogp.model": other}
    frameworks.score_missing(train(STORED, tmp_path / "missing", options, check=False))
    ranks = train(STORED, tmp_path / "wrong", options, check=False)
    assert [seen["error"] for seen in ranks] == ["StepZeroError", "StepZeroError"]
    assert frameworks.record(tmp_path / "wrong" / "out")["step_zero"]["passed"] is False
    train(STORED, tmp_path / "meant", {**options, "reflogp.policy_starts_elsewhere": ""})
    assert frameworks.record(tmp_path / "meant" / "out")["step_zero"].startswith("not compared: the policy does not start")


def test_a_service_scores_what_is_missing(train, model, tmp_path):
    """For an adapter's training too: with its weights still at zero the policy is the reference."""
    models = {"sft": {"model": str(model), "dtype": "float32"}}
    options = {**SHORT, "ds.lora.rank": 4, "reflogp.model": "sft", "reflogp.on_miss": "score"}
    with running("--config", settings_file(tmp_path, tmp_path / "store", models)) as service:
        train(STORED, tmp_path, {**options, "reflogp.store": service.url})
    assert frameworks.record(tmp_path / "out")["step_zero"]["passed"]


def test_the_command_has_help(train, tmp_path):
    train(STORED, tmp_path, {"help": ""})
    assert "--reflogp.store" in (tmp_path / "output.txt").read_text()
