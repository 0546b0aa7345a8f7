"""Real unsloth on a CPU: training with the trainers that it generates from TRL's, and with its backend for CPUs.

In the environment of `make setup-frameworks`, as subprocesses. unsloth's models and kernels for GPUs are not run here.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import save_llama, write_rows
from tests.trainer_ext.framework_runs import ROWS, SIZE, check_equal, environment_of, needs, python_of, report, short_rows
from tests.trainer_ext.on_cpu import ON_CPU

STEPS = 10
#: Largest difference of a loss between a reference model and its stored values, in float32.
EQUAL = 1e-5

PYTHON = python_of("unsloth")
RUN = Path(__file__).parent / "unsloth_env" / "run.py"
pytestmark = needs(PYTHON)


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("unsloth-model"), tokenizer, **SIZE)


@pytest.fixture(scope="module")
def data(pair_rows, tmp_path_factory) -> Path:
    """Pairs, and pairs to evaluate on."""
    folder = tmp_path_factory.mktemp("unsloth-data")
    rows = short_rows(pair_rows)
    write_rows(folder / "pairs.jsonl", rows[:ROWS])
    write_rows(folder / "new.jsonl", rows[ROWS:])
    return folder


@pytest.fixture(scope="module")
def train(model, data, tmp_path_factory):
    """train(order, jobs, folder) -> what each job has seen; see unsloth_env/run.py."""
    environment = environment_of(PYTHON, tmp_path_factory.mktemp("unsloth-caches"))
    environment |= {"TORCHDYNAMO_DISABLE": "1", "UNSLOTH_COMPILE_LOCATION": str(tmp_path_factory.mktemp("unsloth-compiled"))}
    given = {"kind": "dpo", "policy": "full", "folder": str(model), "data": str(data / "pairs.jsonl"), "new": None}
    given["max_seq_length"] = None

    def run(order: str, jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
        folder.mkdir(exist_ok=True)
        whole = []
        for number, job in enumerate(jobs):
            settings = {**ON_CPU, "output_dir": str(folder / str(number)), "learning_rate": 5e-4, "optim": "adamw_torch"}
            settings |= {"per_device_train_batch_size": 4, "max_steps": STEPS}
            whole.append({**given, "args": settings, **job})
        (folder / "jobs.json").write_text(json.dumps(whole))
        command = [PYTHON, RUN, order, folder / "jobs.json", folder / "results.json"]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=540, check=False)
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads((folder / "results.json").read_text())

    return run


def score(command: str) -> None:
    words = shlex.split(command)
    subprocess.run([Path(sys.executable).parent / words[0], *words[1:]], check=True, capture_output=True, timeout=300)


@pytest.fixture(scope="module")
def store(model, data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unsloth-store") / "logps"
    for name in ("pairs", "new"):
        score(f"reflogp score {model} {data / name}.jsonl --store {folder} --dtype float32")
    return folder


def check_runs(stock: dict[str, Any], ours: dict[str, Any], model: Path, policy: str, steps: int) -> None:
    """The same losses with a reference model and with stored values, which load, hash and prepare no more than they need."""
    assert "error" not in stock and "error" not in ours, (stock, ours)
    check_equal(stock["losses"], ours["losses"], steps, EQUAL)
    assert ours["loaded"] == [str(model)]
    assert stock["loaded"] == [str(model)] * (2 if policy == "full" else 1)
    assert ours["trained"] == stock["trained"] == {"full": 21, "lora": 8}[policy]
    assert ours["hashed"] == 0
    assert ours.get("prepared") == stock.get("prepared")
    seen = report(Path(ours["output_dir"]))
    assert seen["verdict"] == "passed"
    assert seen["step_zero"]["sequences"] == 8


def test_the_trainers_that_unsloth_generates(train, store, data, model, tmp_path):
    new = {"new": str(data / "new.jsonl"), "store": str(store)}
    pairs = [{**new, "policy": policy, "stored": stored} for policy in ("full", "lora") for stored in (False, True)]
    kto = [{"kind": "kto", "stored": True, "store": str(store)}]
    found = train("first", [*pairs, {**new, "stored": True, "args": None}, *kto], tmp_path / "first")
    assert [seen["module"] for seen in found] == ["UnslothDPOTrainer"] * 5 + ["UnslothKTOTrainer"]
    check_runs(found[0], found[1], model, "full", STEPS + 1)
    check_runs(found[2], found[3], model, "lora", STEPS + 1)
    assert found[1]["prepared"] == 1
    assert found[4]["output_dir"] == f"{model.name}-DPO"

    # KTO, and the other import order that works.
    assert found[5]["error"] == "MissingLogpsError", found[5]
    score(re.search(r"reflogp score .*?--dtype \w+", found[5]["words"])[0])
    kto.insert(0, {"kind": "kto", "stored": False})
    cut = [{**job, "max_seq_length": 100} for job in pairs[:2]]
    found = train("between", [*kto, *cut], tmp_path / "between")
    assert [seen["module"] for seen in found] == ["UnslothKTOTrainer"] * 2 + ["UnslothDPOTrainer"] * 2
    check_runs(found[0], found[1], model, "full", STEPS)
    check_runs(found[2], found[3], model, "full", STEPS + 1)
    assert [seen["max_length"] for seen in found[2:]] == [100, 100]


def test_unsloth_imported_after_the_trainer_is_refused(train, store, tmp_path):
    [seen] = train("late", [{"stored": True, "store": str(store)}], tmp_path)
    assert seen["error"] == "ImportError"
    assert "put `import unsloth` before all imports of trl and reflogp" in seen["words"]


def test_unsloths_backend_for_cpus(train, store, data, model, tmp_path):
    new = {"new": str(data / "new.jsonl"), "store": str(store)}
    jobs = [{**new, "policy": policy, "stored": stored} for policy in ("full", "lora") for stored in (False, True)]
    found = train("cpu", jobs, tmp_path)
    assert {seen["module"] for seen in found} == {"trl.trainer.dpo_trainer"}
    check_runs(found[0], found[1], model, "full", STEPS + 1)
    check_runs(found[2], found[3], model, "lora", STEPS + 1)
