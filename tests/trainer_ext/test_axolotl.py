"""Real axolotl on a CPU: the same training with a reference model and with stored values, on one and two processes.

In the environment of `make setup-frameworks`, as subprocesses. torch's gloo takes nccl's place.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import save_llama, write_rows
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

TRAIN = "axolotl.cli.train"
STEPS = 10
#: Largest difference of a loss between a reference model and its stored values, in float32.
EQUAL = 1e-5

PYTHON = python_of("axolotl")
pytestmark = needs(PYTHON)


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("axolotl-model"), tokenizer, **SIZE)


@pytest.fixture(scope="module")
def data(pair_rows, tmp_path_factory) -> Path:
    """Pairs, pairs to evaluate on, rows with labels."""
    folder = tmp_path_factory.mktemp("axolotl-data")
    rows = short_rows(pair_rows)
    sides = ("chosen", "rejected")
    pairs = [{"messages": row["prompt"], **{side: row[side][-1] for side in sides}} for row in rows]
    labelled = [
        {"instruction": row["prompt"][-1]["content"], "completion": row[side][-1]["content"], "label": side == "chosen"}
        for row in rows[:ROWS]
        for side in sides
    ]
    for name, content in {"pairs": pairs[:ROWS], "new": pairs[ROWS:], "labelled": labelled}.items():
        write_rows(folder / f"{name}.jsonl", content)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return {**environment_of(PYTHON, tmp_path_factory.mktemp("axolotl-caches")), "AXOLOTL_DO_NOT_TRACK": "1"}


def pairs_of(data: Path, name: str) -> list[dict[str, Any]]:
    return [{"path": data / f"{name}.jsonl", "ds_type": "json", "split": "train", "type": "chat_template.default"}]


@pytest.fixture(scope="module")
def settings(model, data) -> dict[str, Any]:
    return {
        "base_model": model,
        "rl": "dpo",
        "chat_template": "tokenizer_default",
        "datasets": pairs_of(data, "pairs"),
        "dataset_num_proc": 1,
        "sequence_len": 512,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "num_epochs": 1,
        "learning_rate": 5e-4,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "logging_steps": 1,
        "save_steps": STEPS,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "use_cpu": True,
        "device_map": {"": "cpu"},
        "seed": 7,
    }


@pytest.fixture(scope="module")
def runs(environment):
    modules = ["axolotl.cli.train", "axolotl.train", "axolotl.cli.config", "peft", "peft.optimizers", "reflogp.trainer"]
    modules += ["evaluate", "scipy.stats", "wandb", "trl.trainer.dpo_trainer", "trl.trainer.kto_trainer"]  # later, of each run
    modules += ["transformers.models.llama.modeling_llama", "transformers.pipelines"]
    with closing(Runs(PYTHON, FOLDER, modules, environment)) as found:
        yield found


@pytest.fixture(scope="module")
def train(runs, settings, tmp_path_factory):
    """train(folder, options, section) -> what each process noted. Without a section `reflogp:`, axolotl alone trains."""
    prepared = tmp_path_factory.mktemp("prepared")

    def run(
        folder: Path, options: dict[str, Any], section: dict[str, Any] | None = None, processes: int = 1, check: bool = True
    ) -> list[dict[str, Any]]:
        folder.mkdir(parents=True, exist_ok=True)
        ours = {"plugins": ["reflogp.trainer.axolotl.plugin.StoredReferencePlugin"], "reflogp": section}
        chosen = {**settings, "output_dir": folder / "out", "dataset_prepared_path": prepared, **options}
        file = folder / "settings.yaml"  # JSON is YAML
        file.write_text(json.dumps(chosen | (ours if section is not None else {}), default=str))
        return runs.run(TRAIN, folder, [str(file)], processes, check)[0]

    return run


@pytest.fixture(scope="module")
def kto(data) -> dict[str, Any]:
    described = {"path": data / "labelled.jsonl", "ds_type": "json", "split": "train", "type": "chatml.argilla"}
    return {"rl": "kto", "chat_template": "chatml", "remove_unused_columns": False, "datasets": [described]}


@pytest.fixture(scope="module")
def with_evaluation(data) -> dict[str, Any]:
    return {"test_datasets": pairs_of(data, "new"), "eval_steps": 5}


def score(error: str) -> None:
    """Run the command that an error names."""
    command = re.search(r"reflogp score .*?--dtype \w+", error)
    assert command is not None, error
    words = shlex.split(command[0])
    subprocess.run([Path(sys.executable).parent / words[0], *words[1:]], check=True, capture_output=True, timeout=300)


@pytest.fixture(scope="module")
def store(train, kto, with_evaluation, tmp_path_factory) -> Path:
    """Values of all tokens that the runs below train on: each command is the one that a run's error names."""
    folder = tmp_path_factory.mktemp("axolotl-store")
    for number, options in enumerate((with_evaluation, kto)):
        [seen] = train(folder / str(number), options, {"store": str(folder / "logps")}, check=False)
        assert seen["error"] in ("StoreNotFoundError", "MissingLogpsError"), seen["words"]
        score(seen["words"])
    return folder / "logps"


CASES: dict[str, dict[str, Any]] = {
    "DPO, 2 processes": {"gradient_accumulation_steps": 2},
    "IPO, LoRA": {
        "rl": "ipo",
        "rl_beta": 0.5,
        "adapter": "lora",
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_target_modules": ["q_proj", "v_proj"],
        "learning_rate": 1e-2,
    },
    "KTO": {},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_real_reference_model(case, train, store, kto, with_evaluation, model, tmp_path):
    processes = 2 if "2 processes" in case else 1
    options = CASES[case] | {"DPO, 2 processes": with_evaluation, "KTO": kto}.get(case, {})
    stock = train(tmp_path / "stock", options, processes=processes)
    ours = train(tmp_path / "ours", options, {"store": str(store)}, processes)
    last = f"out/checkpoint-{STEPS}"
    check_equal(losses(tmp_path / "stock" / last), losses(tmp_path / "ours" / last), STEPS, EQUAL)
    has_reference = "LoRA" not in case  # TRL switches the adapter off, and loads no second model
    assert [seen["loaded"] for seen in stock] == [[str(model)] * (2 if has_reference else 1)] * processes
    assert [seen["loaded"] for seen in ours] == [[str(model)]] * processes
    seen = report(tmp_path / "ours" / "out")
    assert seen["verdict"] == "passed"
    assert seen["step_zero"]["sequences"] == 8 * processes


def test_a_wrong_reference_is_refused_before_the_first_step(train, tokenizer, tmp_path):
    other = save_llama(tmp_path / "other", tokenizer, **{**SIZE, "num_hidden_layers": 1})
    section = {"store": str(tmp_path / "logps"), "model": str(other)}
    [seen] = train(tmp_path, {}, section, check=False)
    score(seen["words"])
    [seen] = train(tmp_path, {}, section, check=False)
    assert seen["error"] == "StepZeroError"
    assert report(tmp_path / "out")["verdict"] == "failed"
    assert not (tmp_path / "out" / f"checkpoint-{STEPS}").exists()


def test_another_template_is_other_rows(train, store, tmp_path):
    [seen] = train(tmp_path, {"chat_template": "alpaca"}, {"store": str(store)}, check=False)
    assert seen["error"] == "MissingLogpsError"
    assert f"{ROWS} of {ROWS} rows of train" in seen["words"]


@pytest.mark.parametrize(
    ("options", "section", "why"),
    [
        ({"rl": "orpo"}, {}, "rl is orpo, but stored reference log-probs can be used only with"),
        ({"load_in_8bit": True, "adapter": "lora", "lora_r": 4}, {}, "with load_in_8bit, the reference may differ from"),
        ({"trainer_cls": "trl.DPOTrainer"}, {}, "trainer_cls trl.DPOTrainer does not use stored values"),
        ({}, {"on_miss": "score"}, "on_miss='score' needs a running service"),
        ({}, {"stores": "./logps"}, "stores"),
        ({}, {"dtype": "fp32"}, "dtype"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, section, why, train, store, tmp_path):
    [seen] = train(tmp_path, options, {"store": str(store), **section}, check=False)
    assert why in seen["words"], seen
    assert seen["loaded"] == [] or "on_miss" in section


def test_a_file_without_the_plugins_entry_is_refused_by_the_trainer(train, store, tmp_path):
    options = {"trainer_cls": "reflogp.trainer.axolotl.trainers.StoredDPOTrainer", "reflogp": {"store": str(store)}}
    [seen] = train(tmp_path, options, check=False)
    assert seen["error"] == "UsageError" and "needs the plugin: add `- reflogp.trainer.axolotl.plugin" in seen["words"]
    assert not (tmp_path / "out" / f"checkpoint-{STEPS}").exists()


def test_settings_that_make_the_reference_another_model_are_refused(environment):
    """Each alone; if the section names the reference, none is. Runs without the plugin get axolotl's own reference model."""
    code = """
import axolotl.train
asked = []
axolotl.train.setup_reference_model = lambda cfg, *args: asked.append(cfg) or "a model"
from axolotl.utils.dict import DictDefault
from axolotl.utils.schemas.enums import RLType
from reflogp.store import UsageError
from reflogp.trainer.axolotl.plugin import StoredReferencePlugin, _UNCLEAR
PLUGINS = ["reflogp.trainer.axolotl.plugin.StoredReferencePlugin"]
DPO_TRAINER = "reflogp.trainer.axolotl.trainers.StoredDPOTrainer"
def refused(changes, **section):
    settings = {"plugins": PLUGINS, "base_model": "m", "base_model_config": "m"}
    settings |= {"rl": RLType.DPO, "reflogp": {"store": "s", **section}}
    try:
        StoredReferencePlugin().load_datasets(DictDefault({**settings, **changes}))
    except UsageError as error:
        return str(error)
assert refused({}) is None
changes = [{name: 4} for name in _UNCLEAR]
changes += [{"base_model_config": "other"}, {"peft_init_lora_weights": "pissa"}, {"peft": {"loftq_config": {"loftq_bits": 4}}}]
for change in changes:
    [name] = change.get("peft", change)
    assert f"with {name}, the reference may differ from" in refused(change), name
    assert refused(change, reference_id="0" * 32) is None
for value in (True, False, "gaussian"):
    assert refused({"peft_init_lora_weights": value}) is None
assert "context_parallel_size" in refused({"context_parallel_size": 2}, model="x")
assert "dpo_use_liger_kernel" in refused({"dpo_use_liger_kernel": True}, model="x")
assert "needs a section `reflogp:`" in refused({"reflogp": None})
assert "does not use stored values" in refused({"rl": RLType.KTO, "trainer_cls": DPO_TRAINER})
for _ in range(2):  # a run that failed, and its next attempt
    cfg = DictDefault({"plugins": PLUGINS, "rl": RLType.DPO, "reflogp": {"store": "s"}})
    assert axolotl.train.setup_reference_model(cfg, None) is None and not asked
    assert cfg.trainer_cls == DPO_TRAINER
assert axolotl.train.setup_reference_model(DictDefault({"rl": RLType.DPO}), None) == "a model" and len(asked) == 1
try:
    StoredReferencePlugin().post_trainer_create(cfg, object())
except UsageError as error:
    assert "another plugin created the trainer (object)" in str(error)
    print("all refused")
"""
    run = {"env": {**environment, "PYTHONPATH": str(FOLDER)}, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([PYTHON, "-c", code], **run)
    assert "all refused" in done.stdout, done.stderr[-3000:]


def test_new_tokens_are_another_model(train, store, tmp_path):
    [seen] = train(tmp_path, {"tokens": ["<new-token>"]}, {"store": str(store)}, check=False)
    assert "has resized the vocabulary of base_model" in seen["words"], seen


def test_the_command_of_the_docs_reads_the_plugin(settings, environment, store, tmp_path):
    """axolotl's own command and launcher; two processes of it need GPUs."""
    file = tmp_path / "dpo.yaml"
    ours = {"plugins": ["reflogp.trainer.axolotl.plugin.StoredReferencePlugin"], "reflogp": {"store": str(store)}}
    places = {"output_dir": tmp_path / "out", "dataset_prepared_path": tmp_path / "prepared"}
    file.write_text(json.dumps({**settings, **ours, **places, "max_steps": 2}, default=str))
    command = [PYTHON.parent / "axolotl", "train", file, "--launcher", "python"]
    found = {**environment, "PYTHONPATH": str(FOLDER)}
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert report(tmp_path / "out")["step_zero"]["sequences"] == 8
