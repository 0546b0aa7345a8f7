"""Compare several workers, in processes of this machine and on Ray, with one worker: `make bench`.

Each side scores the same pairs into a new store in every round. Rates are tokens per scoring second, which excludes loading
models. A worker is one process with one thread (with GPUs: one GPU). Each round runs every side once.

    python benchmarks/workers.py [--shape 20M] [--rows 300] [--rounds 3] [--workers 2] [--no-ray] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import cpu_and_cores, write_results
from shapes import SHAPES
from sides import make_model, make_tokenizer, quiet, read_pairs

from scoring import SHIPPED

#: Code that runs the command line in its own process, with one thread.
_REFLOGP = [sys.executable, "-c", "from reflogp.cli import main; main()"]
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> None:
    options = parse()
    quiet()
    count = options.workers
    sides = {
        "one worker": [],
        f"{count} devices": ["--devices", ",".join(["cpu"] * count)],
        f"Ray, {count} workers": ["--ray", "--ray-workers", str(count)],
    }
    sides = {name: flags for name, flags in sides.items() if options.ray or "--ray" not in flags}
    summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as scratch:
        rows = read_pairs(Path(options.data), options.rows)
        model, data = Path(scratch, "model"), Path(scratch, "pairs.jsonl")
        make_tokenizer(rows).save_pretrained(model)
        parameters = make_model(model, options.shape)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for round_ in range(options.rounds):
            for name, flags in sides.items():
                store = Path(scratch, f"store {len(flags)} {round_}")
                found = score(model, data, store, flags)
                summaries[name].append(found)
                rate = f"{found['tokens_per_second']:,.0f} tokens/s, {found['seconds']:.0f} s in all"
                print(f"  round {round_ + 1}: {name}: {rate}", flush=True)
    single = summaries["one worker"]
    medians = {name: statistics.median(found["tokens_per_second"] for found in runs) for name, runs in summaries.items()}
    one = medians["one worker"]
    results = {
        "machine": cpu_and_cores(),
        "model": f"Qwen2 shape, {parameters / 1e6:.0f}M parameters, random weights, float32",
        "data": Path(options.data).name,
        "sequences_scored": single[0]["scored"],
        "rounds": options.rounds,
        "tokens_per_second": medians,
        "runs": {name: [found["tokens_per_second"] for found in runs] for name, runs in summaries.items()},
        "seconds_in_all": {name: [found["seconds"] for found in runs] for name, runs in summaries.items()},
        "ratios": {name: rate / one for name, rate in medians.items()},
        "ratios_of_rounds": {
            name: [there["tokens_per_second"] / here["tokens_per_second"] for here, there in zip(single, runs, strict=True)]
            for name, runs in summaries.items()
        },
    }
    for name, rate in medians.items():
        print(f"{name}: {rate:,.0f} tokens/s, {rate / one:.2f} times")
    write_results(options.out, "workers", results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(SHIPPED), help="preference pairs as JSON Lines")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--shape", choices=SHAPES, default="20M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-ray", dest="ray", action="store_false", help="leave out the side that needs Ray")
    parser.add_argument("--out", default="benchmarks/results")
    return parser.parse_args()


def score(model: Path, data: Path, store: Path, flags: list[str]) -> dict[str, Any]:
    """Run `reflogp score` in a process; return its summary."""
    command = [*_REFLOGP, "score", *flags, str(model), str(data), "--store", str(store), "--dtype", "float32", "--json"]
    done = subprocess.run(command, env={**os.environ, **_ONE_THREAD}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


if __name__ == "__main__":
    main()
