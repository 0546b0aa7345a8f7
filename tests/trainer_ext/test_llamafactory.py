"""Real LLaMA-Factory on a CPU: the same training with a reference model and with stored values, on one and two processes."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.service.warm_python import WarmPython
from tests.trainer_ext import framework_runs as frameworks
from tests.trainer_ext.framework_runs import ROWS, STEPS, record, words_of

STOCK, STORED = "llamafactory.launcher", "reflogp.trainer.llamafactory"
PYTHON = frameworks.python_of("llamafactory")
pytestmark = frameworks.needs(PYTHON)


@pytest.fixture(scope="module")
def data(pair_rows, tmp_path_factory) -> Path:
    """Datasets as LLaMA-Factory describes them: pairs, pairs to evaluate on, rows with labels."""
    folder, sides = tmp_path_factory.mktemp("llamafactory-data"), ("chosen", "rejected")
    rows = frameworks.short_rows(pair_rows)
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    pairs = [{"prompt": row["prompt"], **{side: row[side][-1] for side in sides}} for row in rows]
    labelled = [{"messages": row["prompt"] + row[side][-1:], "label": side == "chosen"} for row in rows for side in sides]
    columns = {"messages": "prompt", "chosen": "chosen", "rejected": "rejected"}
    described = {}
    for name, content in {"pairs": pairs[:ROWS], "new": pairs[ROWS:], "labelled": labelled}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
        described[name] = {"file_name": f"{name}.json", "formatting": "sharegpt", "tags": tags, "ranking": name != "labelled"}
        described[name]["columns"] = columns
    described["labelled"]["columns"] = {"messages": "messages", "kto_tag": "label"}
    (folder / "dataset_info.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return frameworks.environment_of(PYTHON, tmp_path_factory.mktemp("llamafactory-caches"))


@pytest.fixture(scope="module")
def settings(small_model, data) -> dict[str, Any]:
    of_the_run = {"stage": "dpo", "do_train": True, "finetuning_type": "full", "model_name_or_path": small_model}
    of_the_run |= {"dataset_dir": data, "dataset": "pairs", "template": "default", "preprocessing_num_workers": 1}
    of_the_run |= {"cutoff_len": 112, "max_steps": STEPS, "learning_rate": 5e-4, "logging_steps": 1}  # some rows are cut
    of_the_run |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "save_strategy": "no", "seed": 7}
    return {**of_the_run, "report_to": "none", "use_cpu": True}


@pytest.fixture(scope="module")
def train(environment, settings):
    """See frameworks.check_losses."""
    modules = ["llamafactory.train.tuner", "peft", "reflogp.trainer", "transformers.models.llama.modeling_llama"]
    with closing(WarmPython(modules, str(PYTHON), environment)) as python:

        def run(folder: Path, options: dict[str, Any], stored: Any = None, processes: int = 1, check: bool = True) -> Any:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / "settings.yaml"  # JSON is YAML
            file.write_text(json.dumps({**settings, "output_dir": folder / "out", **options}, default=str))
            return frameworks.run(python, STORED if stored else STOCK, folder, [*words_of(stored), str(file)], processes, check)

        yield run


EVALUATED = {"eval_dataset": "new", "eval_strategy": "steps", "eval_steps": 5}
LORA = {"finetuning_type": "lora", "lora_rank": 4, "learning_rate": 1e-2}
CASES: dict[str, dict[str, Any]] = {
    "DPO, 2 processes": {"gradient_accumulation_steps": 2, **EVALUATED},
    "IPO, LoRA": {"pref_loss": "ipo", "pref_beta": 0.5, **LORA, **EVALUATED},
    "DPO, ld_alpha and SFT": {"ld_alpha": 0.4, "pref_ftx": 0.1, **EVALUATED},
    "KTO": {"stage": "kto", "dataset": "labelled"},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_real_reference_model(case, train, small_model, tmp_path):
    frameworks.check_losses(train, tmp_path, case, CASES[case], str(small_model))


def test_other_weights_are_refused_before_the_first_step(train, tokenizer, tmp_path):
    frameworks.check_other_weights(train, tokenizer, tmp_path, {}, {"max_steps": 1})


@pytest.fixture(scope="module")
def store(train, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llamafactory-store")
    frameworks.score_missing(train(folder / "missing", {}, {"store": folder / "logps"}, check=False))
    return folder / "logps"


REFUSED = [
    ({"template": "alpaca"}, "None of the rows was found"),
    ({"stage": "rm"}, "uses no stored values"),
    ({"do_train": False, "do_eval": True, "eval_dataset": "new"}, "uses no stored values"),
    ({"pref_loss": "simpo"}, "uses no stored values"),
    ({"ignore_pad_token_for_loss": False}, "padding has labels other than -100"),
    ({"ref_model": "x", "ref_model_adapters": "y"}, "with ref_model_adapters, the reference is not ref_model alone"),
    ({"streaming": True, "dataloader_num_workers": 1}, "is a stream"),
]


@pytest.mark.parametrize(("options", "why"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(options, why, train, store, tmp_path):
    [seen] = train(tmp_path, options, {"store": store}, check=False)
    assert why in seen["words"], seen


def test_the_command_starts_torchrun_as_llamafactory_does(settings, environment, store, tmp_path):
    """The one command of the docs, with two processes; options reach the processes that the launcher starts."""
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps({**settings, "max_steps": 2, "output_dir": tmp_path / "out"}, default=str))
    found = {**environment, "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}
    command = [PYTHON, "-m", STORED, "--reflogp.store", store, "train", file]
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert record(tmp_path / "out")["step_zero"]["sequences"] == 16
