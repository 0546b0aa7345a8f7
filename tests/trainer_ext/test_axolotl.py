"""Real axolotl on a CPU: the same training with a reference model and with stored values, on one and two processes.

Its distillation plugin trains on an export, beside the values of a live teacher.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import save_llama, write_rows
from tests.service.warm_python import WarmPython
from tests.trainer_ext import framework_runs as frameworks
from tests.trainer_ext.framework_runs import ROWS, SIZE, STEPS, losses, record, score_missing

PLUGIN = "reflogp.trainer.axolotl.StoredReferencePlugin"
PYTHON = frameworks.python_of("axolotl")
pytestmark = frameworks.needs(PYTHON)


def described(file: Path, form: str = "chat_template.default") -> list[dict[str, Any]]:
    return [{"path": file, "ds_type": "json", "split": "train", "type": form}]


@pytest.fixture(scope="module")
def data(pair_rows, tmp_path_factory) -> Path:
    """Pairs, pairs to evaluate on, rows with labels."""
    folder, rows, sides = tmp_path_factory.mktemp("axolotl-data"), frameworks.short_rows(pair_rows), ("chosen", "rejected")
    pairs = [{"messages": row["prompt"], **{side: row[side][-1] for side in sides}} for row in rows]
    both = [(row["messages"][-1]["content"], row[side]["content"], side == "chosen") for row in pairs[:ROWS] for side in sides]
    labelled = [dict(zip(("instruction", "completion", "label"), row, strict=True)) for row in both]
    for name, content in {"pairs": pairs[:ROWS], "new": pairs[ROWS:], "labelled": labelled}.items():
        write_rows(folder / f"{name}.jsonl", content)
    return folder


@pytest.fixture(scope="module")
def settings(small_model, data, tmp_path_factory) -> dict[str, Any]:
    run = {"base_model": str(small_model), "rl": "dpo", "chat_template": "tokenizer_default", "sequence_len": 512}
    run |= {"datasets": described(data / "pairs.jsonl"), "dataset_num_proc": 1, "seed": 7, "device_map": {"": "cpu"}}
    run |= {"micro_batch_size": 4, "gradient_accumulation_steps": 1, "num_epochs": 1}
    run |= {"max_steps": STEPS, "save_steps": STEPS, "logging_steps": 1}
    run |= {"learning_rate": 5e-4, "optimizer": "adamw_torch", "lr_scheduler": "constant"}
    run |= {"bf16": False, "fp16": False, "tf32": False}
    return {**run, "dataset_prepared_path": tmp_path_factory.mktemp("axolotl-prepared")}


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    found = frameworks.environment_of(PYTHON, tmp_path_factory.mktemp("axolotl-caches"))
    return {**found, "AXOLOTL_DO_NOT_TRACK": "1"}


@pytest.fixture(scope="module")
def train(environment, settings):
    """See frameworks.check_losses; `section` is that of the file."""
    modules = ["axolotl.cli.train", "axolotl.train", "axolotl.cli.config", "peft", "peft.optimizers"]
    modules += ["reflogp.trainer.axolotl"]  # in runs without the plugin too, which load a reference model
    modules += ["evaluate", "scipy.stats", "wandb", "trl.trainer.dpo_trainer", "trl.trainer.kto_trainer"]  # later, of each run
    modules += ["transformers.models.llama.modeling_llama", "transformers.pipelines"]
    with closing(WarmPython(modules, str(PYTHON), environment)) as python:

        def run(folder: Path, options: dict[str, Any], section: Any = None, processes: int = 1, check: bool = True) -> Any:
            folder.mkdir(parents=True, exist_ok=True)
            ours = {"plugins": [PLUGIN], "reflogp": section} if section is not None else {}
            file = folder / "settings.yaml"  # JSON is YAML
            file.write_text(json.dumps({**settings, "output_dir": folder / "out", **ours, **options}, default=str))
            return frameworks.run(python, "axolotl.cli.train", folder, [str(file)], processes, check)

        yield run


LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"], "learning_rate": 1e-2}
CASES: dict[str, dict[str, Any]] = {
    "DPO, 2 processes": {"gradient_accumulation_steps": 2},
    "DPO, bfloat16": {"bf16": True},
    "IPO, LoRA": {"rl": "ipo", "rl_beta": 0.5, **LORA},
    "KTO": {"rl": "kto", "chat_template": "chatml", "remove_unused_columns": False},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_real_reference_model(case, train, data, settings, tmp_path):
    evaluated = {"test_datasets": described(data / "new.jsonl"), "eval_steps": 5}
    labelled = {"datasets": described(data / "labelled.jsonl", "chatml.argilla")}
    options, out = CASES[case] | (labelled if case == "KTO" else evaluated), f"out/checkpoint-{STEPS}"
    autocast = "bfloat16-autocast"  # axolotl keeps float32 weights for bf16: true
    frameworks.check_losses(train, tmp_path, case, options, settings["base_model"], out, autocast)


def test_other_weights_are_refused_before_the_first_step(train, tokenizer, tmp_path):
    frameworks.check_other_weights(train, tokenizer, tmp_path, {}, {"max_steps": 1})


@pytest.mark.parametrize(
    ("options", "section", "why"),
    [
        ({"rl": "orpo"}, {}, "rl is orpo, but stored reference log-probs can be used only with"),
        ({"trainer_cls": "trl.DPOTrainer"}, {}, "trainer_cls trl.DPOTrainer does not use stored values"),
        ({"reflogp": None}, {}, "needs a section `reflogp:`"),
        ({"context_parallel_size": 2}, {}, "context_parallel_size above 1 splits sequences across processes"),
        ({}, {"stores": "./logps"}, "stores"),
        ({}, {"on_miss": "compute"}, "on_miss"),
        ({}, {"on_miss": "score"}, "on_miss='score' needs a running service"),
        ({"plugins": [], "trainer_cls": "reflogp.trainer.axolotl.StoredDPOTrainer"}, {}, f"needs the plugin: add `- {PLUGIN}`"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, section, why, train, tmp_path):
    [seen] = train(tmp_path, options, {"store": str(tmp_path / "logps"), **section}, check=False)
    assert seen["error"] in ("UsageError", "ValidationError") and why in seen["words"], seen
    assert seen["loaded"] == [] or "needs the plugin" in why


def test_the_command_of_the_docs_reads_the_plugin(train, settings, environment, tmp_path):
    """axolotl's own command and launcher; two processes of it need GPUs."""
    section, file = {"store": str(tmp_path / "logps")}, tmp_path / "dpo.yaml"
    score_missing(train(tmp_path / "missing", {}, section, check=False))
    ours = {"plugins": [PLUGIN], "reflogp": section, "output_dir": tmp_path / "out", "max_steps": 2}
    file.write_text(json.dumps({**settings, **ours}, default=str))
    command = [PYTHON.parent / "axolotl", "train", file, "--launcher", "python"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert record(tmp_path / "out")["step_zero"]["sequences"] == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_distillation_on_an_export_is_that_on_a_live_teachers_values(dtype, train, tokenizer, pair_rows, tmp_path):
    """The plugin axolotl.integrations.kd, on both datasets; one comes from plain forwards and torch.topk."""
    k, count = 8, 40
    teacher = save_llama(tmp_path / "teacher", tokenizer, **{**SIZE, "hidden_size": 64})
    chats = [{"messages": [*row["prompt"], row["chosen"][-1]]} for row in frameworks.short_rows(pair_rows)[:count]]
    file, store = write_rows(tmp_path / "chats.jsonl", chats), tmp_path / "logps"
    common = [str(teacher), str(file), "--store", str(store), "--dtype", "float32", "--top-k", str(k)]
    frameworks.run_command(["score", *common])
    frameworks.run_command(["join", *common, "-o", str(tmp_path / "joined.parquet")])
    stored = ["-o", str(tmp_path / "stored.parquet")]
    frameworks.run_command(["export", str(tmp_path / "joined.parquet"), "--as", "axolotl-kd", *stored])
    model, live = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval(), []
    for chat in chats:
        ids = tokenizer.apply_chat_template(chat["messages"], tokenize=True, return_dict=True)["input_ids"]
        with torch.inference_mode():
            best = torch.topk(torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1), k)
        live.append({**chat, "logprobs": best.values.tolist(), "target_token_ids": best.indices.tolist()})
    pq.write_table(pa.Table.from_pylist(live), tmp_path / "live.parquet")
    options = {"plugins": ["axolotl.integrations.kd.KDPlugin"], "kd_trainer": True, "kd_alpha": 0.9, "kd_ce_alpha": 0.1}
    options |= {"kd_temperature": 1.0, "rl": None, "remove_unused_columns": False, "bf16": dtype == "bfloat16"}
    form = {"ds_type": "parquet", "split": "train", "type": "axolotl.integrations.kd.chat_template"}
    for name in ("live", "stored"):
        dataset = {"path": tmp_path / f"{name}.parquet", **form, "logprobs_field": "logprobs", "temperature": 1.0}
        train(tmp_path / name, {**options, "datasets": [dataset]})
    logged = (losses(tmp_path / name / "out" / f"checkpoint-{STEPS}") for name in ("live", "stored"))
    frameworks.check_equal(*logged, 1e-3)  # the stored log-probs have the precision of float16
