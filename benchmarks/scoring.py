"""Measure the scoring speed of every side on this machine, in one run: `make bench`.

Rates are tokens of the data per second (both sequences of a pair count in full, without sharing and padding), so sides can be
compared although slow sides run on a sample. Each round runs every side once; the table shows medians.

    python benchmarks/scoring.py [--data FILE:ROWS …] [--shape 0.1B] [--rounds 3] [--trl-rows 12] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from machine import cpu_and_cores, file_name
from pairs import Pairs
from pausing import OwnProcesses
from shapes import SHAPES
from sides import (
    Ours,
    OursWithServer,
    OursWithVllm,
    Padded,
    Trl,
    make_model,
    make_tokenizer,
    quiet,
    read_pairs,
    tokenize,
)
from vllm_process import Vllm

from reflogp.scoring.torch_engine.flops import matmul_flops_per_second

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.vllm.serving import free_port, vllm_serve

SHIPPED = Path(__file__).resolve().parent.parent / "examples" / "data" / "gsm8k_pairs.jsonl"
#: Files of the additional data, if REFLOGP_TEST_DATA names its folder: long single-turn answers, and two sets with shared
#: prompts.
WIDER = {"ultrafeedback_1k": 48, "mmlupro_sharedprompt_dev": 256, "gsm8k_pairs_dev": 400}


def main() -> None:
    options = parse()
    torch.set_grad_enabled(False)
    quiet()
    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    files = [(Path(text.rsplit(":", 1)[0]), int(text.rsplit(":", 1)[1])) for text in options.data] or default_data()
    raw = {file.name.split(".")[0]: read_pairs(file, count) for file, count in files}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        model = Path(scratch)
        tokenizer = make_tokenizer([row for rows in raw.values() for row in rows])
        tokenizer.save_pretrained(model)
        parameters = make_model(model, options.shape)
        data = [tokenize(name, rows, tokenizer) for name, rows in raw.items()]
        ours = Ours(model, device)
        sides: list[Any] = [ours, *(Trl(model, tokenizer, device, batch) for batch in (8, 1, 2, 4)), Padded(model, device)]
        processes = OwnProcesses()
        if Vllm.there():
            running.callback(processes.resume)
            serve = vllm_serve(str(model), free_port(), "--dtype", "bfloat16")
            sides.append(processes.start(lambda: Vllm(model)))
            sides.append(processes.start(lambda: OursWithVllm(model)))
            sides.append(processes.start(lambda: OursWithServer(model, running.enter_context(serve).url)))
        results = [measure(pairs, sides, ours, processes, options, device) for pairs in data]
    about = {
        "model": f"Qwen2 shape, {parameters / 1e6:.0f}M parameters, random weights, bfloat16, vocabulary 32000",
        "machine": cpu_and_cores() if device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "self_check": ours.engine.self_check.as_dict(),
    }
    report(about, results, Path(options.out))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], metavar="FILE:ROWS", help="preference pairs as JSON Lines")
    parser.add_argument("--shape", choices=SHAPES, default="0.1B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl-rows", type=int, default=12, help="number of evenly spaced rows that the slow sides score")
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    parser.add_argument("--verbose", action="store_true", help="show vLLM's messages")
    return parser.parse_args()


def default_data() -> list[tuple[Path, int]]:
    folder = os.environ.get("REFLOGP_TEST_DATA")
    wider = [(Path(folder) / f"{name}.jsonl.gz", count) for name, count in WIDER.items()] if folder else []
    return wider or [(SHIPPED, 300)]


def measure(
    pairs: Pairs, sides: list[Any], ours: Ours, processes: OwnProcesses, options: argparse.Namespace, device: str
) -> dict[str, Any]:
    sample = pairs.spread(options.trl_rows)
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    peaks, utilization, gains = [], [], []
    for round_ in range(options.rounds):
        for side in sides:
            of_side = pairs if side is ours else sample
            if round_ == 0 and side is ours:
                side.seconds(sample)  # shapes that torch.compile has not seen
            before = ours.engine.operations()
            with processes.running(side):
                seconds = side.seconds(of_side)
            rates[side.name].append(of_side.tokens / seconds)
            if side is ours:
                matmul_flops_per_second.cache_clear()
                peaks.append(matmul_flops_per_second(ours.engine.device, torch.bfloat16))
                operations = ours.engine.operations() - before
                utilization.append(operations.computed / seconds / peaks[-1])
                gains.append(operations.sharing_gain)
            print(f"  {pairs.name} round {round_ + 1}: {side.name}: {rates[side.name][-1]:,.0f} tokens/s", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    trl = {name: rate for name, rate in medians.items() if name.startswith("TRL")}
    return {
        "data": pairs.name,
        "rows": len(pairs.rows),
        "tokens": pairs.tokens,
        "rows_of_other_sides": len(sample.rows),
        "tokens_per_second": medians,
        "runs": rates,
        "pairs_per_second": medians[ours.name] / (pairs.tokens / len(pairs.rows)),
        "ratio_to_trl_batch_8": medians[ours.name] / medians["TRL, batch 8"],
        "ratio_to_best_trl": medians[ours.name] / max(trl.values()),
        "ratio_to_padded": medians[ours.name] / medians[Padded.name],
        "ratio_to_vllm": medians[ours.name] / medians[Vllm.name] if Vllm.name in medians else None,
        "model_flops_utilization": statistics.median(utilization),
        "sharing_gain": statistics.median(gains),
        "matmul_tflops": statistics.median(peaks) / 1e12,
    }


def report(about: dict[str, Any], results: list[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = file_name(about["machine"])
    (folder / f"{name}.json").write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    sides = list(results[0]["tokens_per_second"])
    lines = [f"{about['model']}; {about['machine']}; medians of {about['rounds']} rounds; tokens of the data a second", ""]
    lines += ["| data | " + " | ".join(sides) + " | × TRL at 8 | × best TRL | × padded | × vLLM | MFU | sharing gain |"]
    lines += ["|" + " --- |" * (len(sides) + 7)]
    for found in results:
        rates = " | ".join(f"{found['tokens_per_second'][side]:,.0f}" for side in sides)
        vllm = f"{found['ratio_to_vllm']:.1f}" if found["ratio_to_vllm"] else "—"
        lines.append(
            f"| {found['data']}, {found['rows']} pairs | {rates} | {found['ratio_to_trl_batch_8']:.1f} | "
            f"{found['ratio_to_best_trl']:.1f} | {found['ratio_to_padded']:.1f} | {vllm} | "
            f"{found['model_flops_utilization']:.2f} | {found['sharing_gain']:.1f} |"
        )
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    chart(about, results, folder / f"{name}.png")


def chart(about: dict[str, Any], results: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(5.2 * len(results), 3.6), layout="constrained", squeeze=False)
    for axis, found in zip(axes[0], results, strict=True):
        names = list(found["tokens_per_second"])[::-1]
        values = [found["tokens_per_second"][name] for name in names]
        bars = axis.barh(names, values, color=["tab:blue" if name == Ours.name else "lightgrey" for name in names])
        axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3)
        axis.set(title=f"{found['data']} ({found['rows']} pairs)", xlabel="tokens of the data a second")
        axis.margins(x=0.2)
    figure.suptitle(f"{about['model']}\n{about['machine']}", fontsize=9)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
