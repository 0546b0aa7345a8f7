"""Measure how far a correct reference is from its policy at step 0, and how far a wrong one. The gate's tolerances are based on
these numbers.

    python -m tools.gate_trials [--runs 50]

Each run builds a model with weights from its own seed, scores pairs with it, and compares the stored values with TRL's padded
batches, as the gate does. The output shows, for each dtype and kind of model, the largest difference per root token, and the
number of runs that were refused. Then the model of `reflogp demo`, trained for 100 steps, moves on by 1, 10 and 100 steps of
AdamW on the pairs' chosen answers, and is compared with the values of the model where it started. The output shows how many of
these runs were refused.
"""

import argparse
import copy
import json
import logging
import os
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MixtralConfig, Qwen2MoeConfig
from trl import DPOConfig

from reflogp.cli.demo_model import build_model, train_tokenizer
from reflogp.store.reference import autocast_dtype
from reflogp.trainer import CachedDPOTrainer, StepZeroError
from reflogp.trainer.gate import StepZero, tolerance
from tests.conftest import PAIRS, write_rows
from tests.trainer_ext.conftest import score_pairs

SIZES = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
#: Standard deviations of the weights: the usual value, and one so large that log-probs are far from uniform.
SPREADS = (0.02, 0.08)
#: How far a policy moves away from its reference: numbers of steps, and learning rates.
STEPS, RATES = (1, 10, 100), (1e-5, 1e-4)


def model_of(kind: str, seed: int, vocabulary: int) -> torch.nn.Module:
    common = {"vocab_size": vocabulary, "max_position_embeddings": 2048, "initializer_range": SPREADS[seed % 2], **SIZES}
    common |= {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
    config = {
        "dense": lambda: LlamaConfig(intermediate_size=256, **common),
        "lora": lambda: LlamaConfig(intermediate_size=256, **common),
        "moe": lambda: (
            Qwen2MoeConfig(intermediate_size=256, **EXPERTS, **common)
            if seed % 4 < 2
            else MixtralConfig(intermediate_size=128, num_local_experts=4, **common)
        ),
    }[kind]()
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


class Compared(Exception):
    """The gate has compared the first batch and let the run go on."""


class Comparing(CachedDPOTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise Compared


def policy_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of the weights of a policy that computes in `dtype`. `compared` turns autocast on."""
    return torch.float32 if autocast_dtype(dtype) else getattr(torch, dtype)


def policy_of(model: Path, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=policy_dtype(dtype))


def compared(policy: Any, rows: list[dict], store: Path, dtype: str, seed: int = 0, lora: bool = False) -> StepZero:
    """Return what the gate finds before a training step on some rows."""
    quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}
    where = {"output_dir": str(store.parent / "run"), "bf16": autocast_dtype(dtype) == "bfloat16", "use_cpu": True}
    args = DPOConfig(per_device_train_batch_size=4, max_steps=1, seed=seed, **where, **quiet)
    options: dict[str, Any] = {"train_dataset": Dataset.from_list(rows)}
    options["processing_class"] = AutoTokenizer.from_pretrained(policy.config._name_or_path)
    if lora:
        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    trainer = Comparing(policy, args=args, reference=str(store), **options)
    with suppress(StepZeroError, Compared):  # `step_zero` says by how much
        trainer.train()
    assert trainer.step_zero is not None
    return trainer.step_zero


def moved(model: Path, rows: list[dict], rate: float) -> Iterator[tuple[int, Any]]:
    """Train a policy on the rows' chosen answers, one row a step, with weights in float32; yield it after some steps."""
    tokenizer, policy = AutoTokenizer.from_pretrained(model), policy_of(model, "float32")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate)
    for step in range(max(STEPS)):
        row = rows[step % len(rows)]
        ids = tokenizer.apply_chat_template(row["prompt"] + row["chosen"], return_tensors="pt", return_dict=True)["input_ids"]
        policy(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in STEPS:
            yield step + 1, policy


def correct(kind: str, dtype: str, runs: int, lines: list[dict], tokenizer: Any) -> None:
    seen = []
    for seed in range(runs):
        with tempfile.TemporaryDirectory() as name:
            folder, start = Path(name), 16 * seed % (len(lines) - 16)
            model_of(kind, seed, len(tokenizer)).save_pretrained(folder / "model")
            tokenizer.save_pretrained(folder / "model")
            rows = lines[start : start + 16]
            score_pairs(folder / "model", write_rows(folder / "pairs.jsonl", rows), folder / "store", dtype=dtype)
            policy = policy_of(folder / "model", dtype)
            seen.append(compared(policy, rows, folder / "store", dtype, seed, lora=kind == "lora"))
    worst = sorted(found.max_per_root_token for found in seen)
    print(
        f"{dtype:17} {kind:6} {runs} runs: largest {worst[-1]:.2g}, median {worst[runs // 2]:.2g} nats per root token, allowed "
        f"{tolerance(dtype, kind == 'moe'):g}, refused {sum(not found.passed for found in seen)}",
        flush=True,
    )


def wrong(model: Path, dtypes: list[str], runs: int, lines: list[dict]) -> None:
    seen = defaultdict(list)
    for run in range(runs):
        with tempfile.TemporaryDirectory() as name:
            folder, rows = Path(name), lines[16 * run % (len(lines) - 16) :][:16]
            data = write_rows(folder / "pairs.jsonl", rows)
            for dtype in dtypes:
                score_pairs(model, data, folder / dtype / "store", dtype=dtype)
            for rate in RATES:
                for steps, policy in moved(model, rows, rate):
                    for dtype in dtypes:
                        start = copy.deepcopy(policy).to(policy_dtype(dtype))
                        seen[dtype, rate, steps].append(compared(start, rows, folder / dtype / "store", dtype, seed=run))
    for (dtype, rate, steps), found in sorted(seen.items()):
        apart = sorted(one.max_per_root_token / one.tolerance for one in found)
        print(
            f"{dtype:17} moved {steps:3} steps at {rate:g}: refused {sum(not one.passed for one in found)} of {runs}; "
            f"difference / tolerance: smallest {apart[0]:.2g}, median {apart[runs // 2]:.2g}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="number of runs for each dtype and kind of model")
    parser.add_argument("--moved-runs", type=int, default=5, help="number of runs for each dtype and distance")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16", "bfloat16-autocast"])
    parser.add_argument("--kinds", nargs="*", default=["dense", "moe", "lora"])
    options = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"
    disable_progress_bars()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    lines = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    tokenizer = train_tokenizer([m["content"] for row in lines for side in row.values() for m in side], vocab_size=1024)
    for dtype in options.dtypes:
        for kind in options.kinds:
            correct(kind, dtype, options.runs, lines, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder), [row["prompt"] + row["chosen"] for row in lines], steps=100, batch=8)
        wrong(Path(folder), options.dtypes, options.moved_runs, lines)


if __name__ == "__main__":
    main()
