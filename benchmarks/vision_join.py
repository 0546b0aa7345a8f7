"""Measure the join of pairs with images: the command and the trainer.

Each pair has its own image, a JPEG file of 640 × 480 pixels. The values in the store are made up, since a join does not depend
on them. Joining decodes each image once to make the row's key. For the trainer, its construction is measured: from the dataset
to the joined columns. Every measurement runs in its own process, and includes the start of the process.

    python benchmarks/vision_join.py [--rows 10000] [--rounds 3] [--folder DIR] [--out benchmarks/results]
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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from machine import cpu_and_cores, write_results
from sides import quiet, read_pairs
from vision_models import random_vision_model

from reflogp.cli.demo_model import train_tokenizer
from reflogp.scoring.data.objects import open_dataset
from reflogp.scoring.data.tokenize import TokenizedDataset, load_tokenizer
from reflogp.scoring.vision import load_processor
from reflogp.store import Store, describe_reference, sequence_keys
from reflogp.store.schema import shard_table
from scoring import SHIPPED

IMAGE_SIDE = 56


def main() -> None:
    options = parse()
    quiet()
    if options.phase:
        PHASES[options.phase](Path(options.folder), options.processes)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        size = make(folder, options.rows)
        model, rows, store = str(folder / "model"), str(folder / "rows.jsonl"), str(folder / "store")
        print(f"{options.rows:,} rows, {size / 2**20:.0f} MiB of images; storing values", flush=True)
        common = ["--store", store, "--dtype", "float32"]
        own = [__file__, "--folder", scratch, "--processes", str(options.processes), "--phase"]
        run([*own, "values"], folder / "cache-of-values")
        commands = {
            "reflogp join": ["reflogp.cli", "join", model, rows, *common, "-o", str(folder / "joined.parquet")],
            "CachedDPOTrainer": [*own, "trainer"],
        }
        seconds: dict[str, list[float]] = {side: [] for side in commands}
        for number in range(options.rounds):
            for side, command in commands.items():
                seconds[side].append(run(command, folder / f"cache-{number}-{side.split()[0]}"))
                print(f"  round {number + 1}: {side}: {seconds[side][-1]:.1f} s", flush=True)
    results = {
        "machine": cpu_and_cores(),
        "rows": options.rows,
        "image_bytes": size,
        "processes_of_the_trainer": options.processes,
        "seconds": {side: statistics.median(runs) for side, runs in seconds.items()},
    }
    print(json.dumps(results, indent=1))
    write_results(options.out, "vision-join", results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="dataset_num_proc of the trainer")
    parser.add_argument("--folder", help="folder of the data (about 0.1 MB a row); default: a temporary folder")
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    return parser.parse_args()


def make(folder: Path, count: int) -> int:
    """Write a model with random weights, its processor, and pairs; return the bytes of their images."""
    from PIL import Image

    texts = read_pairs(SHIPPED, 64)
    tokenizer = train_tokenizer([str(row[name]) for row in texts for name in ("prompt", "chosen", "rejected")], 31_000)
    torch.manual_seed(0)
    model, processor, placeholder = random_vision_model("llava", "tiny", IMAGE_SIDE, tokenizer)
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    lines, size = [], 0
    for number in range(count):
        file = folder / f"{number}.jpg"
        blocks = Image.fromarray(random.integers(0, 256, (48, 64, 3), np.uint8))
        blocks.resize((640, 480)).save(file, quality=90)
        size += file.stat().st_size
        row = {"prompt": f"{placeholder}\nWhat is in picture {number}?", "chosen": " A red square.", "rejected": " A circle."}
        lines.append(json.dumps({**row, "images": [file.name]}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    return size


def run(command: list[str], cache: Path) -> float:
    """Run a module of reflogp or this file with a folder for caches, and return its wall time in seconds."""
    start = time.perf_counter()
    how = [command[0]] if command[0] == __file__ else ["-c", "import sys; from reflogp.cli import main; sys.exit(main())"]
    environment = {**os.environ, "REFLOGP_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, *how, *command[1:]], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return time.perf_counter() - start


def store_values(folder: Path, _processes: int) -> None:
    model = str(folder / "model")
    dataset = TokenizedDataset(
        open_dataset(str(folder / "rows.jsonl")),
        lambda: load_tokenizer(model),
        load_vision=lambda: load_processor(model, model),
    )
    table = Store(folder / "store").create_table(describe_reference(model, "float32"))
    for window in dataset:
        prompts = window.table["prompt_ids"]
        for side in ("chosen_ids", "rejected_ids"):
            completions = window.table[side]
            lens = [pc.list_value_length(ids).to_numpy().astype(np.int32) for ids in (prompts, completions)]
            values = pa.array([[-1.0] * int(length) for length in lens[1]], pa.list_(pa.float32()))
            table.append(shard_table(sequence_keys(prompts, completions), *lens, values, {"engine": "benchmark"}))


def construct_trainer(folder: Path, processes: int) -> None:
    from datasets import Image, List, load_dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import DPOConfig

    from reflogp.trainer import CachedDPOTrainer, Reference

    model = str(folder / "model")
    pairs = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "datasets"))
    pairs = pairs.map(lambda pair: {"images": [str(folder / path) for path in pair["images"]]}, load_from_cache_file=False)
    args = DPOConfig(
        output_dir=str(folder / "run"),
        max_length=None,
        bf16=False,
        use_cpu=True,
        report_to=[],
        dataset_num_proc=processes,
    )
    CachedDPOTrainer(
        AutoModelForImageTextToText.from_pretrained(model, dtype="float32"),
        args=args,
        train_dataset=pairs.cast_column("images", List(Image())),
        processing_class=AutoProcessor.from_pretrained(model),
        reference=Reference(str(folder / "store"), model=model, dtype="float32"),
    )


PHASES = {"values": store_values, "trainer": construct_trainer}

if __name__ == "__main__":
    main()
