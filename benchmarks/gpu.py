"""Measure scoring speed on one GPU: reflogp against padded transformers forwards and vLLM, at 7B, 0.5B and 1.5B.

    python benchmarks/gpu.py [--shapes 7B 0.5B 1.5B] [--minutes 9] [--rounds 3] [--out FOLDER]
    python benchmarks/gpu.py --quick                       # reflogp's own engine only, once
    python benchmarks/gpu.py --device cpu --shapes tiny    # a trial of the whole benchmark in a minute

Needs torch >= 2.11 and transformers >= 5.16, no network and no files: weights are random, drawn on the device, and tokens are
random in the lengths of UltraFeedback. Sides take turns in one run. The JSON file is written after every run of a side, so an
early end loses no results. For what is not installed, fails or has no time left, the file has the reason.

Results of a side:

- tokens of the data per second (medians over runs; both sequences of a pair count in full, without sharing and padding): the
  steady rate, without the first and the last pass, and the rate of whole runs;
- utilization: computed operations per second of whole runs, divided by the rate of matrix products that the device keeps up for
  3 seconds, or by the fastest of a short burst (`utilization_of_burst`);
- number of graphs that torch compiled while the side was prepared, and during its runs (where there should be none);
- peak memory, and the error against float32 forwards, in nats per token.

Results of a shape are also the kernels that take most of reflogp's time, the latency of online requests alone and beside a job,
and the time of heads.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("store", "scoring", "service", "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from reflogp.scoring.machine import growing_segments  # noqa: E402

#: Settings of torch's allocator, as services and the command line have them. torch reads them when it first uses a GPU.
ALLOCATOR = growing_segments(os.environ)
os.environ |= ALLOCATOR

import torch  # noqa: E402
from gpu_measures import (  # noqa: E402
    head_times,
    heads_text,
    kernels_by_time,
    product_rates,
    table_of,
)
from gpu_online import online_latencies, online_text  # noqa: E402
from gpu_report import Plan, Report, Sides, forget_unused_memory, rate_of  # noqa: E402
from gpu_sides import Packed, around_same_weights, best_padded, reason  # noqa: E402
from machine import cpu_and_cores, file_name  # noqa: E402
from pairs import Pairs, drawn_pairs  # noqa: E402
from shapes import SHAPES, random_model  # noqa: E402
from transformers.utils import is_flash_attn_2_available  # noqa: E402
from vllm_process import VLLM_PYTHON, Vllm  # noqa: E402

from reflogp.scoring.torch_engine import Sequence  # noqa: E402
from reflogp.scoring.torch_engine.attention import installed_kernels, kernel_names  # noqa: E402

OURS = "reflogp"
PADDED = {"transformers, padded": True, "transformers, padded, head on completions": False}
#: Number of tokens of the data (13 passes of 65,536 tokens or more, after prompts are shared), and size of the vocabulary.
TOKENS, VOCABULARY = {"tiny": 4_000, "7B": 1_100_000}, {"tiny": 2_048}
MOST_TOKENS, MOST_VOCABULARY = 2_200_000, 151_936
#: Relative shares of the time if several shapes are measured.
TIME = {"7B": 4.0, "1.5B": 1.3}
#: Maximum part of a shape's time that one run may take.
MOST_OF_TIME = 0.4
#: Numbers of pairs for other kernels and for the padded sides, and number of tokens for vLLM.
KERNEL_PAIRS, PADDED_PAIRS, VLLM_TOKENS = 800, 200, 140_000
#: Number of sequences on which errors are measured, and their maximum number of tokens.
ERROR_SEQUENCES, ERROR_TOKENS = 8, 1024
#: Seconds of passes whose kernels are listed, and the shapes for which online requests are measured.
PROFILE_SECONDS, ONLINE_SHAPES = 2.0, ("tiny", "0.5B", "7B")
#: Shapes for which the kernels that can compute float32 are compared; on CUDA, the faster one should come first.
FLOAT32_SHAPES, FLOAT32_KERNELS = ("tiny", "0.5B"), ("flex", "by_branch")
LIBRARIES = ("trl", "vllm", "flash-attn", "cut-cross-entropy", "liger-kernel", "triton", "transformers")


def main() -> None:
    options = parse()
    for name in ("transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    device = chosen_device(options.device)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_and_cores()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"gpu-{'quick-' if options.quick else ''}{file_name(machine)}.json"
    report = Report(file, options.minutes)
    report.results |= {
        "device": machine,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "installed": {name: version_of(name) for name in LIBRARIES},
        "minutes": options.minutes,
        "product_tflops": (products := product_rates(device)),
        "shapes": {},
    }
    report.write()
    print(
        f"TFLOP/s of products: {products['burst']:.3g} in a burst, {products['over_3_seconds']:.3g} over 3 seconds", flush=True
    )
    for place, shape in enumerate(options.shapes):
        weights = [TIME.get(name, 1.0) for name in options.shapes[place:]]
        left = report.end - time.perf_counter()
        found: dict[str, Any] = {"sides": {}}
        report.results["shapes"][shape] = found
        try:
            if left > 0:
                end = time.perf_counter() + left * weights[0] / sum(weights)
                config = measure_shape(shape, found, device, options, report, end)
                if not options.quick:
                    measure_vllm(shape, config, found, options, report)
            else:
                names = [OURS, *PADDED, *(f"{OURS}, {kernel}" for kernel in kernel_names(device.type)), Vllm.name]
                found["sides"] = {name: {"skipped": "no time left"} for name in names}
        except Exception as error:  # the model itself does not fit; the other shapes are still measured
            found["failed"] = reason(error)
            print(f"{shape}: {found['failed']}", flush=True)
        report.write()
    print(f"written to {file}")
    sys.exit(any("tokens_per_second" not in found["sides"].get(OURS, {}) for found in report.results["shapes"].values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["7B", "0.5B", "1.5B"])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes after which no run begins")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, if the time allows")
    parser.add_argument("--tokens", type=int, help="tokens of the data, instead of the shape's own number")
    parser.add_argument("--quick", action="store_true", help="measure only reflogp's own engine, once, and its kernels")
    folder = os.environ.get("OUT", str(REPOSITORY / "benchmarks" / "results"))
    parser.add_argument("--out", default=folder, help="folder of the JSON file; by default $OUT, or benchmarks/results")
    parser.add_argument("--verbose", action="store_true", help="show vLLM's messages")
    return parser.parse_args()


def chosen_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        sys.exit("no CUDA device is available; to try the benchmark: --device cpu --shapes tiny")
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def measure_shape(
    shape: str, found: dict[str, Any], device: torch.device, options: argparse.Namespace, report: Report, end: float
) -> Any:
    """Measure all sides that share one set of weights; return the model's config."""
    torch.compiler.reset()  # code compiled for another shape would count towards the limit of recompilations
    forget_unused_memory()
    vocabulary = VOCABULARY.get(shape, MOST_VOCABULARY)
    pairs = drawn_pairs(options.tokens or TOKENS.get(shape, MOST_TOKENS), vocabulary)
    model = random_model(shape, vocabulary, str(device))
    found |= {
        "parameters": model.num_parameters(),
        "dtype": "bfloat16",
        "vocabulary": vocabulary,
        "data": {"name": pairs.name, "pairs": len(pairs.rows), "tokens": pairs.tokens},
    }
    sides = Sides(shape, found, report, MOST_OF_TIME * (end - time.perf_counter()), end)
    if not options.quick:
        try:
            sides.set_exact(model, [shortened(s) for s in pairs.spread(ERROR_SEQUENCES // 2).sequences()])
        except RuntimeError as error:  # a float32 copy of the weights does not fit in addition
            found["errors_failed"] = reason(error)
    ours = sides.add(Plan(OURS, lambda _: Packed(model), pairs))
    if ours is not None:

        def some_passes() -> None:
            ours.run(pairs, time.perf_counter() + PROFILE_SECONDS)

        sides.measure("kernels", lambda: kernels_by_time(device, some_passes), table_of)
    if options.quick:
        return model.config
    for plan in padded_plans(model, pairs, device):
        sides.add(plan)
    if ours is not None and shape in ONLINE_SHAPES:
        sides.measure("online", lambda: online_latencies(ours.engine, vocabulary, pairs), online_text)
    for plan in kernel_plans(model, pairs, device, found["sides"][OURS]):
        sides.add(plan)
    if shape in FLOAT32_SHAPES:
        for plan in float32_plans(model, pairs):
            sides.add(plan)
    sides.measure("head", lambda: head_times(model, device, end), heads_text)
    for _ in range(options.rounds - 1):
        sides.run_again()
    rates = {name: rate for name, entry in found["sides"].items() if (rate := rate_of(entry))}
    padded = max((rates[name] for name in PADDED if name in rates), default=None)
    found["ratio_to_best_padded"] = rates[OURS] / padded if padded and OURS in rates else None
    return model.config


def padded_plans(model: Any, pairs: Pairs, device: torch.device) -> list[Plan]:
    attention = "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "sdpa"
    some = pairs.spread(PADDED_PAIRS)
    trial = some.spread(max(2, len(some.rows) // 3))
    return [
        Plan(name, lambda deadline, whole=whole: best_padded(model, trial, attention, whole, deadline), some)
        for name, whole in PADDED.items()
    ]


def kernel_plans(model: Any, pairs: Pairs, device: torch.device, ours: dict[str, Any]) -> list[Plan]:
    """Return a side for each attention kernel; the one that reflogp's own side, whose entry is `ours`, uses is skipped."""
    some, installed = pairs.spread(KERNEL_PAIRS), installed_kernels(device.type)
    plans = []
    for kernel in kernel_names(device.type):
        why_not = None if kernel in installed else "not installed, or not for this device"
        if kernel in ours.get("self_check", {}).get("kernels", []):
            why_not = f"{OURS} chose this kernel itself"
        plans.append(Plan(f"{OURS}, {kernel}", lambda _, kernel=kernel: Packed(model, kernel), some, why_not))
    return plans


def float32_plans(model: Any, pairs: Pairs) -> list[Plan]:
    some = pairs.spread(PADDED_PAIRS)
    return [
        Plan(
            f"{OURS} in float32, {kernel}",
            lambda _, kernel=kernel: Packed(around_same_weights(model, torch.float32), kernel),
            some,
        )
        for kernel in FLOAT32_KERNELS
        if kernel in installed_kernels(next(model.parameters()).device.type)
    ]


def measure_vllm(shape: str, config: Any, found: dict[str, Any], options: argparse.Namespace, report: Report) -> None:
    """Measure vLLM in a separate process, with its own random weights, after all other sides have left the device."""
    entry: dict[str, Any] = {}
    found["sides"][Vllm.name] = entry
    start = time.perf_counter()
    if not Vllm.there() and importlib.util.find_spec("vllm") is None:
        entry["skipped"] = "not installed"
    elif start > report.end:
        entry["skipped"] = "no time left"
    else:
        forget_unused_memory()
        for name in ALLOCATOR:  # torch has read it here; vLLM's shared memory does not work with it
            os.environ.pop(name, None)
        pairs = drawn_pairs(min(found["data"]["tokens"], VLLM_TOKENS), config.vocab_size)
        try:
            with tempfile.TemporaryDirectory() as folder:
                config.architectures = ["Qwen2ForCausalLM"]
                config.save_pretrained(folder)
                vllm = Vllm(Path(folder), VLLM_PYTHON if Vllm.there() else Path(sys.executable), random_weights=True)
                try:
                    vllm.seconds(pairs.spread(16))
                    entry["prepare_s"] = round(time.perf_counter() - start, 1)
                    runs = [drawn_pairs(pairs.tokens, config.vocab_size, seed) for seed in range(1, options.rounds + 1)]
                    entry["seconds"] = statistics.median(vllm.seconds(run) for run in runs)
                finally:
                    vllm.close()
            entry["tokens_per_second"] = pairs.tokens / entry["seconds"]
        except Exception as error:
            entry["failed"] = reason(error)
        entry["elapsed_s"] = round(time.perf_counter() - start, 1)
    report.say(shape, Vllm.name, entry, lambda entry: f"{entry['tokens_per_second']:,.0f} tokens/s")


def shortened(sequence: Sequence) -> Sequence:
    """Return the end of the prompt (at least one token) and the start of the completion, ERROR_TOKENS tokens at most."""
    completion = list(sequence.completion_ids)[: ERROR_TOKENS - 1]
    return Sequence(list(sequence.prompt_ids)[len(completion) - ERROR_TOKENS :], completion)


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
