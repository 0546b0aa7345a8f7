"""Real OpenRLHF on DeepSpeed, two processes on a CPU: the same training with a reference model and with stored values.

In the environment of `make setup-openrlhf`; frameworks_env/openrlhf_on_cpu.py says what differs there from a GPU's run.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_rows
from tests.service.serving import running, settings_file
from tests.service.warm_python import WarmPython
from tests.trainer_ext import framework_runs as frameworks
from tests.trainer_ext.framework_runs import losses, record

STOCK, STORED = "openrlhf.cli.train_dpo", "reflogp.trainer.openrlhf"
#: 80 rows in batches of 16 are 5 optimizer steps an epoch; 4 rows at a time on 2 processes are 2 micro-batches a step.
ROWS, EVAL_ROWS, BATCH, MICRO = 80, 11, 16, 4
CASES = {"2 processes": {}, "bfloat16, 2 processes": {"ds.param_dtype": "bf16", "ds.zero_stage": 3}}
SHORT: dict[str, Any] = {"train.max_epochs": 1, "data.max_samples": 32, "eval.dataset": None}

PYTHON = frameworks.python_of("openrlhf")
pytestmark = frameworks.needs(PYTHON)


@pytest.fixture(scope="module")
def train(small_model, pair_rows, tmp_path_factory):
    """See frameworks.check_losses. An option of None removes a default."""
    rows = [row for row in pair_rows if len(row["prompt"][0]["content"]) < 220]  # OpenRLHF drops longer prompts
    data = tmp_path_factory.mktemp("openrlhf-data")
    train, evaluated = write_rows(data / "train.jsonl", rows[:ROWS]), write_rows(data / "eval.jsonl", rows[ROWS:][:EVAL_ROWS])
    settings = {"model.model_name_or_path": small_model, "data.dataset": train, "data.prompt_key": "prompt"}
    settings |= {"data.apply_chat_template": "", "data.max_len": 160}  # half of the rows are longer
    settings |= {"eval.dataset": evaluated, "eval.split": "train"}
    settings |= {"train.micro_batch_size": MICRO, "train.batch_size": BATCH, "train.max_epochs": 2, "adam.lr": 3e-4}
    settings |= {"ds.param_dtype": "fp32", "ds.attn_implementation": "sdpa", "logger.wandb.run_name": "run"}
    settings |= {"eval.steps": 5, "ckpt.save_steps": -1}
    environment = {**frameworks.environment_of(PYTHON, tmp_path_factory.mktemp("caches")), "DS_ACCELERATOR": "cpu"}
    modules = ["openrlhf_on_cpu", "peft", "transformers.models.llama.modeling_llama", "reflogp.trainer"]
    with closing(WarmPython(modules, str(PYTHON), environment)) as python:

        def run(folder: Path, options: dict[str, Any], stored: Any = None, processes: int = 2, check: bool = True) -> Any:
            folders = {"ckpt.output_dir": "out", "ckpt.path": "checkpoints", "logger.tensorboard_dir": "logs"}
            chosen = {**settings, **{name: folder / value for name, value in folders.items()}, **options}
            words = [word for name, value in chosen.items() if value is not None for word in (f"--{name}", str(value)) if word]
            module = STORED if stored else STOCK
            return frameworks.run(python, module, folder, words + frameworks.words_of(stored), processes, check)

        yield run


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_real_reference_model(case, train, small_model, tmp_path):
    frameworks.check_losses(train, tmp_path, case, CASES[case], str(small_model), out="logs/run")


def test_a_resumed_run_is_not_compared(train, tmp_path):
    stored, rest = {"store": tmp_path / "store"}, {"ckpt.load_enable": "", "ckpt.path": tmp_path / "checkpoints"}
    frameworks.score_missing(train(tmp_path / "missing", {}, stored, check=False))
    train(tmp_path, {"ckpt.save_steps": 4}, stored)
    train(tmp_path / "rest", rest, stored)
    assert losses(tmp_path / "rest" / "logs" / "run")[-1] == pytest.approx(losses(tmp_path / "logs" / "run")[-1], abs=1e-5)
    why = f"not compared: the run was resumed after {8 * BATCH} samples"
    assert record(tmp_path / "rest" / "out")["step_zero"] == why


def test_other_weights_are_refused_before_the_first_step(train, tokenizer, tmp_path):
    frameworks.check_other_weights(train, tokenizer, tmp_path, SHORT, {})


def test_a_service_scores_what_is_missing(train, small_model, tmp_path):
    """For an adapter's training too: with its weights still at zero the policy is the reference."""
    models = {"sft": {"model": str(small_model), "dtype": "float32"}}
    stored = {"model": "sft", "on_miss": "score"}
    with running("--config", settings_file(tmp_path, tmp_path / "store", models)) as service:
        train(tmp_path, {**SHORT, "ds.lora.rank": 4}, {**stored, "store": service.url})
    assert record(tmp_path / "out")["step_zero"]["passed"]
