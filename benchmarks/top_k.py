"""Measure how fast the k most probable tokens are computed, and what they take in the store.

Sides: reflogp's torch engine; plain transformers with torch.topk in padded batches, at the fastest of four batch sizes; and
vLLM with prompt_logprobs=k, if `make setup-vllm` has installed it. Rates are tokens of the data per second (the prompt counts
for each sequence). Then the values of random sequences are appended, looked up and read.

    python benchmarks/top_k.py [--data FILE] [--rows 64] [--shape 0.1B] [--k 0 16 64 128] [--stored 100000]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from machine import cpu_and_cores, write_results
from pairs import Pairs, drawn_pairs
from shapes import SHAPES
from sides import VOCABULARY, Ours, Padded, make_model, make_tokenizer, quiet, read_pairs, tokenize
from vllm_process import Vllm

from reflogp.store import Store, describe_reference, sequence_keys
from reflogp.store.schema import shard_table
from scoring import SHIPPED

_BATCHES = (1, 2, 4, 8)
#: Tokens of a stored sequence, and sequences of a commit.
_STORED_TOKENS, _COMMIT = 20, 4096


def main() -> None:
    options = parse()
    quiet()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = read_pairs(Path(options.data), options.rows)
    results: dict[str, Any] = {"machine": torch.cuda.get_device_name() if device == "cuda" else cpu_and_cores()}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        tokenizer = make_tokenizer(rows)
        tokenizer.save_pretrained(model)
        parameters = make_model(model, options.shape)
        pairs = tokenize(Path(options.data).name.split(".")[0], rows, tokenizer)
        results["model"] = f"Qwen2 shape, {parameters / 1e6:.0f}M parameters, random weights, bfloat16, vocabulary {VOCABULARY}"
        results["data"] = f"{pairs.name}, {len(pairs.rows)} pairs, {pairs.tokens} tokens"
        results["tokens_per_second"] = [speeds(model, device, pairs, k, options.rounds) for k in options.k]
        if options.stored:
            results["store"] = stored(Path(scratch), model, options.stored, 64)
    write_results(options.out, "top-k", results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(SHIPPED))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--shape", choices=SHAPES, default="0.1B")
    parser.add_argument("--k", type=int, nargs="*", default=[0, 16, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stored", type=int, default=100_000, help="sequences to store; 0 measures no store")
    parser.add_argument("--out", default="benchmarks/results")
    return parser.parse_args()


def speeds(model: Path, device: str, pairs: Pairs, k: int, rounds: int) -> dict[str, Any]:
    """Return each side's median rate; the sides alternate, but for vLLM, whose process runs alone."""
    sample = pairs.spread(max(8, len(pairs.rows) // 4))
    warm = drawn_pairs(500, VOCABULARY)
    ours = Ours(model, device, k)
    with closing(ours.engine):
        plain = {batch: Padded(model, device, batch, k) for batch in _BATCHES}
        for side in (ours, *plain.values()):
            side.seconds(warm)
        rates: dict[str, list[float]] = {"reflogp": [], **{f"transformers, batch {batch}": [] for batch in _BATCHES}}
        for _ in range(rounds):
            rates["reflogp"].append(pairs.tokens / ours.seconds(pairs))
            for batch, side in plain.items():
                rates[f"transformers, batch {batch}"].append(sample.tokens / side.seconds(sample))
        del plain
    found: dict[str, Any] = {"k": k, **{name: statistics.median(of) for name, of in rates.items()}}
    if Vllm.there():
        with closing(Vllm(model, prompt_logprobs=k)) as vllm:
            vllm.seconds(warm)
            found["vLLM"] = statistics.median(sample.tokens / vllm.seconds(sample) for _ in range(rounds))
    best = max(rate for name, rate in found.items() if name.startswith("transformers"))
    found |= {"beside_transformers": found["reflogp"] / best}
    found |= {"beside_vllm": found["reflogp"] / found["vLLM"]} if "vLLM" in found else {}
    print(", ".join(f"{name}: {value:,.1f}" for name, value in found.items()), flush=True)
    return found


def stored(scratch: Path, model: Path, count: int, k: int) -> dict[str, Any]:
    """Append, look up and read random values: log-uniform ids, as ranks by frequency are, and decreasing log-probs."""
    draw = np.random.default_rng(0)
    table = Store(scratch / "store").values_table(describe_reference(str(model)), k)
    took = 0.0
    prompts = draw.integers(0, VOCABULARY, (count, 8))
    completions = draw.integers(0, VOCABULARY, (count, _STORED_TOKENS))
    keys = sequence_keys(list(prompts), list(completions))
    for first in range(0, count, _COMMIT):
        size = min(_COMMIT, count - first)
        lengths, shape = np.full(size, _STORED_TOKENS, np.int32), (size, _STORED_TOKENS, k)
        ids = (VOCABULARY ** draw.random(shape)).astype(np.int32)
        logps = -np.cumsum(draw.exponential(1 / (1 + np.arange(k)), shape), 2).astype(np.float32)
        own = pa.array(list(logps[:, :, 0]), pa.list_(pa.float32()))
        top = (
            pa.array(list(ids.reshape(size, -1)), pa.list_(pa.int32())),
            pa.array(list(logps.reshape(size, -1)), pa.list_(pa.float32())),
        )
        started = time.perf_counter()
        rows = shard_table(keys.slice(first, size), np.full(size, 8, np.int32), lengths, own, {"engine": "random"}, top)
        table.append(rows)
        took += time.perf_counter() - started
    _, _, size_in_bytes = Store(scratch / "store").top_table(describe_reference(str(model)), k).totals()
    started = time.perf_counter()
    snapshot = Store(scratch / "store").top_table(describe_reference(str(model)), k).snapshot()
    found = snapshot.find(keys)
    looked_up = time.perf_counter() - started
    started = time.perf_counter()
    for first in range(0, count, _COMMIT):
        found.top(k, np.arange(first, min(count, first + _COMMIT)))
    read = time.perf_counter() - started
    result = {
        "sequences": count,
        "tokens": count * _STORED_TOKENS,
        "k": k,
        "bytes_per_token": size_in_bytes / (count * _STORED_TOKENS),
        "append_seconds": took,
        "look_up_seconds": looked_up,
        "read_seconds": read,
    }
    print(result, flush=True)
    return result


if __name__ == "__main__":
    main()
