"""Real LLaMA-Factory on a CPU: the same training with a reference model and with stored values, on one and two processes.

In the environment of `make setup-frameworks`, as subprocesses. torch's gloo takes nccl's place.
"""

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

STOCK, STORED = "llamafactory.launcher", "reflogp.trainer.llamafactory.train"
STEPS = 10
#: Largest difference of a loss between a reference model and its stored values, in float32.
EQUAL = 1e-5

PYTHON = python_of("llamafactory")
pytestmark = needs(PYTHON)


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llamafactory-model"), tokenizer, **SIZE)


@pytest.fixture(scope="module")
def data(pair_rows, tmp_path_factory) -> Path:
    """Datasets as LLaMA-Factory describes them: pairs, pairs to evaluate on, rows with labels."""
    folder = tmp_path_factory.mktemp("llamafactory-data")
    rows = short_rows(pair_rows)
    names = {"messages": "prompt", "chosen": "chosen", "rejected": "rejected"}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    sides = ("chosen", "rejected")
    pairs = [{"prompt": row["prompt"], **{side: row[side][-1] for side in sides}} for row in rows]
    labelled = [{"messages": row["prompt"] + row[side][-1:], "label": side == "chosen"} for row in rows for side in sides]
    about = {"formatting": "sharegpt", "tags": tags}
    for name, content in {"pairs": pairs[:ROWS], "new": pairs[ROWS:], "labelled": labelled}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    of_pairs = {"ranking": True, "columns": names, **about}
    described = {name: {"file_name": f"{name}.json", **of_pairs} for name in ("pairs", "new")}
    described["labelled"] = {"file_name": "labelled.json", "columns": {"messages": "messages", "kto_tag": "label"}, **about}
    (folder / "dataset_info.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return environment_of(PYTHON, tmp_path_factory.mktemp("llamafactory-caches"))


@pytest.fixture(scope="module")
def settings(model, data) -> dict[str, Any]:
    return {
        "model_name_or_path": model,
        "stage": "dpo",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": data,
        "dataset": "pairs",
        "template": "default",
        "cutoff_len": 112,  # some rows are cut
        "preprocessing_num_workers": 1,
        "logging_steps": 1,
        "max_steps": STEPS,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 5e-4,
        "report_to": "none",
        "use_cpu": True,
        "seed": 7,
    }


@pytest.fixture(scope="module")
def runs(environment):
    modules = ["llamafactory.train.tuner", "peft", "reflogp.trainer", "transformers.models.llama.modeling_llama"]
    with closing(Runs(PYTHON, FOLDER, modules, environment)) as found:
        yield found


@pytest.fixture(scope="module")
def train(runs, settings):
    """train(module, folder, options, words) -> (what each process noted, what they printed)."""

    def run(
        module: str, folder: Path, options: dict[str, Any], words: tuple[str, ...] = (), processes: int = 1, check: bool = True
    ) -> tuple[list[dict[str, Any]], str]:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "settings.yaml"  # JSON is YAML
        file.write_text(json.dumps({**settings, "output_dir": folder / "out", **options}, default=str))
        return runs.run(module, folder, [*words, str(file)], processes, check)

    return run


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """Empty until the module's first run has what it misses scored."""
    return tmp_path_factory.mktemp("llamafactory-store") / "logps"


CASES = {
    "DPO, 2 processes": {
        "gradient_accumulation_steps": 2,
        "eval_dataset": "new",
        "eval_strategy": "steps",
        "eval_steps": 5,
    },
    "IPO, LoRA": {
        "pref_loss": "ipo",
        "pref_beta": 0.5,
        "finetuning_type": "lora",
        "lora_target": "q_proj,v_proj",
        "lora_rank": 4,
        "learning_rate": 1e-2,
    },
    "DPO, ld_alpha and SFT": {"ld_alpha": 0.4, "pref_ftx": 0.1},
    "KTO": {"stage": "kto", "dataset": "labelled"},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_real_reference_model(case, train, store, model, tmp_path):
    processes = 2 if "2 processes" in case else 1
    stock, _ = train(STOCK, tmp_path / "stock", CASES[case], processes=processes)
    words = ("--reflogp.store", str(store), "--reflogp.on_miss", "run")
    ours, _ = train(STORED, tmp_path / "ours", CASES[case], words, processes)
    check_equal(losses(tmp_path / "stock" / "out"), losses(tmp_path / "ours" / "out"), STEPS, EQUAL)
    has_reference = "LoRA" not in case  # LLaMA-Factory switches the adapter off, and loads no second model
    assert [seen["loaded"] for seen in stock] == [[str(model)] * (2 if has_reference else 1)] * processes
    assert [seen["loaded"] for seen in ours] == [[str(model)]] * processes
    seen = report(tmp_path / "ours" / "out")
    assert seen["verdict"] == "passed"
    assert seen["step_zero"]["sequences"] == 8 * processes
    assert seen["forwards"]["policy_passes"] == seen["forwards"]["micro_batches"] * (2 if "KTO" in case else 1)


def test_rows_without_values_are_named_with_the_command(train, data, reflogp, tmp_path):
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
    assert not (tmp_path / "out" / "trainer_state.json").exists()


def test_another_template_is_other_rows(train, store, tmp_path):
    words = ("--reflogp.store", str(store), "--reflogp.on_miss", "run")
    train(STORED, tmp_path / "first", {"max_steps": 1}, words)
    [seen], _ = train(STORED, tmp_path / "second", {"max_steps": 1, "template": "alpaca"}, words[:2], check=False)
    assert seen["error"] == "MissingLogpsError"


@pytest.mark.parametrize(
    ("options", "words", "why"),
    [
        ({"stage": "rm"}, (), "stage rm does not use reference log-probs"),
        ({"do_train": False, "do_eval": True, "eval_dataset": "new"}, (), "a run that only evaluates"),
        ({"ignore_pad_token_for_loss": False}, (), "with ignore_pad_token_for_loss=false"),
        ({"pref_loss": "simpo"}, (), "pref_loss simpo uses no reference model"),
        ({"ref_model_quantization_bit": 4}, (), "with ref_model_quantization_bit"),
        ({"streaming": True, "dataloader_num_workers": 1}, (), "is a stream"),
        ({}, ("--reflogp.on_miss", "score"), "on_miss='score' needs a running service"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, words, why, train, store, model, tmp_path):
    if "ref_model_quantization_bit" in options:
        options = {**options, "ref_model": model}
    [seen], _ = train(STORED, tmp_path, options, ("--reflogp.store", str(store), *words), check=False)
    assert why in seen["words"], seen


def test_the_command_starts_torchrun_as_llamafactory_does(train, settings, environment, store, model, tmp_path):
    """The one command of the docs, with two processes; options reach the processes that the launcher starts."""
    train(STORED, tmp_path / "one", {"max_steps": 1}, ("--reflogp.store", str(store), "--reflogp.on_miss", "run"))
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps({**settings, "max_steps": 2, "output_dir": tmp_path / "out"}, default=str))
    command = [PYTHON, "-m", STORED, "--reflogp.store", store, "train", file]
    found = {**environment, "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "PYTHONPATH": str(FOLDER)}
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert report(tmp_path / "out")["verdict"] == "passed"
    assert report(tmp_path / "out")["step_zero"]["sequences"] == 16


def test_help_teaches_and_errors_say_how(environment):
    run = {"env": {**environment, "PYTHONPATH": str(FOLDER)}, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([PYTHON, "-m", STORED, "--help"], **run)
    assert done.returncode == 0
    assert "--reflogp.store" in done.stdout and "train FILE.yaml" in done.stdout
    done = subprocess.run([PYTHON, "-m", STORED, "--reflogp.store", "./logps", "chat"], **run)
    assert done.returncode == 2
    assert "train FILE.yaml" in done.stderr


def test_rows_with_images_are_refused(environment):
    """LLaMA-Factory itself refuses them for a text-only model; for another one, values of the text alone would be wrong."""
    code = """
from datasets import Dataset
from reflogp.trainer.llamafactory.trainers import _refuse_media
_refuse_media(Dataset.from_list([{"images": None}, {"images": []}]), "train")
_refuse_media(Dataset.from_list([{"images": None}, {"images": ["a.png"]}]), "train")
"""
    run = {"env": {**environment, "PYTHONPATH": str(FOLDER)}, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([PYTHON, "-c", code], **run)
    assert "the train dataset has images" in done.stderr


def test_settings_that_make_the_reference_another_model_are_refused(environment, model):
    """Each alone; with --reflogp.model, none is."""
    code = f"""
from types import SimpleNamespace as Settings
from reflogp.store import UsageError
from reflogp.trainer.batches.options import read_options
from reflogp.trainer.llamafactory.train import Replacements
def reference(words, **changes):
    own = dict(ref_model=None, ref_model_adapters=None, ref_model_quantization_bit=None)
    of_model = dict(model_name_or_path={str(model)!r}, adapter_name_or_path=None, quantization_bit=None, rope_scaling=None)
    settings = [Settings(**{{name: changes.get(name, value) for name, value in given.items()}}) for given in (of_model, own)]
    replacements = Replacements(read_options("c", ["--reflogp.store", "s", *words], "m", "d")[0])
    return replacements._reference(*settings)
assert reference([]) == {str(model)!r}
for name in ("ref_model_adapters", "ref_model_quantization_bit", "rope_scaling", "adapter_name_or_path", "quantization_bit"):
    assert reference(["--reflogp.model", "x"], **{{name: 4}}) is None
    try:
        reference([], **{{name: 4}})
    except UsageError as error:
        assert f"with {{name}}, the reference may differ from" in str(error)
    else:
        raise AssertionError(name)
print("all refused")
"""
    run = {"env": {**environment, "PYTHONPATH": str(FOLDER)}, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([PYTHON, "-c", code], **run)
    assert "all refused" in done.stdout, done.stderr[-3000:]
