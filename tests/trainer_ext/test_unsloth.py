"""Real unsloth on a CPU: training with the trainers that it generates from TRL's, and with its backend for CPUs.

In the environment of `make setup-frameworks`, as subprocesses. unsloth's models and kernels for GPUs are not run here.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import save_llama, write_rows
from tests.trainer_ext import framework_runs as frameworks
from tests.trainer_ext.framework_runs import ROWS, SIZE, STEPS, record, score_missing
from tests.trainer_ext.on_cpu import ON_CPU

PYTHON = frameworks.python_of("unsloth")
pytestmark = frameworks.needs(PYTHON)


@pytest.fixture(scope="module")
def given(small_model, pair_rows, tmp_path_factory) -> dict[str, str]:
    """The model, and pairs to train and to evaluate on."""
    folder, rows = tmp_path_factory.mktemp("unsloth"), frameworks.short_rows(pair_rows)
    data, new = write_rows(folder / "data.jsonl", rows[:ROWS]), write_rows(folder / "new.jsonl", rows[ROWS:])
    return {"model": str(small_model), "data": str(data), "new": str(new)}


@pytest.fixture(scope="module")
def train(given, tmp_path_factory):
    """train(order, jobs, folder) -> what each job has seen; see unsloth_env/run.py."""
    caches = tmp_path_factory.mktemp("unsloth-caches")
    environment = {**frameworks.environment_of(PYTHON, caches), "UNSLOTH_COMPILE_LOCATION": str(caches / "compiled")}
    settings = {**ON_CPU, "learning_rate": 5e-4, "optim": "adamw_torch", "per_device_train_batch_size": 4, "max_steps": STEPS}

    def run(order: str, jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
        folder.mkdir(exist_ok=True)
        whole = []
        for number, job in enumerate(jobs):
            own = {"output_dir": str(folder / str(number)), "bf16": job.get("dtype") == "bfloat16"}
            whole.append({**given, "args": {**settings, **own}, **job})
        (folder / "jobs.json").write_text(json.dumps(whole))
        command = [PYTHON, Path(__file__).parent / "unsloth_env" / "run.py", order, folder / "jobs.json", folder / "seen.json"]
        run = {"env": {**environment, "TORCHDYNAMO_DISABLE": "1"}, "cwd": folder, "capture_output": True, "text": True}
        done = subprocess.run(command, timeout=540, check=False, **run)
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads((folder / "seen.json").read_text())

    return run


@pytest.fixture(scope="module")
def store(given, tmp_path_factory) -> str:
    store = str(tmp_path_factory.mktemp("unsloth-store") / "logps")
    for dtype in ("float32", "bfloat16"):
        for name in ("data", "new"):
            frameworks.run_command(["score", given["model"], given[name], "--store", store, "--dtype", dtype])
    return store


def check_runs(stock: dict[str, Any], ours: dict[str, Any], policy: str = "full", dtype: str = "float32") -> None:
    """The same losses with a reference model and with stored values, with which no second model is loaded."""
    assert "error" not in stock and "error" not in ours, (stock, ours)
    frameworks.check_equal(stock["losses"], ours["losses"], frameworks.EQUAL[dtype])
    assert (stock["loaded"], ours["loaded"]) == (2 if policy == "full" else 1, 1)
    assert ours["trained"] == stock["trained"] == {"full": 21, "lora": 8}[policy]
    seen = record(Path(ours["output_dir"]))
    assert seen["step_zero"]["passed"] and seen["step_zero"]["sequences"] == 8
    assert seen["joins"]["train"]["reference_dtype"] == dtype


CASES = ({}, {"policy": "lora"}, {"dtype": "bfloat16"})


@pytest.mark.parametrize(("order", "module"), [("first", "UnslothDPOTrainer"), ("cpu", "trl.trainer.dpo_trainer")])
def test_losses_are_those_of_a_real_reference_model(order, module, train, store, tmp_path):
    """Also on other rows, at the end; in both of unsloth's ways."""
    found = train(order, [{**case, "store": values} for case in CASES for values in (None, store)], tmp_path)
    assert {seen["module"] for seen in found} == {module}
    for number, case in enumerate(CASES):
        check_runs(found[2 * number], found[2 * number + 1], **case)


def test_kto_and_limits_after_the_other_import_order_that_works(train, given, store, tokenizer, tmp_path):
    other = save_llama(tmp_path / "other", tokenizer, **{**SIZE, "num_hidden_layers": 1})
    frameworks.run_command(["score", str(other), given["data"], "--store", store, "--dtype", "float32"])
    kto = {"kind": "KTO", "new": None}
    jobs = [{**kto, "store": store}, {"store": store, "args": None}, {"store": store, "reference": str(other)}]
    found = train("between", jobs, tmp_path)
    assert found[1]["output_dir"] == "unsloth_training_checkpoints", "unsloth's own default"
    assert found[2]["error"] == "StepZeroError"
    assert "rows of train" in score_missing(found[:1])
    jobs = [{**job, "store": values} for job in (kto, {"max_seq_length": 100}) for values in (None, store)]
    found = train("between", jobs, tmp_path)
    assert [seen["module"] for seen in found] == ["UnslothKTOTrainer"] * 2 + ["UnslothDPOTrainer"] * 2
    check_runs(*found[:2])
    check_runs(*found[2:])
    assert [seen["max_length"] for seen in found[2:]] == [100, 100]
