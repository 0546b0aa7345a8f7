"""Two processes under each launcher and dtype, as GPUs are trained: losses beside those of TRL's own runs with a live reference
model, which may differ as much as two of TRL's own runs with another batch split.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer_ext.distributed_run import launch, losses

pytestmark = pytest.mark.slow

#: Name -> (dtype of the weights, bf16=).
PRECISIONS = {"weights": ("bfloat16", True), "mixed": ("float32", True), "float32": ("float32", False)}
CELLS = [
    ("ddp", "mixed", "dpo", "lora"),
    ("ddp", "float32", "dpo", "full"),
    ("fsdp2", "weights", "dpo", "full"),
    ("fsdp2", "float32", "kto", "full"),
    ("zero2", "weights", "kto", "lora"),
    ("zero3", "mixed", "kto", "full"),
    ("zero3", "float32", "dpo", "lora"),
]
KINDS = {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
#: The same rows a step, in batches of other shapes.
OTHER_SPLITS = [{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}, {"pad_to_multiple_of": 64}]
#: Differences below this are rounding: of a completion's log-probs in bfloat16 (0.1 nats a sum, times beta) or in float32.
ROUNDING = {True: 5e-3, False: 1e-5}
#: FSDP2 makes TRL sum in bfloat16, in steps of 1 nat from -128 to -256. While policy and reference are close, TRL rounds both
#: alike, so that its errors cancel; those of the policy alone do not: half a step, for two sums, times half of beta.
ROUNDED_SUMS = 0.05
CONFIGS = Path(find_spec("trl").submodule_search_locations[0]) / "accelerate_configs"


def dtype_of(mode: str, weights: str, bf16: bool) -> str:
    """What reflogp is to score in: the policy's dtype."""
    return "bfloat16-autocast" if (mode, weights, bf16) == ("ddp", "float32", True) else "bfloat16" if bf16 else "float32"


@pytest.fixture(scope="module")
def trained_folder(reference_folder, data_file, tmp_path_factory) -> Path:
    """The reference model after it learned the pairs: sums of about -70, as users' models have them, and not of -700."""
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(reference_folder)
    rows = map(json.loads, data_file.read_text().splitlines())
    texts = [tokenizer.apply_chat_template(conversation, tokenize=False) for row in rows for conversation in row.values()]
    ids = tokenizer(texts, padding=True, truncation=True, max_length=220, return_tensors="pt")["input_ids"]
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draws = torch.randint(len(ids), (150, 8), generator=torch.Generator().manual_seed(0))
    for chosen in draws:
        optimizer.zero_grad()
        model(input_ids=ids[chosen], labels=labels[chosen]).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("trained")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def settings(trained_folder, data_file):
    return {"model": str(trained_folder), "data": str(data_file)}


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_losses_differ_as_those_of_two_of_trls_own_runs(cell, settings, stores, trained_folder, tmp_path):
    mode, precision, kind, tuning = cell
    weights, bf16 = PRECISIONS[precision]
    args = {"bf16": bf16, "max_steps": 5, "max_length": 220, "learning_rate": 1e-3}
    if kind == "kto":  # without a KL term, whose rows depend on the batch: the split may change
        args["loss_type"] = "apo_zero_unpaired"
    given = {**settings, "mode": mode, "dtype": weights, "trainer": kind, "lora": tuning == "lora", "args": args}
    _, ours = launch({**given, "source": str(stores(dtype_of(mode, weights, bf16), trained_folder))}, tmp_path / "ours")
    assert all(seen["dtypes_read_by_the_loss"] == ["float32"] and seen["step_zero"]["passed"] for seen in ours)
    assert {seen["distributed"] for seen in ours} == {KINDS[mode]}
    if mode == "fsdp2":
        assert ours[0]["holds"] < ours[0]["parameters"], "the policy was not sharded"
    _, own = launch({**given, "trl": True}, tmp_path / "own")
    again = [
        launch({**given, "trl": True, "args": {**args, **changes}}, tmp_path / f"again-{number}")[1]
        for number, changes in enumerate(OTHER_SPLITS)
    ]
    difference, *others = (float(np.abs(losses(run) - losses(own)).max()) for run in (ours, *again))
    assert len(losses(ours)) == 5
    assert difference <= max(2 * max(others), ROUNDED_SUMS if (mode, bf16) == ("fsdp2", True) else ROUNDING[bf16])


def test_an_adapter_trains_under_fsdp2_in_bfloat16(settings, stores, trained_folder, tmp_path):
    """The gate turns the adapter off; FSDP2 must not take it for frozen then, and a policy that is its reference loses ln 2."""
    args = {"bf16": True, "max_steps": 2, "max_length": 220}
    given = {**settings, "mode": "fsdp2", "dtype": "float32", "trainer": "dpo", "lora": True, "args": args}
    _, ranks = launch({**given, "source": str(stores("bfloat16", trained_folder))}, tmp_path)
    assert all(seen["step_zero"]["passed"] for seen in ranks)
    assert abs(losses(ranks)[0] - np.log(2)) <= ROUNDED_SUMS


@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_trls_accelerate_configs(name, settings, stores, trained_folder, tmp_path):
    """`accelerate launch` with the files that TRL ships, all in bfloat16: a policy that is its reference has a loss of ln 2."""
    args = {"bf16": True, "max_steps": 1, "max_length": 220}
    given = {**settings, "source": str(stores("bfloat16", trained_folder)), "out": str(tmp_path), "args": args}
    (tmp_path / "settings.json").write_text(json.dumps(given))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{name}.yaml")]
    command += ["--num_processes", "2", "--main_process_port", "0"]
    command += ["-m", "tests.trainer_ext.distributed_run", str(tmp_path / "settings.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    ranks = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("rank-*.json"))]
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["step_zero"]["passed"] and rank["dtypes_read_by_the_loss"] == ["float32"]
    assert abs(losses(ranks)[0] - np.log(2)) <= (ROUNDED_SUMS if name.startswith("fsdp") else 0.05)
