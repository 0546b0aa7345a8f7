"""Scoring speed on one GPU, in one command: ours against TRL's precomputation and a padded loop, at 0.5B, 1.5B and 7B.

    python benchmarks/gpu.py [--shapes 0.5B 1.5B 7B] [--data FILE:ROWS] [--rounds 3] [--out benchmarks/results]

Needs torch >= 2.11, transformers >= 5.16, what this repository's store and command line import (pyarrow, deltalake, typer,
rich), and trl for TRL's side. Random weights, real text. Writes JSON with the hardware's name: medians, ratios, utilization
against a matrix product of the same run, peak memory, what the self-check found, and the head's chunked log-sum-exp against
Liger and cut-cross-entropy where they are installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("store", "service", "client", "trainer_ext", "benchmarks")]

import torch  # noqa: E402
from sides import SHAPES, Ours, Padded, Pairs, Trl, make_model, make_tokenizer, quiet, read_pairs, synchronized, tokenize  # noqa: E402

from reflogp_service.engine.flops import matmul_flops_per_second  # noqa: E402
from reflogp_service.engine.head import Logits, log_sum_exp  # noqa: E402
from reflogp_service.engine.operations import Operations  # noqa: E402

TRL_BATCHES = (1, 2, 4, 8, 16)
#: Rows of the head's comparison, and the vocabulary of current models.
HEAD_ROWS, HEAD_VOCABULARY = 8192, 151_936


def main() -> None:
    options = parse()
    quiet()
    file, count = options.data.rsplit(":", 1)
    rows = read_pairs(Path(file), int(count))
    tokenizer = make_tokenizer(rows)
    pairs = tokenize(Path(file).name, rows, tokenizer)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "data": {"file": pairs.name, "rows": len(pairs.rows), "tokens": pairs.tokens},
        "matmul_tflops": matmul_flops_per_second(torch.device("cuda"), torch.bfloat16) / 1e12,
        "models": {},
    }
    file_out = Path(options.out) / f"gpu-{results['device'].lower().replace(' ', '-')}.json"
    file_out.parent.mkdir(parents=True, exist_ok=True)
    for shape in options.shapes:
        results["models"][shape] = measure_shape(shape, pairs, tokenizer, options)
        file_out.write_text(json.dumps(results, indent=1) + "\n")  # what is measured is kept if a larger shape fails
        print(json.dumps({shape: results["models"][shape]}, indent=1), flush=True)
    results["head"] = measure_heads(options.rounds)
    file_out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["head"], indent=1), f"\nwritten to {file_out}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--data", default=f"{REPOSITORY / 'examples' / 'data' / 'gsm8k_pairs.jsonl'}:300", metavar="FILE:ROWS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=str(REPOSITORY / "benchmarks" / "results"))
    return parser.parse_args()


def measure_shape(shape: str, pairs: Pairs, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer.save_pretrained(folder)
        parameters = make_model(folder, shape, device="cuda")
        found: dict[str, Any] = {"parameters": parameters, "tokens_per_second": {}, "peak_bytes": {}, "failed": {}}
        makers: list[Callable[[], Any]] = [lambda: Ours(folder, "cuda"), lambda: Padded(folder, "cuda")]
        if importlib.util.find_spec("trl"):
            makers += [lambda batch=batch: Trl(folder, tokenizer, "cuda", batch) for batch in TRL_BATCHES]  # type: ignore[misc]
        for make in makers:
            measure_side(make, pairs, options.rounds, found)
    rates = found["tokens_per_second"]
    trl = {name: rate for name, rate in rates.items() if name.startswith("TRL")}
    if Ours.name in rates:
        found["ratio_to_best_trl"] = rates[Ours.name] / max(trl.values()) if trl else None
        found["ratio_to_padded"] = rates[Ours.name] / rates[Padded.name] if Padded.name in rates else None
    return found


def measure_side(make: Callable[[], Any], pairs: Pairs, rounds: int, found: dict[str, Any]) -> None:
    """One side at a time holds the device, so that its peak memory is its own."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    name = "?"
    try:
        side = make()
        name = side.name
        side.seconds(pairs.spread(16))  # kernels are chosen and compiled
        before = side.engine.operations() if isinstance(side, Ours) else Operations()
        seconds = [side.seconds(pairs) for _ in range(rounds)]
    except (RuntimeError, ImportError, ValueError) as error:
        found["failed"][name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return
    middle = statistics.median(seconds)
    found["tokens_per_second"][name] = pairs.tokens / middle
    found["peak_bytes"][name] = torch.cuda.max_memory_allocated()
    if isinstance(side, Ours):
        operations, peak = side.engine.operations() - before, side.engine.peak_flops_per_second()
        found["model_flops_utilization"] = operations.computed / rounds / middle / peak if peak else None
        found["sharing_gain"] = operations.sharing_gain
        found["self_check"] = side.engine.self_check.as_dict()
        found["token_budget"] = side.engine.token_budget


def measure_heads(rounds: int, hidden_size: int = 3584) -> dict[str, Any]:
    """Milliseconds of log p(target) for some rows: ours, and kernel libraries where they are installed."""
    hidden = torch.randn(HEAD_ROWS, hidden_size, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(HEAD_VOCABULARY, hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02
    targets = torch.randint(HEAD_VOCABULARY, (HEAD_ROWS,), device="cuda")

    def chunked() -> torch.Tensor:
        parts = []
        for start in range(0, HEAD_ROWS, 1024):
            product = torch.nn.functional.linear(hidden[start : start + 1024], weight)
            exact = product.gather(1, targets[start : start + 1024, None])[:, 0].float()
            parts.append(exact - log_sum_exp(product, Logits(), 1.0))
        return torch.cat(parts)

    ways: dict[str, Callable[[], torch.Tensor]] = {"reflogp, chunked": chunked}
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        ways["cut-cross-entropy"] = lambda: -linear_cross_entropy(hidden, weight, targets, reduction="none")
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        ways["Liger"] = lambda: -liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")
    found = {}
    with torch.no_grad():
        for name, way in ways.items():
            way()
            seconds = []
            for _ in range(max(rounds, 3)):
                start = synchronized("cuda")
                way()
                seconds.append(synchronized("cuda") - start)
            found[name] = 1000 * statistics.median(seconds)
    return {"rows": HEAD_ROWS, "vocabulary": HEAD_VOCABULARY, "hidden_size": hidden_size, "milliseconds": found}


if __name__ == "__main__":
    main()
