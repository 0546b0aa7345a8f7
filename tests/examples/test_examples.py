"""Each example as a reader runs it, in a process of its own, on few rows and for few steps."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import REPOSITORY

SECONDS = 240
LAUNCH = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


@pytest.fixture
def run(tmp_path):
    """run(example, *options, launcher=()) -> what it printed."""
    #: Two threads on two cores that others use wait for each other.
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_CACHE": str(tmp_path / "datasets")}

    def start(example: str, *options: str, launcher=()) -> str:
        command = [sys.executable, *launcher, str(REPOSITORY / "examples" / f"{example}.py"), "--out", str(tmp_path / "out")]
        done = subprocess.run(
            [*command, *options], cwd=REPOSITORY, env=os.environ | own, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        return done.stdout

    return start


@pytest.fixture
def few(reference_folder) -> list[str]:
    return ["--model", str(reference_folder), "--rows", "12", "--steps", "2"]


def report_of(folder: Path) -> dict:
    return json.loads((folder / "reflogp.json").read_text())


def assert_trained(printed: str, folder: Path) -> dict:
    """The gate passed, nothing was scored or computed while joining, and each step has a finite loss; gives the report."""
    report = report_of(folder)
    assert report["step_zero"]["passed"]
    assert report["step_zero"]["max_per_root_token"] <= report["step_zero"]["tolerance"] == 0.001
    assert (report["joins"]["train"]["scored"], report["joins"]["train"]["computed"]) == (0, 0)
    assert "gate: policy and reference differ by at most" in printed
    losses = losses_of(printed)
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    return report


def losses_of(printed: str) -> list[float]:
    return [float(loss) for loss in re.search(r"^losses: (.*)$", printed, re.MULTILINE)[1].split()]


def scored(printed: str) -> list[int]:
    """What each `reflogp score` scored."""
    return [int(count) for count in re.findall(r"hits, (\d+) scored", printed)]


@pytest.mark.slow
def test_dpo_with_the_model_it_builds(run, tmp_path):
    printed = run("dpo", "--rows", "12", "--steps", "2")
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
    assert assert_trained(printed, tmp_path / "out" / "dpo")["joins"]["train"]["rows"] == 12
    [count] = scored(printed)
    assert 12 < count <= 24


@pytest.mark.slow
def test_dpo_on_the_images_that_it_draws(run, tmp_path):
    printed = run("vision_dpo", "--rows", "12", "--steps", "2")
    assert assert_trained(printed, tmp_path / "out" / "vision_dpo")["joins"]["train"]["rows"] == 12
    [count] = scored(printed)
    assert 12 < count <= 24
    model, data = str(tmp_path / "out" / "vision-model"), str(tmp_path / "out" / "images.jsonl")
    again = run("vision_dpo", "--model", model, "--data", data, "--steps", "2")
    assert_trained(again, tmp_path / "out" / "vision_dpo")
    assert scored(again) == [0], "paths start at the folder of the file"


@pytest.mark.slow
def test_kto_scores_what_the_trainer_names(run, few, tmp_path):
    printed = run("kto", *few)
    assert assert_trained(printed, tmp_path / "out" / "kto")["joins"]["train"]["rows"] == 24
    own, crossed = scored(printed)
    assert own > 0 and crossed > 0
    assert (tmp_path / "out" / "kto" / "reflogp-missing.parquet").is_file()
    assert re.search(r"MissingLogpsError: \d+ of 24 rows of train .* have no reference log-probs .*: reflogp score ", printed)


@pytest.mark.slow
def test_lora_trains_an_adapter_only(run, few, tmp_path):
    printed = run("lora", *few)
    assert_trained(printed, tmp_path / "out" / "lora")
    trained, whole = (int(n.replace(",", "")) for n in re.search(r"trained ([\d,]+) of ([\d,]+) parameters", printed).groups())
    assert 0 < trained < whole / 5
    assert (tmp_path / "out" / "lora" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_fsdp_shards_the_policy_over_two_processes(run, few, tmp_path):
    prepared = run("fsdp", *few, "--prepare")
    assert scored(prepared)[0] > 0
    printed = run("fsdp", *few, launcher=LAUNCH)
    assert assert_trained(printed, tmp_path / "out" / "fsdp")["step_zero"]["sequences"] == 16
    held, whole = (int(n.replace(",", "")) for n in re.search(r"process 0 of 2 holds ([\d,]+) of ([\d,]+)", printed).groups())
    assert whole / 3 < held < whole * 2 / 3
    assert not scored(printed)


def test_fsdp_says_what_to_run_first(run, few):
    with pytest.raises(AssertionError, match=r"first run `python examples/fsdp\.py --prepare`"):
        run("fsdp", *few)


@pytest.mark.slow
def test_a_student_learns_from_stored_values(run, tmp_path):
    printed = run("distill", "--rows", "16", "--steps", "24")
    assert 0 < scored(printed)[0] <= 16 and "teacher: not loaded" in printed
    losses = losses_of(printed)
    assert len(losses) == 24 and sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert (tmp_path / "out" / "student" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_sweep_scores_once(run, few, tmp_path):
    printed = run("sweep", *few[:-1], "1", "--beta", "0.1", "0.5", "--max-length", "128", "512", "--loss-type", "ipo")
    before, after = scored(printed)
    assert before > 0 and after == 0
    reports = [report_of(folder) for folder in sorted((tmp_path / "out" / "sweep").iterdir())]
    assert len(reports) == 4
    assert all(report["step_zero"]["passed"] for report in reports)
    assert len({report["joins"]["train"]["snapshot"] for report in reports}) == 1
    assert {report["joins"]["train"]["max_length"] for report in reports} == {128, 512}
    rows = [line.split() for line in printed.splitlines() if line.startswith("ipo ")]
    assert [row[1:3] for row in rows] == [["0.1", "128"], ["0.1", "512"], ["0.5", "128"], ["0.5", "512"]]
    assert all(math.isfinite(float(loss)) for row in rows for loss in row[-2:])
    trl = 2 * sum(report["joins"]["train"]["rows"] for report in reports)
    assert f"sequences scored: {before} before the first run, 0 after the last" in printed
    assert f"TRL would have scored {trl} with precompute_ref_log_probs, 32 without" in printed


@pytest.mark.slow
def test_online_asks_the_service_that_it_starts(run, few, tmp_path):
    printed = run("online", *few)
    report = report_of(tmp_path / "out" / "online")
    assert report["step_zero"]["passed"]
    assert (report["remote"]["batches"], report["remote"]["sequences"]) == (2, 8)
    assert "gate: policy and reference differ by at most" in printed


@pytest.mark.slow
def test_the_notebook_goes_from_rows_to_a_trained_step(tmp_path, monkeypatch):
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(REPOSITORY / "examples" / "notebook.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "commit the notebook without its outputs"
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    shown = "\n".join(output.data["text/plain"] for output in outputs if "data" in output)
    assert re.search(r"64 rows, 128 sequences: 0 hits, [1-9]\d* scored", shown)
    assert "64 rows, 128 sequences: 128 hits, 0 scored" in shown
    assert re.search(r"StepZero\(sequences=[1-9]\d*, ", shown)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    [run] = tmp_path.glob("reflogp-*/run")
    assert report_of(run)["joins"]["train"]["rows"] == 64
