"""Measure the speed of scoring pairs with images: with reflogp's engine, and with the reference model of TRL's DPOTrainer.

Each side runs in its own process, in turns. TRL's side is the forward pass of the reference alone, on batches that TRL's
collator made before; reflogp's side also reads and processes the images. Rates are pairs per second.

    python benchmarks/vision.py [--family llava] [--rows 8] [--shape 20M] [--image-side 448] [--rounds 3] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import cpu_and_cores, write_results
from shapes import SHAPES
from sides import quiet, read_pairs
from transformers import AutoConfig
from vision_models import FAMILIES, PATCH, random_vision_model

from reflogp.cli.demo_model import train_tokenizer
from reflogp.scoring import TorchEngine
from reflogp.scoring.data.objects import open_dataset
from reflogp.scoring.data.tokenize import TokenizedDataset, load_tokenizer
from reflogp.scoring.runs.score import images_for_engine
from reflogp.scoring.torch_engine.sequences import Sequence
from reflogp.scoring.vision import VisionProcessor
from scoring import SHIPPED

_BATCHES = (1, 2, 4, 8)


def main() -> None:
    options = parse()
    quiet()
    if options.side:
        print(json.dumps(run(options)))
        return
    sides = ["reflogp", *(f"TRL, batch {batch}" for batch in _BATCHES if batch <= options.rows)]
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch), options)
        for number in range(options.rounds):
            for side in sides:
                command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--scratch", scratch]
                found = subprocess.run(command, capture_output=True, text=True, check=False)
                if found.returncode:
                    sys.exit(found.stderr)
                runs[side].append(json.loads(found.stdout.splitlines()[-1]))
                print(f"  round {number + 1}: {side}: {runs[side][-1]}", flush=True)
    medians = {
        side: {name: statistics.median(entry[name] for entry in entries) for name in entries[0]}
        for side, entries in runs.items()
    }
    best = max(values["pairs_per_second"] for side, values in medians.items() if side != "reflogp")
    results = {
        "machine": cpu_and_cores(),
        "torch": torch.__version__,
        "family": options.family,
        "shape": options.shape,
        "image_tokens": (options.image_side // PATCH) ** 2,
        "rows": options.rows,
        "sides": medians,
        "ratio_to_best_trl": medians["reflogp"]["pairs_per_second"] / best,
    }
    print(json.dumps(results, indent=1))
    name = "vision" if options.family == "llava" else f"vision-{options.family}"
    write_results(options.out, name, results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="number of pairs, each with its own image")
    parser.add_argument("--family", choices=FAMILIES, default="llava")
    parser.add_argument("--shape", choices=SHAPES, default="20M", help="shape of the language model")
    parser.add_argument("--image-side", type=int, default=448, help="pixels; an image has (side / 14)² tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def make(folder: Path, options: argparse.Namespace) -> None:
    """Write a model with random weights, its processor, and pairs with images of 640 × 480 pixels as JPEG."""
    from PIL import Image

    rows = read_pairs(SHIPPED, options.rows)
    tokenizer = train_tokenizer([str(row[name]) for row in rows for name in ("prompt", "chosen", "rejected")], 31_000)
    torch.manual_seed(0)
    model, processor, placeholder = random_vision_model(options.family, options.shape, options.image_side, tokenizer)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    # Some processors cannot be loaded from a folder without torchvision.
    (folder / "processor").write_bytes(pickle.dumps(processor))
    random = np.random.default_rng(0)
    lines = []
    for number, row in enumerate(rows):
        blocks = Image.fromarray(random.integers(0, 256, (48, 64, 3), np.uint8))
        blocks.resize((640, 480)).save(folder / f"{number}.jpg", quality=90)
        texts = {name: row[name] if isinstance(row[name], str) else row[name][-1]["content"] for name in ("chosen", "rejected")}
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        lines.append(json.dumps({"prompt": placeholder + "\n" + prompt, **texts, "images": [f"{number}.jpg"]}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))


def run(options: argparse.Namespace) -> dict[str, float]:
    """Run one side once, after a pass that is not measured."""
    torch.set_grad_enabled(False)
    model, data = options.scratch / "model", options.scratch / "rows.jsonl"
    seconds = ours(model, data, options.dtype) if options.side == "reflogp" else trl(model, data, options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"pairs_per_second": options.rows / seconds, "peak_mib": peak}


def read_processor(model: Path) -> Any:
    return pickle.loads((model.parent / "processor").read_bytes())  # noqa: S301 - this benchmark wrote it


def ours(model: Path, data: Path, dtype: str) -> float:
    engine = TorchEngine(str(model), dtype, "cpu")
    processor, config = read_processor(model), AutoConfig.from_pretrained(model)

    def score() -> None:
        dataset = TokenizedDataset(
            open_dataset(str(data)),
            lambda: load_tokenizer(str(model)),
            load_vision=lambda: VisionProcessor.of(processor, config),
        )
        for window in dataset:
            images = images_for_engine(window)
            table = window.table.to_pylist()
            engine.score(
                [
                    Sequence(row["prompt_ids"], row[side], images=entry)
                    for row, entry in zip(table, images, strict=True)
                    for side in ("chosen_ids", "rejected_ids")
                ]
            )

    score()
    start = time.perf_counter()
    score()
    return time.perf_counter() - start


def trl(model: Path, data: Path, options: argparse.Namespace) -> float:
    from datasets import Dataset, List
    from datasets import Image as ImageFeature
    from transformers import AutoModelForImageTextToText
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows = [{**row, "images": [str(data.parent / name) for name in row["images"]]} for row in rows]
    dataset = Dataset.from_list(rows).cast_column("images", List(ImageFeature()))
    args = DPOConfig(output_dir=str(options.scratch / "run"), max_length=None, bf16=False, use_cpu=True, report_to=[])
    policy, reference = (AutoModelForImageTextToText.from_pretrained(model, dtype=options.dtype) for _ in range(2))
    processor = read_processor(model)
    trainer = DPOTrainer(policy, reference, args, train_dataset=dataset, processing_class=processor)
    batch = int(options.side.rsplit(" ", 1)[1])
    picked = [dataset[start : min(start + batch, len(dataset))] for start in range(0, len(dataset), batch)]
    batches = [
        trainer.data_collator([dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)])
        for part in picked
    ]
    del policy
    trainer.model = trainer.model_wrapped = reference = trainer.ref_model  # only the reference runs

    def forward(inputs: Any) -> None:
        inputs = dict(inputs)
        mask = inputs.pop("completion_mask")
        labels = inputs["input_ids"].masked_fill(mask == 0, -100)
        reference(**inputs, labels=labels, use_cache=False, fused_lm_head=True).log_probs.sum(1)

    forward(batches[0])
    start = time.perf_counter()
    for inputs in batches:
        forward(inputs)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
