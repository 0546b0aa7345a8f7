"""A sweep over beta, max_length and loss with a single store: the data is scored once for all runs.

    python examples/sweep.py
    python examples/sweep.py --beta 0.03 0.1 0.3 --max-length 256 --loss-type sigmoid ipo hinge

The store has a value for every completion token, so a run with a smaller max_length simply sums fewer values. TRL itself would
run the reference model again in each run: on every batch without precompute_ref_log_probs, or on every row with it, because the
key of TRL's cache depends on the run's whole config (TRL 1.16). The larger the dataset (--data), the larger the difference.
"""

import itertools
from typing import Any

from common import ON_CPU, losses_of, options_of, prepare, reflogp
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import DPOConfig

from reflogp.trainer import CachedDPOTrainer


def run(options: Any, beta: float, max_length: int, loss_type: str) -> CachedDPOTrainer:
    folder = options.out / "sweep" / f"{loss_type}-{beta:g}-{max_length}"
    settings = {**ON_CPU, "beta": beta, "max_length": max_length, "loss_type": loss_type}
    trainer = CachedDPOTrainer(
        AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
        args=DPOConfig(output_dir=str(folder), max_steps=options.steps, **settings),
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reference=options.store,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


def main() -> None:
    options = options_of(
        __doc__,
        steps=3,
        beta={"type": float, "nargs": "+", "default": [0.1, 0.5], "help": "values of beta; default: 0.1 0.5"},
        max_length={"type": int, "nargs": "+", "default": [128, 512], "help": "values of max_length; default: 128 512"},
        loss_type={"nargs": "+", "default": ["sigmoid", "ipo"], "help": "loss types, as named in TRL; default: sigmoid ipo"},
    )
    prepare(options)

    before = reflogp("score", options.model, options.data, "--store", options.store, "--dtype", "float32")
    print(f"\n{'loss':10} {'beta':>6} {'max_length':>10} {'rows':>6} {'snapshot':>8} {'first loss':>11} {'last loss':>11}")
    by_batch = by_row = 0
    for loss_type, beta, max_length in itertools.product(options.loss_type, options.beta, options.max_length):
        trainer = run(options, beta, max_length, loss_type)
        joined, losses = trainer.joins["train"], losses_of(trainer)
        print(
            f"{loss_type:10} {beta:6g} {max_length:10} {joined.rows:6} {joined.where.snapshot:8} "
            f"{losses[0]:11.4f} {losses[-1]:11.4f}",
            flush=True,
        )
        by_batch += 2 * trainer.args.per_device_train_batch_size * options.steps
        by_row += 2 * joined.rows
    print()
    after = reflogp("score", options.model, options.data, "--store", options.store, "--dtype", "float32")
    print(
        f"sequences scored: {before['scored']} before the first run, {after['scored']} after the last\n"
        f"TRL would have scored {by_row} with precompute_ref_log_probs, {by_batch} without ({options.steps} steps per run)"
    )


if __name__ == "__main__":
    main()
