"""Measure the scoring speed of every side on this machine, in one run: `make bench`.

Rates are tokens of the data per second (both sequences of a pair count in full, without sharing and padding), so sides can be
compared although slow sides run on a sample. Each round runs every side once; the table shows medians. A vLLM process runs only
while its side is measured: even an idle one takes memory, and with 9 GB less of it, TRL with batch size 8 ran at half speed.

    python benchmarks/scoring.py [--data FILE:ROWS …] [--shape 0.1B] [--rounds 3] [--trl-rows 12] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flops import matmul_flops_per_second
from machine import cpu_and_cores, file_name
from pairs import Pairs, drawn_pairs
from shapes import SHAPES
from sides import (
    VOCABULARY,
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
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch)
        tokenizer = make_tokenizer([row for rows in raw.values() for row in rows])
        tokenizer.save_pretrained(model)
        parameters = make_model(model, options.shape)
        data = [tokenize(name, rows, tokenizer) for name, rows in raw.items()]
        ours = Ours(model, device)
        inside = [ours, *(Trl(model, tokenizer, device, batch) for batch in (8, 1, 2, 4)), Padded(model, device)]
        turns = [partial(nullcontext, side) for side in inside] + (vllm_turns(model) if Vllm.there() else [])
        records = [Record(pairs, pairs.spread(options.trl_rows)) for pairs in data]
        for record in records:
            ours.seconds(record.sample)  # shapes that torch.compile has not seen
        for round_ in range(options.rounds):
            for turn in turns:
                with turn() as side:
                    for record in records:
                        record.measure(side, ours)
                        rate = record.rates[side.name][-1]
                        print(f"  {record.pairs.name} round {round_ + 1}: {side.name}: {rate:,.0f} tokens/s", flush=True)
    results = [record.result() for record in records]
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


def vllm_turns(model: Path) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Return functions that start the sides with vLLM. A side is warm when its `with` block begins, and exits with it."""

    @contextmanager
    def turn(start: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
        with start() as side:
            side.seconds(drawn_pairs(2000, VOCABULARY))  # random tokens, so that the prefix cache has nothing of the data
            yield side

    @contextmanager
    def with_server() -> Iterator[OursWithServer]:
        with (
            vllm_serve(str(model), free_port(), "--dtype", "bfloat16") as server,
            closing(OursWithServer(model, server.url)) as side,
        ):
            yield side

    starts = (lambda: closing(Vllm(model)), lambda: closing(OursWithVllm(model)), with_server)
    return [partial(turn, start) for start in starts]


class Record:
    """The rates of all sides on one dataset.

    Args:
        pairs: the pairs that reflogp's torch engine scores.
        sample: the pairs that the slower sides score.
    """

    def __init__(self, pairs: Pairs, sample: Pairs) -> None:
        self.pairs, self.sample = pairs, sample
        self.rates: dict[str, list[float]] = {}
        self._peaks: list[float] = []
        self._utilization: list[float] = []
        self._gains: list[float] = []

    def measure(self, side: Any, ours: Ours) -> None:
        """Score the pairs or, unless this is the torch engine's side, the sample; record the rate."""
        pairs = self.pairs if side is ours else self.sample
        before = ours.engine.token_counts()
        seconds = side.seconds(pairs)
        self.rates.setdefault(side.name, []).append(pairs.tokens / seconds)
        if side is ours:
            self._peaks.append(matmul_flops_per_second(ours.engine.device, torch.bfloat16))
            self._utilization.append(ours.operations(pairs) / seconds / self._peaks[-1])
            self._gains.append((ours.engine.token_counts() - before).sharing_gain)

    def result(self) -> dict[str, Any]:
        """Return the medians and ratios."""
        medians = {name: statistics.median(values) for name, values in self.rates.items()}
        ours = medians[Ours.name]
        return {
            "data": self.pairs.name,
            "rows": len(self.pairs.rows),
            "tokens": self.pairs.tokens,
            "rows_of_other_sides": len(self.sample.rows),
            "tokens_per_second": medians,
            "runs": self.rates,
            "pairs_per_second": ours / (self.pairs.tokens / len(self.pairs.rows)),
            "ratio_to_trl_batch_8": ours / medians["TRL, batch 8"],
            "ratio_to_best_trl": ours / max(rate for name, rate in medians.items() if name.startswith("TRL")),
            "ratio_to_padded": ours / medians[Padded.name],
            "ratio_to_vllm": ours / medians[Vllm.name] if Vllm.name in medians else None,
            "model_flops_utilization": statistics.median(self._utilization),
            "sharing_gain": statistics.median(self._gains),
            "matmul_tflops": statistics.median(self._peaks) / 1e12,
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
