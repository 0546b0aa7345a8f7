"""Measure how far the engines' values are from a plain float32 forward and from each other: the table of docs/engines.md.

Needs vLLM's environment (`make setup-vllm`). Every engine scores the same pairs in float32 and in bfloat16.

    python benchmarks/spread.py [--pairs 300] [--shape 0.1B] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import cpu_and_cores, write_results
from pairs import Pairs
from shapes import SHAPES
from sides import make_model, make_tokenizer, quiet, read_pairs, tokenize
from transformers import AutoModelForCausalLM
from vllm_process import VLLM_PYTHON

from reflogp.scoring.engines import EngineChoice
from reflogp.store import describe_reference
from scoring import SHIPPED

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.conftest import plain_token_logps
from tests.vllm.serving import free_port, vllm_serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--shape", choices=SHAPES, default="0.1B")
    parser.add_argument("--out", default="benchmarks/results")
    options = parser.parse_args()
    quiet()
    rows = read_pairs(SHIPPED, options.pairs)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = make_tokenizer(rows)
        tokenizer.save_pretrained(scratch)
        make_model(Path(scratch), options.shape)
        pairs = tokenize("gsm8k_pairs", rows, tokenizer)
        plain = plain_values(scratch, pairs)
        table = [row for dtype in ("float32", "bfloat16") for row in spread(scratch, dtype, pairs, plain)]
    columns = list(table[0])
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for row in table:
        print("| " + " | ".join(f"{value:.2g}" if isinstance(value, float) else str(value) for value in row.values()) + " |")
    about = {"machine": cpu_and_cores(), "model": f"Qwen2 shape {options.shape}, random weights", "pairs": len(pairs.rows)}
    write_results(options.out, "spread", {**about, "tokens": sum(map(len, plain)), "rows": table})


def plain_values(model: str, pairs: Pairs) -> list[Any]:
    """Return the values of a plain float32 forward of each sequence alone, unpadded."""
    forward = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return [np.array(plain_token_logps(forward, s.prompt_ids, s.completion_ids)) for s in pairs.sequences()]


def spread(model: str, dtype: str, pairs: Pairs, plain: list[Any]) -> list[dict[str, Any]]:
    """Score with every engine in one dtype; return one row of the table for each."""
    reference = describe_reference(model, dtype)
    vllm = str(VLLM_PYTHON)
    choices = {
        "torch": EngineChoice("torch"),
        "vllm, prefix cache": EngineChoice("vllm", vllm_python=vllm),
        "vllm, no prefix cache": EngineChoice("vllm", vllm_python=vllm, vllm_options={"enable_prefix_caching": False}),
    }
    values = {}
    for name, choice in choices.items():
        engine = choice.make(model, reference)
        values[name] = scored(engine, pairs)
        if name != "torch":
            engine.close()  # type: ignore[attr-defined]
    with vllm_serve(model, free_port(), "--dtype", dtype, "--enable-scale-out") as server:
        engine = EngineChoice("remote", url=server.url, check_claim=False).make(model, reference)
        values["remote"] = scored(engine, pairs)
    return [row(name, dtype, found, rate, plain, values["torch"][0]) for name, (found, rate) in values.items()]


def scored(engine: Any, pairs: Pairs) -> tuple[list[Any], float]:
    """Score twice; return (values, tokens of the data per second of the second run)."""
    engine.score(pairs.sequences())
    start = time.perf_counter()
    values = engine.score(pairs.sequences())
    return values, pairs.tokens / (time.perf_counter() - start)


def row(name: str, dtype: str, values: list[Any], rate: float, plain: list[Any], torch_values: list[Any]) -> dict[str, Any]:
    from_plain = np.concatenate([a - b for a, b in zip(values, plain, strict=True)])
    from_torch = np.concatenate([a - b for a, b in zip(values, torch_values, strict=True)])
    sums = np.array([np.sum(a - b, dtype=np.float64) for a, b in zip(values, plain, strict=True)])
    return {
        "engine": name,
        "dtype": dtype,
        "RMS from float32 forward": float(np.sqrt(np.mean(from_plain**2))),
        "largest": float(np.abs(from_plain).max()),
        "RMS from torch engine": float(np.sqrt(np.mean(from_torch**2))),
        "mean": float(from_plain.mean(dtype=np.float64)),
        "tokens a second": round(rate),
        "RMS of a pair's margin": float(np.sqrt(np.mean((sums[::2] - sums[1::2]) ** 2))),
    }


if __name__ == "__main__":
    main()
