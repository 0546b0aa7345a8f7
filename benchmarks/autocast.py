"""Measure how far stored values are from TRL's own reference under TRL's defaults: float32 weights, bfloat16 autocast.

By default TRL loads a model, given by name, in float32 and sets bf16=True, so accelerate runs the policy and the reference
under torch.autocast. The benchmark scores the same pairs with TRL's own `_precompute_ref_logps` under its defaults and with the
engine in each dtype, and compares the sums of completions. The table also has TRL at another batch size: stored values cannot
be expected to be closer to TRL's reference than TRL's references at two batch sizes are to each other.

    python benchmarks/autocast.py [--data FILE:PAIRS] [--shape 20M] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from machine import cpu_and_cores, write_results
from shapes import SHAPES, sizes_of
from sides import make_tokenizer, quiet, read_pairs
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer

from reflogp.scoring.torch_engine import Sequence, TorchEngine
from scoring import SHIPPED

#: Standard deviation of the random weights: so large that log-probs are far from uniform, like those of a trained model.
_WIDTH = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=f"{SHIPPED}:100", help="a file of pairs and how many of them")
    parser.add_argument("--shape", choices=SHAPES, default="20M")
    parser.add_argument("--out", default="benchmarks/results")
    options = parser.parse_args()
    quiet()
    file, _, count = options.data.rpartition(":")
    rows = read_pairs(Path(file), int(count))
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = make_tokenizer(rows)
        model = Path(scratch) / "model"
        save_model(model, tokenizer, options.shape)
        trainer = trl_trainer(model, rows, tokenizer, Path(scratch) / "run")
        sequences = as_trained_on(trainer)
        theirs = trl_sums(trainer, trainer.args.per_device_train_batch_size)
        exact = sums(TorchEngine(str(model), "float32").score(sequences))
        table = [
            row("TRL, bf16=True, batch 1", trl_sums(trainer, 1), theirs, exact, sequences),
            *(
                row(f"reflogp, {dtype}", sums(TorchEngine(str(model), dtype).score(sequences)), theirs, exact, sequences)
                for dtype in ("bfloat16", "float32", "bfloat16-autocast")
            ),
        ]
    columns = list(table[0])
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for entry in table:
        print("| " + " | ".join(f"{value:.2g}" if isinstance(value, float) else str(value) for value in entry.values()) + " |")
    about = {"machine": cpu_and_cores(), "model": f"Llama of shape {options.shape}, random weights", "data": Path(file).name}
    counts = {"sequences": len(sequences), "tokens": sum(len(s.completion_ids) for s in sequences)}
    write_results(options.out, "autocast", {**about, **counts, "rows": table})


def save_model(folder: Path, tokenizer: Any, shape: str) -> None:
    """Save a Llama with random weights in float32, and its tokenizer."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **sizes_of(shape),
        max_position_embeddings=4096,
        initializer_range=_WIDTH,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trl_trainer(model: Path, rows: list[dict[str, Any]], tokenizer: Any, output_dir: Path) -> DPOTrainer:
    """Return TRL's trainer with its defaults: float32 weights, its own reference model, bf16=True."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    args = DPOConfig(output_dir=str(output_dir), report_to=[], use_cpu=not torch.cuda.is_available())
    return DPOTrainer(policy, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def as_trained_on(trainer: DPOTrainer) -> list[Sequence]:
    """Return the trainer's sequences as its collator truncates them, chosen and rejected in turn."""
    longest = trainer.args.max_length
    return [
        Sequence(row["prompt_ids"], row[side][: longest - len(row["prompt_ids"])])
        for row in trainer.train_dataset
        for side in ("chosen_ids", "rejected_ids")
    ]


def trl_sums(trainer: DPOTrainer, batch: int) -> Any:
    """Return TRL's reference log-probs, summed over each completion, chosen and rejected in turn."""
    trainer._precompute_model_hash = f"{trainer.args.output_dir} {batch}"  # so that TRL's cache does not contain it
    found = trainer._precompute_ref_logps(trainer.train_dataset, "train", batch)
    return np.array([found["ref_chosen_logps"], found["ref_rejected_logps"]], np.float64).T.flatten()


def sums(values: list[Any]) -> Any:
    return np.array([value.sum(dtype=np.float64) for value in values])


def row(name: str, found: Any, theirs: Any, exact: Any, sequences: list[Sequence]) -> dict[str, Any]:
    apart = np.abs(found - theirs)
    return {
        "values": name,
        "mean from TRL": float(apart.mean()),
        "largest": float(apart.max()),
        "largest per root token": float((apart / np.sqrt([len(s.completion_ids) for s in sequences])).max()),
        "mean signed": float((found - theirs).mean()),
        "sequences that are equal": int((apart == 0).sum()),
        "mean from float32": float(np.abs(found - exact).mean()),
    }


if __name__ == "__main__":
    main()
