"""Real ms-swift on a CPU: the same training with a reference model and with stored values, on one and two processes."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_rows
from tests.service.warm_python import WarmPython
from tests.trainer_ext import framework_runs as frameworks
from tests.trainer_ext.framework_runs import ROWS, STEPS, record, score_missing, words_of

STOCK, STORED = "swift.cli.rlhf", "reflogp.trainer.swift_process"
PYTHON = frameworks.python_of("swift")
pytestmark = frameworks.needs(PYTHON)


@pytest.fixture(scope="module")
def data(pair_rows, tmp_path_factory) -> Path:
    """Datasets in ms-swift's standard format: pairs, pairs to evaluate on, rows with labels."""
    folder, rows = tmp_path_factory.mktemp("swift-data"), frameworks.short_rows(pair_rows)
    pairs = [{"messages": row["prompt"] + row["chosen"], "rejected_messages": row["prompt"] + row["rejected"]} for row in rows]
    labelled = [{"messages": row["messages"], "label": True} for row in pairs]
    labelled += [{"messages": row["rejected_messages"], "label": False} for row in pairs]
    for name, content in {"pairs": pairs[:ROWS], "new": pairs[ROWS:], "labelled": labelled}.items():
        write_rows(folder / f"{name}.jsonl", content)
    return folder


@pytest.fixture(scope="module")
def settings(small_model, data) -> dict[str, Any]:
    run = {"rlhf_type": "dpo", "model": small_model, "model_type": "llama", "template": "default", "max_length": 400, "seed": 7}
    run |= {"dataset": data / "pairs.jsonl", "split_dataset_ratio": 0, "dataset_num_proc": 1, "dataloader_num_workers": 0}
    run |= {"tuner_type": "full", "torch_dtype": "float32", "bf16": "false", "gradient_checkpointing": "false"}
    run |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 1}
    run |= {"max_steps": STEPS, "learning_rate": 5e-4, "warmup_ratio": 0, "logging_steps": 1, "save_strategy": "no"}
    run |= {"use_cpu": "true", "report_to": "none", "add_version": "false", "create_checkpoint_symlink": "false"}
    return {**run, "check_model": "false"}  # else a run asks ModelScope for files, for 25 s without network


def words(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", *str(value).split())]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return frameworks.environment_of(PYTHON, tmp_path_factory.mktemp("swift-caches"))


@pytest.fixture(scope="module")
def train(environment, settings):
    """See frameworks.check_losses."""
    modules = ["swift.pipelines", "swift.pipelines.train.rlhf", "swift.rlhf_trainers", "peft", "reflogp.trainer"]
    modules += ["joblib", "swift.rlhf_trainers.dpo_trainer", "swift.rlhf_trainers.kto_trainer", "swift.callbacks"]
    with closing(WarmPython([*modules, "transformers.models.llama.modeling_llama"], str(PYTHON), environment)) as python:

        def run(folder: Path, options: dict[str, Any], stored: Any = None, processes: int = 1, check: bool = True) -> Any:
            given = words({**settings, "output_dir": folder / "out", **options}) + words_of(stored)
            return frameworks.run(python, STORED if stored else STOCK, folder, given, processes, check)

        yield run


LORA = {"tuner_type": "lora", "target_modules": "q_proj v_proj", "lora_rank": 4, "learning_rate": 1e-2}
CASES: dict[str, dict[str, Any]] = {
    "DPO, 2 processes": {"gradient_accumulation_steps": 2, "eval_steps": 5, "eval_strategy": "steps"},
    "DPO, bfloat16": {"torch_dtype": "bfloat16", "bf16": "true"},
    "IPO, LoRA": {"loss_type": "ipo", "beta": 0.5, **LORA},
    "KTO": {"rlhf_type": "kto"},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_real_reference_model(case, train, data, settings, tmp_path):
    options = CASES[case] | {"KTO": {"dataset": data / "labelled.jsonl"}}.get(case, {"val_dataset": data / "new.jsonl"})
    frameworks.check_losses(train, tmp_path, case, options, str(settings["model"]))


def test_other_weights_are_refused_before_the_first_step(train, tokenizer, tmp_path):
    frameworks.check_other_weights(train, tokenizer, tmp_path, {}, {"max_steps": 1})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rlhf_type": "cpo"}, "stored reference log-probs are for --rlhf_type dpo and kto"),
        ({"padding_free": "true", "attn_impl": "flash_attn"}, "padding_free=True is not supported"),
        ({"packing": "true", "attn_impl": "flash_attn"}, "packing=True is not supported"),
        ({"streaming": "true"}, "is a stream"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, why, train, tmp_path):
    [seen] = train(tmp_path, options, {"store": tmp_path / "logps"}, check=False)
    assert seen["error"] == "UsageError" and why in seen["words"], seen


def test_the_command_starts_the_processes_as_ms_swift_does(train, settings, environment, tmp_path):
    """The one command of the docs, with two processes; options reach the processes that ms-swift starts."""
    stored = {"store": tmp_path / "logps"}
    score_missing(train(tmp_path / "missing", {}, stored, check=False))
    found = {**environment, "NPROC_PER_NODE": "2"}
    given = words({**settings, "max_steps": 2, "output_dir": tmp_path / "out"})
    command = [PYTHON, "-m", "reflogp.trainer.swift", *words_of(stored), *given]
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert record(tmp_path / "out")["step_zero"]["sequences"] == 16


def test_another_revision_is_another_reference(environment):
    code = """
from types import SimpleNamespace as Settings
from reflogp.trainer import options, swift_process
swift_process.safe_snapshot_download = lambda **given: f"{given['model_id_or_path']} at {given['revision']}"
def reference(**given):
    settings = dict(model="org/m", model_dir="/here", model_revision=None, ref_model="org/m", ref_model_revision=None)
    settings |= dict(use_hf=True, hub_token=None, ref_adapters=None)
    return swift_process._reference_of(Settings(**{**settings, **given}), options.Options("s"))
assert reference() == reference(ref_model=None) == reference(model_revision="v1", ref_model_revision="v1") == "/here"
assert (reference(ref_model_revision="v1"), reference(ref_model="org/other")) == ("org/m at v1", "org/other at None")
"""
    subprocess.run([PYTHON, "-c", code], env=environment, check=True, timeout=300)
