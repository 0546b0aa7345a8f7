"""Measure how far a correct reference is from its policy at step 0. The gate's tolerances are based on these numbers.

    python -m tools.gate_trials [--runs 50]

Each run builds a model with weights from its own seed, scores pairs with it, and trains one step on the stored values, so the
gate compares packed scoring with TRL's padded batches. The output shows, for each dtype and kind of model, the largest
difference per root token, and the number of runs that were refused.
"""

import argparse
import json
import logging
import os
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2MoeConfig
from trl import DPOConfig

from reflogp.cli.demo_model import train_tokenizer
from reflogp.store.reference import autocast_dtype
from reflogp.trainer import CachedDPOTrainer, ReferenceSource, StepZeroError
from reflogp.trainer.tolerances import tolerance
from tests.conftest import PAIRS, write_rows
from tests.trainer_ext.conftest import score_pairs

SIZES = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
#: Standard deviations of the weights: the usual value, and one so large that log-probs are far from uniform.
SPREADS = (0.02, 0.08)


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


def one_run(kind: str, dtype: str, seed: int, rows: list[dict], tokenizer, folder: Path) -> tuple[float, bool]:
    """Return (largest difference per root token in the gate and the spot check, True if the run was refused)."""
    model_of(kind, seed, len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    data = write_rows(folder / "pairs.jsonl", rows)
    score_pairs(folder / "model", data, folder / "store", dtype=dtype)
    autocast = autocast_dtype(dtype)
    policy = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32 if autocast else getattr(torch, dtype))
    quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}
    where = {"output_dir": str(folder / "run"), "bf16": autocast == "bfloat16", "use_cpu": True}
    args = DPOConfig(per_device_train_batch_size=4, max_steps=1, seed=seed, **where, **quiet)
    options = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    if kind == "lora":
        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    source = ReferenceSource(folder / "store", model=str(folder / "model"), dtype=dtype)
    trainer = CachedDPOTrainer(policy, args=args, reference=source, **options)
    refused = False
    try:
        trainer.train()
    except StepZeroError:
        refused = True
    seen = trainer.audit.as_dict()
    gate = seen["step_zero"]["max_per_root_token"] if seen["step_zero"] else 0.0  # empty if the spot check refused the run
    return max(gate, seen["spot_check"]["max_per_root_token"]), refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="number of runs for each dtype and kind of model")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16", "bfloat16-autocast"])
    parser.add_argument("--kinds", nargs="+", default=["dense", "moe", "lora"])
    options = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"
    disable_progress_bars()
    logging.disable(logging.WARNING)
    lines = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    tokenizer = train_tokenizer([m["content"] for row in lines for side in row.values() for m in side], vocab_size=1024)
    for dtype in options.dtypes:
        for kind in options.kinds:
            seen = defaultdict(list)
            for seed in range(options.runs):
                with tempfile.TemporaryDirectory() as folder:
                    start = 16 * seed % (len(lines) - 16)
                    worst, refused = one_run(kind, dtype, seed, lines[start : start + 16], tokenizer, Path(folder))
                seen["worst"].append(worst)
                seen["refused"].append(refused)
            print(
                f"{dtype:17} {kind:6} {options.runs} runs: largest {max(seen['worst']):.2g}, median "
                f"{sorted(seen['worst'])[options.runs // 2]:.2g} nats per root token, allowed "
                f"{tolerance(dtype, kind == 'moe'):g}, refused {sum(seen['refused'])}",
                flush=True,
            )


if __name__ == "__main__":
    main()
