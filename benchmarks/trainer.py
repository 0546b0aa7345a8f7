"""Measure the warm start and the memory of a cached trainer, compared with TRL's trainer, its cache and its reference model.

    python benchmarks/trainer.py [--rows 61000] [--shape 0.5B] [--rounds 3] [--data FILE] [--out benchmarks/results]

Warm start: seconds from the trainer's construction to its first training step. Each side runs in its own process, in turns, and
finds the tokenized dataset in the cache of `datasets`. The data's rows are repeated, with a number in the prompt. Values in the
store and in TRL's cache are made up, because only reading is measured. The policy has random weights, in bfloat16.

Memory: peak of each of two processes (DDP, gloo, float32, AdamW) that train 2 steps: with reflogp's trainer, and with TRL's
trainer and a reference model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from machine import cpu_and_cores, write_results
from sides import make_model, make_tokenizer, read_pairs

from reflogp.store import Store, describe_reference
from reflogp.store.schema import shard_table
from reflogp.store.windows import windows

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # tests.trainer_ext.distributed_run is the run whose memory is measured


class FirstStep(Exception):
    """The first training step began."""


def main() -> None:
    options = parse()
    if options.side:
        print(json.dumps(start(options.side, Path(options.folder))))
        return
    results: dict[str, Any] = {"machine": cpu_and_cores(), "rows": options.rows, "shape": options.shape}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        if options.rows:
            results["warm_start"] = warm_start(folder, options)
        results["memory"] = memory(folder / "memory", options)
    write_results(options.out, "trainer", results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=61_000, help="0 skips the warm start")
    parser.add_argument("--shape", default="0.5B", help="shape of the policy whose start is timed")
    parser.add_argument("--memory-shape", default="0.1B", help="shape of the policy whose memory is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", default=str(REPOSITORY / "examples" / "data" / "gsm8k_pairs.jsonl"), help="preference pairs")
    parser.add_argument("--folder", help="folder of the data; default: a temporary folder")
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    return parser.parse_args()


def warm_start(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    rows = read_pairs(Path(options.data), 1_000)
    make_tokenizer(rows).save_pretrained(folder / "model")
    parameters = make_model(folder / "model", options.shape)
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for number in range(options.rows):
            file.write(json.dumps(numbered(rows[number % len(rows)], number)) + "\n")
    found: dict[str, Any] = {"parameters": parameters, "rows": options.rows}
    found["prepare"] = measure("prepare", folder)
    for side in ("ours", "trl"):
        measure(side, folder)  # makes TRL's cache, and reads every file once
    sides: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    for _ in range(options.rounds):
        for side, seen in sides.items():
            seen.append(measure(side, folder))
    for side, seen in sides.items():
        found[side] = {name: round(statistics.median(one[name] for one in seen), 2) for name in seen[0]}
    found["trl_over_ours"] = round(found["trl"]["seconds"] / found["ours"]["seconds"], 2)
    print(json.dumps(found, indent=1))
    return found


def numbered(row: dict[str, Any], number: int) -> dict[str, Any]:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return {**row, "prompt": f"{number}: {prompt}"}
    first = {**prompt[0], "content": f"{number}: {prompt[0]['content']}"}
    return {**row, "prompt": [first, *prompt[1:]]}


def measure(side: str, folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "REFLOGP_CACHE_DIR": str(folder / "cache"), "TQDM_DISABLE": "1"}
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seen: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(side, seen, flush=True)
    return seen


def start(side: str, folder: Path) -> dict[str, Any]:
    """Start one side's trainer, or prepare the data. This function runs in its own process."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from reflogp.trainer import CachedDPOTrainer, Reference

    model = str(folder / "model")
    args = DPOConfig(
        output_dir=str(folder / "run"), max_length=1024, per_device_train_batch_size=1, max_steps=1, save_strategy="no",
        report_to=[], bf16=False, use_cpu=True, disable_tqdm=True, precompute_ref_log_probs=True,
    )  # fmt: skip
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(model)
    dataset = load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train")
    options = {"args": args, "train_dataset": dataset, "processing_class": tokenizer}
    if side == "prepare":
        return prepare(folder, policy, options)
    if side == "trl":
        DPOTrainer.compute_ref_log_probs = zeros
    else:
        options["reference"] = Reference(folder / "store", model=model)
        options["policy_starts_at_reference"] = False  # the values are made up
    describe_reference(model, "bfloat16")  # digests of the files are cached

    def first_step(*args: Any, **kwargs: Any) -> None:
        raise FirstStep

    began = time.monotonic()
    trainer = (DPOTrainer if side == "trl" else CachedDPOTrainer)(policy, **options)
    built = time.monotonic() - began
    trainer.training_step = first_step
    try:
        trainer.train()
    except FirstStep:
        return {"seconds": time.monotonic() - began, "of_that_building": built}
    raise AssertionError("no step began")


def zeros(self: Any, model: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
    """Replace TRL's reference pass by zeros: its cache is filled at no cost, because only reading the cache is measured."""
    import torch

    return (torch.zeros(len(batch["input_ids"]) // 2),) * 2


def prepare(folder: Path, policy: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Tokenize as the trainer does, so that `datasets` caches it, and store made-up values for all missing sequences."""
    from reflogp.trainer import CachedDPOTrainer, MissingLogpsError, Reference

    began = time.monotonic()
    table = Store(folder / "store").create_table(describe_reference(str(folder / "model"), "bfloat16"))
    try:
        CachedDPOTrainer(policy, reference=Reference(folder / "store", model=str(folder / "model")), **options)
    except MissingLogpsError:
        missing = pq.ParquetFile(folder / "run" / "reflogp-missing.parquet")
    random, rows, tokens = np.random.default_rng(0), 0, 0
    for batch in missing.iter_batches(10_000):
        for side in ("chosen_ids", "rejected_ids"):
            view = windows(batch["prompt_ids"], batch[side])
            offsets = np.concatenate([[0], np.cumsum(view.needed)]).astype(np.int32)
            logps = pa.ListArray.from_arrays(pa.array(offsets), pa.array(-random.random(offsets[-1], dtype=np.float32)))
            lens = np.diff(view.prompt_ids.offsets.to_numpy()).astype(np.int32)
            table.append(shard_table(view.keys(), lens, view.needed.astype(np.int32), logps, {}))
            tokens += int(offsets[-1])
        rows += len(batch)
    return {"seconds": round(time.monotonic() - began, 1), "rows": rows, "completion_tokens": tokens}


def memory(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from tests.trainer_ext.conftest import score_pairs
    from tests.trainer_ext.distributed_run import launch

    folder.mkdir(parents=True)
    rows = read_pairs(Path(options.data), 16)
    make_tokenizer(rows, 8_000).save_pretrained(folder / "model")
    parameters = make_model(folder / "model", options.memory_shape)
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    score_pairs(folder / "model", data, folder / "store")
    settings = {"model": str(folder / "model"), "data": str(data), "source": str(folder / "store")}
    settings["args"] = {"max_steps": 2, "max_length": 64}
    found: dict[str, Any] = {"parameters": parameters, "reference_mb": round(parameters * 4 / 1e6)}
    for name, more in (("ours", {}), ("trl", {"trl": True})):
        _, ranks = launch({**settings, **more}, folder / name, timeout=900)
        found[f"{name}_peak_mb"] = [round(seen["peak_kib"] * 1024 / 1e6) for seen in ranks]
    saved = [trl - ours for trl, ours in zip(found["trl_peak_mb"], found["ours_peak_mb"], strict=True)]
    found["saved_mb"] = saved
    found["saved_over_reference"] = [round(mb / found["reference_mb"], 2) for mb in saved]
    print(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
