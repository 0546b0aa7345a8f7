"""Real OpenRLHF on DeepSpeed, two processes on a CPU: the same training with a reference model and with stored values.

In the environment of `make setup-openrlhf`, as subprocesses; openrlhf_env/run.py says what differs there from a GPU's run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from reflogp.store import Store
from tests.conftest import REPOSITORY, save_llama, write_rows
from tests.service.serving import running, settings_file
from tests.trainer_ext.framework_runs import Runs

PYTHON = REPOSITORY / ".venv-openrlhf" / "bin" / "python"
STOCK, CACHED = "openrlhf.cli.train_dpo", "reflogp.trainer.openrlhf.train_dpo"
#: 80 rows in batches of 16 are 5 optimizer steps an epoch; 2 rows at a time on 2 processes are 4 micro-batches a step.
ROWS, EVAL_ROWS, BATCH, MICRO = 80, 11, 16, 2
SIZE = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
#: Largest difference of a loss between a reference model and its stored values, in float32.
EQUAL = 1e-4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="there is no .venv-openrlhf: make setup-openrlhf"),
]


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("openrlhf-model"), tokenizer, **SIZE)


@pytest.fixture(scope="module")
def data(pair_rows, tmp_path_factory) -> dict[str, Path]:
    """Rows whose prompts have fewer than 90 tokens: OpenRLHF drops those that leave no room for an answer."""
    folder = tmp_path_factory.mktemp("openrlhf-data")
    rows = [row for row in pair_rows if len(row["prompt"][0]["content"]) < 220]
    evaluated, others = rows[ROWS : ROWS + EVAL_ROWS], rows[ROWS + EVAL_ROWS :][:2]
    return {
        "train": write_rows(folder / "train.jsonl", rows[:ROWS]),
        "eval": write_rows(folder / "eval.jsonl", evaluated),
        "other": write_rows(folder / "other.jsonl", others + rows[:14]),
    }


@pytest.fixture(scope="module")
def train(model, data, tmp_path_factory):
    """train(module, folder, options) -> (what each process noted, what they printed). An option of None removes a default."""
    caches = tmp_path_factory.mktemp("openrlhf-caches")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"HF_DATASETS_CACHE": str(caches / "datasets"), "REFLOGP_CACHE_DIR": str(caches / "reflogp")}
    environment.pop("PYTHONPATH", None)
    modules = ["peft", "transformers.models.llama.modeling_llama", "reflogp.trainer", "torch.utils.tensorboard"]
    runs = Runs(PYTHON, Path(__file__).parent / "openrlhf_env", modules, environment)

    def run(module: str, folder: Path, options: dict[str, Any], check: bool = True) -> tuple[list[dict[str, Any]], str]:
        chosen = {
            "model.model_name_or_path": model,
            "data.dataset": data["train"],
            "data.apply_chat_template": "",
            "data.prompt_key": "prompt",
            "data.max_len": 160,  # half of the rows are longer
            "eval.dataset": data["eval"],
            "eval.split": "train",
            "train.micro_batch_size": MICRO,
            "train.batch_size": BATCH,
            "train.max_epochs": 4,
            "ds.zero_stage": 2,
            "ds.param_dtype": "fp32",
            "ds.attn_implementation": "sdpa",
            "adam.lr": 3e-4,
            "logger.logging_steps": 1,
            "eval.steps": 5,
            "ckpt.save_steps": 7,
            "ckpt.output_dir": folder / "out",
            "ckpt.path": folder / "checkpoints",
            "logger.tensorboard_dir": folder / "logs",
            "logger.wandb.run_name": "run",
            **options,
        }
        words = [word for name, value in chosen.items() if value is not None for word in (f"--{name}", str(value)) if word]
        return runs.run(module, folder, words, processes=2, check=check)

    yield run
    runs.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """Empty until the module's first run has what it misses scored."""
    return tmp_path_factory.mktemp("openrlhf-store") / "logps"


@pytest.fixture(scope="module")
def stock(train, tmp_path_factory) -> list[dict[str, Any]]:
    return train(STOCK, tmp_path_factory.mktemp("stock"), {"ckpt.save_steps": -1})[0]


@pytest.fixture(scope="module")
def cached_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cached")


@pytest.fixture(scope="module")
def cached(train, store, cached_folder) -> list[dict[str, Any]]:
    """The same training on stored values, from a store that does not exist yet: the run has everything scored first."""
    return train(CACHED, cached_folder, {"reflogp.store": store, "reflogp.on_miss": "run"})[0]


def logged(noted: list[dict[str, Any]], name: str) -> dict[int, float]:
    return {int(step): value for step, value in noted[0]["scalars"][name].items()}


def apart(left: list[dict[str, Any]], right: list[dict[str, Any]], name: str) -> float:
    """Largest difference of a logged metric, at the steps that both logged."""
    one, other = logged(left, name), logged(right, name)
    shared = one.keys() & other.keys()
    assert shared
    return max(abs(one[step] - other[step]) for step in shared)


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "reflogp_audit.json").read_text())


def test_losses_are_those_of_a_real_reference_model(stock, cached, cached_folder):
    assert sorted(logged(cached, "train/loss")) == list(range(1, 21))
    for name in ("train/loss", "train/chosen_reward", "train/reject_reward", "eval/eval_loss"):
        assert apart(stock, cached, name) <= EQUAL, name
    assert len({round(loss, 3) for loss in logged(cached, "train/loss").values()}) > 10, "it learns"
    seen = report(cached_folder)
    assert seen["verdict"] == "passed"
    assert seen["step_zero"]["sequences"] == 2 * 2 * MICRO
    assert seen["joins"]["train"]["scored"] == ROWS
    assert seen["joins"]["eval"]["scored"] == EVAL_ROWS


def test_no_reference_model_is_loaded(stock, cached, cached_folder, model):
    assert [seen["loaded"] for seen in stock] == [[str(model)] * 2] * 2
    assert [seen["loaded"] for seen in cached] == [[str(model)]] * 2
    # 20 steps of 4 micro-batches, and 4 evaluations of 11 rows: 3 batches on each process
    assert report(cached_folder)["forwards"]["policy_passes"] == 20 * 4 + 4 * 3


def test_logs_evaluations_and_checkpoints_at_the_steps_asked_for(cached, cached_folder):
    assert sorted(logged(cached, "train/loss_mean")) == list(range(1, 21))
    assert sorted(logged(cached, "eval/eval_loss")) == [5, 10, 15, 20]
    assert sorted(path.name for path in (cached_folder / "checkpoints").glob("global_step*")) == [
        "global_step14",
        "global_step7",
    ]
    schedule = report(cached_folder)["schedule"]
    assert schedule["optimizer_steps"] == 20
    assert schedule["micro_steps"] == 80
    assert (schedule["logs"], schedule["evaluations"], schedule["saves"]) == (20, 4, 2)


def test_logged_means_are_over_all_processes(stock, cached, cached_folder):
    """OpenRLHF's loss_mean is the first process': each has half of the rows, and the mean over both is another number."""
    of_one = apart(stock, cached, "train/loss_mean")
    seen = report(cached_folder)["metrics"]
    assert of_one > 100 * EQUAL
    assert seen["worst_of_first_process"]["loss_mean"] == pytest.approx(of_one, rel=0.01)
    assert seen["logs_compared"] == 20
    right = [accuracy * BATCH for accuracy in logged(cached, "train/acc_mean").values()]
    assert all(abs(rows - round(rows)) < 1e-3 for rows in right)
    assert any(round(rows) % 2 for rows in right), "one process has half of the rows"


def test_a_resumed_run_goes_on_as_the_first_one(train, cached, cached_folder, store, tmp_path):
    """From step 14, with other intervals: they count optimizer steps, and accumulation is 4."""
    options = {"ckpt.load_enable": "", "ckpt.path": cached_folder / "checkpoints", "ckpt.save_steps": -1}
    noted, _ = train(CACHED, tmp_path, {"reflogp.store": store, "logger.logging_steps": 3, "eval.steps": 4, **options})
    assert sorted(logged(noted, "train/loss")) == [15, 18]
    assert sorted(logged(noted, "eval/eval_loss")) == [16, 20]
    assert apart(noted, cached, "train/loss") <= EQUAL
    assert apart(noted, cached, "train/loss_mean") <= EQUAL
    seen = report(tmp_path)
    assert seen["verdict"] == "passed"
    assert seen["schedule"]["first_step"] == 14
    assert seen["not_run"] == {"step_zero": "the run was resumed"}
    assert seen["joins"]["train"]["scored"] == 0, "everything was there"


SHORT = {"train.max_epochs": 1, "data.max_samples": 64, "eval.steps": 2, "ckpt.save_steps": -1}


@pytest.fixture(scope="module")
def short_stock(train, tmp_path_factory) -> list[dict[str, Any]]:
    """Four steps with a reference model, packed."""
    return train(STOCK, tmp_path_factory.mktemp("packed"), {**SHORT, "ds.packing_samples": ""})[0]


@pytest.mark.parametrize("options", [{"ds.packing_samples": ""}, {"ds.zero_stage": 3}], ids=["packing", "zero3"])
def test_packing_and_zero_3(options, train, short_stock, cached, store, tmp_path):
    noted, _ = train(CACHED, tmp_path, {**SHORT, **options, "reflogp.store": store})
    assert sorted(logged(noted, "train/loss")) == [1, 2, 3, 4]
    for name in ("train/loss", "train/chosen_reward", "eval/eval_loss"):
        assert apart(noted, short_stock, name) <= EQUAL, name
    assert report(tmp_path)["verdict"] == "passed"


def test_bfloat16(train, model, tmp_path):
    """What OpenRLHF offers: dtype and model come from its own options."""
    options = {**SHORT, "data.max_samples": 32, "ds.param_dtype": "bf16", "eval.dataset": None}
    train(CACHED, tmp_path, {**options, "reflogp.store": tmp_path / "store", "reflogp.on_miss": "run"})
    seen = report(tmp_path)
    assert seen["verdict"] == "passed"
    assert (seen["step_zero"]["reference_dtype"], seen["step_zero"]["policy_dtype"]) == ("bfloat16", "bfloat16")
    assert seen["schedule"]["evaluations"] == 0
    assert [reference.name for reference in Store(tmp_path / "store").references()] == [model.name]


def test_rows_without_values_are_named_with_the_command(train, cached, data, store, reflogp, tmp_path):
    ranks, _ = train(CACHED, tmp_path, {**SHORT, "reflogp.store": store, "data.dataset": data["other"]}, check=False)
    assert [seen["error"] for seen in ranks] == ["MissingLogpsError", "RankFailedError"]
    assert all("2 of 16 rows of train (rows 0, 1) have no reference log-probs" in seen["words"] for seen in ranks)
    assert report(tmp_path)["verdict"] == "unfinished"
    command = shlex.split(ranks[0]["words"].split("Score them: ")[1])
    assert command[:2] == ["reflogp", "score"]
    status, printed, _ = reflogp(*command[1:])
    assert (status, "sequences: 0 hits" in printed) == (0, True), printed


def test_a_wrong_reference_is_refused(train, tokenizer, tmp_path):
    """Values of another model, scored for just these rows: they are all there, and not the policy's."""
    other = save_llama(tmp_path / "other", tokenizer, **{**SIZE, "num_hidden_layers": 1})
    options = {**SHORT, "data.max_samples": 16, "eval.dataset": None, "reflogp.model": other}
    ranks, _ = train(CACHED, tmp_path, {**options, "reflogp.store": tmp_path / "store", "reflogp.on_miss": "run"}, check=False)
    assert [seen["error"] for seen in ranks] == ["StepZeroError", "StepZeroError"]
    assert all("differ from this run's reference log-probs" in seen["words"] for seen in ranks)
    assert report(tmp_path)["verdict"] == "failed"


def test_a_service_scores_what_is_missing(train, model, tmp_path):
    """For an adapter's training too: with its weights still at zero the policy is the reference."""
    models = {"sft": {"model": str(model), "dtype": "float32"}}
    options = {**SHORT, "data.max_samples": 32, "eval.dataset": None, "ds.lora.rank": 4}
    options |= {"reflogp.reference": "sft", "reflogp.on_miss": "score"}
    with running("--config", settings_file(tmp_path, tmp_path / "store", models)) as service:
        train(CACHED, tmp_path, {**options, "reflogp.store": service.url})
    seen = report(tmp_path)
    assert seen["verdict"] == "passed"
    assert seen["joins"]["train"]["scored"] == 32
    assert seen["joins"]["train"]["store"] == service.url


def test_every_option_is_in_the_help_and_in_the_docs():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "openrlhf_env"), "DS_ACCELERATOR": "cpu"}
    printed = subprocess.run(
        [str(PYTHON), "-m", CACHED, "--help"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    options = set(re.findall(r"--reflogp\.\w+", printed))
    assert len(options) == 10
    assert "--ref.model_name_or_path" in printed, "OpenRLHF's own follow"
    documented = (REPOSITORY / "docs" / "openrlhf.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\| `(--reflogp\.\w+)` \|", documented)) >= options
