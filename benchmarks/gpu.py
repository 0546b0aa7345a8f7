"""Measure scoring speed on one GPU: reflogp against padded transformers forwards and vLLM, at 0.5B, 1.5B and 7B.

    python benchmarks/gpu.py [--shapes 0.5B 1.5B 7B] [--minutes 9] [--rounds 3] [--out benchmarks/results]
    python benchmarks/gpu.py --device cpu --shapes tiny    # a trial of the whole benchmark in a minute

Needs torch >= 2.11 and transformers >= 5.16, no network and no files: weights are random, drawn on the device, and tokens are
random in the lengths of UltraFeedback. Sides take turns in one run. The JSON file is written after every run of a side, so an
early end loses no results. For a side that is not installed, fails or has no time left, the file has the reason.

Results of a side: seconds of each run; tokens of the data per second (medians; both sequences of a pair count in full, without
sharing and padding); the steady rate without the first and the last pass; utilization (computed operations per second, divided
by the rate of a matrix product in the same run); peak memory; and the error against float32 forwards, in nats per token.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import importlib.util
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("store", "scoring", "service", "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gpu_sides import Packed, Padded, Run, exact_values, now  # noqa: E402
from machine import cpu_and_cores, file_name  # noqa: E402
from pairs import Pairs, drawn_pairs  # noqa: E402
from shapes import SHAPES, random_model  # noqa: E402
from transformers.utils import is_flash_attn_2_available  # noqa: E402
from vllm_process import VLLM_PYTHON, Vllm  # noqa: E402

from reflogp.scoring.torch_engine import Sequence  # noqa: E402
from reflogp.scoring.torch_engine.attention import installed_kernels, kernel_names  # noqa: E402
from reflogp.scoring.torch_engine.flops import matmul_flops_per_second  # noqa: E402
from reflogp.scoring.torch_engine.forward import compiled_log_sum_exp  # noqa: E402
from reflogp.scoring.torch_engine.head import Head  # noqa: E402

OURS = "reflogp"
PADDED = {"transformers, padded": True, "transformers, padded, head on completions": False}
#: Number of tokens of the data (more than 20 passes of 65,536 tokens after prompts are shared), and size of the vocabulary.
TOKENS, VOCABULARY = {"tiny": 3_000}, {"tiny": 2_048}
MOST_TOKENS, MOST_VOCABULARY = 2_200_000, 151_936
#: Relative shares of the time if several shapes are measured.
TIME = {"1.5B": 1.3, "7B": 3.0}
#: Maximum part of a shape's time that one run may take.
MOST_OF_TIME = 0.4
#: Steps with which pairs are sampled: for other kernels, for the padded sides, and for the choice of a batch size.
KERNEL_STEP, PADDED_STEP, TRIAL_STEP = 4, 16, 48
BATCHES = (4, 8, 16, 32, 64)
#: Number of sequences on which errors are measured, and their maximum number of tokens.
ERROR_SEQUENCES, ERROR_TOKENS = 8, 1024
#: Number of rows in the comparison of heads.
HEAD_ROWS = {"cuda": 8192, "cpu": 256}
LIBRARIES = ("trl", "vllm", "flash-attn", "cut-cross-entropy", "liger-kernel", "triton", "transformers")


@dataclass
class Plan:
    """A side to measure: a function from a deadline to the side, the pairs that it scores, and why it is skipped, if it is."""

    name: str
    make: Callable[[float], Any]
    pairs: Pairs
    why_not: str | None = None


class Report:
    """The JSON file of results, rewritten after every measurement."""

    def __init__(self, file: Path, minutes: float) -> None:
        self.results: dict[str, Any] = {}
        self._file = file
        self._start = time.perf_counter()
        self.end = self._start + 60 * minutes

    def write(self) -> None:
        self.results["elapsed_s"] = round(time.perf_counter() - self._start, 1)
        part = self._file.with_name(self._file.name + ".part")
        part.write_text(json.dumps(self.results, indent=1) + "\n")
        part.replace(self._file)

    def said(self, shape: str, name: str, entry: dict[str, Any]) -> None:
        """Write the file, and print one line about a side."""
        self.write()
        text = next((f"{word}: {entry[word]}" for word in ("skipped", "failed") if word in entry), None)
        if text is None:
            share = entry.get("utilization")
            text = f"{entry['tokens_per_second']:,.0f} tokens/s" + (f", utilization {share:.2f}" if share else "")
        print(f"{self.results['elapsed_s']:6.1f} s  {shape}  {name}: {text}", flush=True)


def main() -> None:
    options = parse()
    for name in ("transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    device = chosen_device(options.device)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_and_cores()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"gpu-{file_name(machine)}.json"
    report = Report(file, options.minutes)
    report.results |= {
        "device": machine,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "installed": {name: version_of(name) for name in LIBRARIES},
        "minutes": options.minutes,
        "shapes": {},
    }
    for place, shape in enumerate(options.shapes):
        weights = [TIME.get(name, 1.0) for name in options.shapes[place:]]
        left = report.end - time.perf_counter()
        found: dict[str, Any] = {"sides": {}, "head": {}}
        report.results["shapes"][shape] = found
        try:
            if left > 0:
                end = time.perf_counter() + left * weights[0] / sum(weights)
                config = measure_shape(shape, found, device, options, report, end)
                measure_vllm(shape, config, found, options, report)
            else:
                names = [OURS, *PADDED, *(f"{OURS}, {kernel}" for kernel in kernel_names(device.type)), Vllm.name]
                found["sides"] = {name: {"skipped": "no time left"} for name in names}
        except Exception as error:  # the model itself does not fit; the other shapes are still measured
            found["failed"] = reason(error)
        report.write()
    print(f"written to {file}")
    sys.exit(any("tokens_per_second" not in found["sides"].get(OURS, {}) for found in report.results["shapes"].values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes after which no run begins")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, if the time allows")
    parser.add_argument("--tokens", type=int, help="tokens of the data, instead of the shape's own number")
    parser.add_argument("--out", default=str(REPOSITORY / "benchmarks" / "results"), help="folder of the JSON file")
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
    longest = MOST_OF_TIME * (end - time.perf_counter())
    forget_unused_memory()
    torch.compiler.reset()  # code compiled for another shape would count towards the limit of recompilations
    vocabulary = VOCABULARY.get(shape, MOST_VOCABULARY)
    pairs = drawn_pairs(options.tokens or TOKENS.get(shape, MOST_TOKENS), vocabulary)
    model = random_model(shape, vocabulary, str(device))
    rate = matmul_flops_per_second(device, torch.bfloat16)
    found |= {
        "parameters": model.num_parameters(),
        "dtype": "bfloat16",
        "vocabulary": vocabulary,
        "data": {"name": pairs.name, "pairs": len(pairs.rows), "tokens": pairs.tokens},
        "product_tflops": rate / 1e12,
    }
    few = [shortened(s) for s in pairs.spread(ERROR_SEQUENCES // 2).sequences()]
    try:
        exact = exact_values(model, few)
    except RuntimeError as error:  # a float32 copy of the weights does not fit in addition
        few, exact = [], []
        found["errors_failed"] = reason(error)
        report.write()
    sides: dict[str, tuple[Any, Pairs]] = {}
    for plan in plans(model, pairs, device):
        entry: dict[str, Any] = {}
        own_kernels = found["sides"].get(OURS, {}).get("self_check", {}).get("kernels", [])
        if plan.name in [f"{OURS}, {kernel}" for kernel in own_kernels]:
            plan.why_not = f"{OURS} chose this kernel itself"
        side = first_run(plan, entry, few, exact, longest, end)
        if side is not None:
            sides[plan.name] = (side, plan.pairs)
            summarize(entry, rate)
        found["sides"][plan.name] = entry
        report.said(shape, plan.name, entry)
    measure_head(shape, model, found["head"], device, report, end)
    for _ in range(options.rounds - 1):
        for name, (side, its_pairs) in sides.items():
            entry = found["sides"][name]
            if entry["incomplete"] or time.perf_counter() + entry["runs"][-1]["seconds"] > end:
                continue
            try:
                measured_run(side, its_pairs, entry, end)
            except Exception as error:
                entry["later_run_failed"] = reason(error)
            summarize(entry, rate)
            report.said(shape, name, entry)
    rates = {name: entry["tokens_per_second"] for name, entry in found["sides"].items() if "tokens_per_second" in entry}
    padded = max((rates[name] for name in PADDED if name in rates), default=None)
    found["ratio_to_best_padded"] = rates[OURS] / padded if padded and OURS in rates else None
    return model.config


def plans(model: Any, pairs: Pairs, device: torch.device) -> list[Plan]:
    """Return the sides, the most important first."""
    attention = "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "sdpa"
    some, trial = (pairs.spread(max(4, len(pairs.rows) // step)) for step in (PADDED_STEP, TRIAL_STEP))
    found = [Plan(OURS, lambda _: Packed(model), pairs)]
    for name, whole in PADDED.items():
        make = functools.partial(best_padded, model, trial, attention, whole)
        found.append(Plan(name, make, some))
    quarter = pairs.spread(max(8, len(pairs.rows) // KERNEL_STEP))
    installed = installed_kernels(device.type)
    for kernel in kernel_names(device.type):
        why_not = None if kernel in installed else "not installed, or not for this device"
        found.append(Plan(f"{OURS}, {kernel}", functools.partial(with_kernel, model, kernel), quarter, why_not))
    return found


def with_kernel(model: Any, kernel: str, deadline: float) -> Packed:
    return Packed(model, kernel)


def best_padded(model: Any, trial: Pairs, attention: str, whole_logits: bool, deadline: float) -> Padded:
    """Return the padded side with the fastest batch size for the trial pairs; its `about` has the rate of each batch size."""
    rates: dict[int, float] = {}
    failed: dict[int, str] = {}
    for batch in BATCHES:
        if rates and batch > 2 * len(trial.rows):
            break
        side = Padded(model, batch, attention, whole_logits)
        try:
            side.run(trial.spread(batch // 2), float("inf"))
            run = side.run(trial, float("inf"))
        except RuntimeError as error:  # out of memory, or more elements than a kernel can index
            if not rates:
                raise
            failed[batch] = reason(error)
            break
        rates[batch] = run.tokens / run.seconds
        if rates[batch] < max(rates.values()) / 2 or time.perf_counter() > deadline:
            break  # padding costs more than larger products gain, or there is no time for more
    best = Padded(model, max(rates, key=lambda batch: rates[batch]), attention, whole_logits)
    best.about |= {"tokens_per_second_at_batch": rates, "failed_at_batch": failed}
    return best


def first_run(
    plan: Plan, entry: dict[str, Any], few: list[Sequence], exact: list[np.ndarray], longest: float, end: float
) -> Any:
    """Make a side, measure its error, and run it once. Return None if it cannot be measured; `entry` then has the reason.

    Args:
        longest: maximum seconds of preparing, and of the run.
        end: time.perf_counter() when the shape's time is up.
    """
    start = time.perf_counter()
    if plan.why_not is None and start > end:
        plan.why_not = "no time left"
    if plan.why_not is not None:
        entry["skipped"] = plan.why_not
        return None
    forget_unused_memory()
    try:
        side = plan.make(min(end, start + longest))
        entry |= side.about
        if few:
            differences = np.concatenate([ours - right for ours, right in zip(side.values(few), exact, strict=True)])
            entry["error_rms"] = float(np.sqrt(np.mean(differences**2)))
            entry["error_largest"] = float(np.abs(differences).max())
        side.run(plan.pairs.spread(16), end)  # kernels are compiled, memory is taken
        entry["prepare_s"] = round(time.perf_counter() - start, 1)
        if time.perf_counter() > end:
            entry["skipped"] = "no time left after the side was prepared"
            return None
        measured_run(side, plan.pairs, entry, min(end, time.perf_counter() + longest))
    except Exception as error:  # a kernel, a compiler or an engine may raise any error; the other sides are still measured
        entry["failed"] = reason(error)
        return None
    finally:
        entry["elapsed_s"] = round(time.perf_counter() - start, 1)
    return side


def measured_run(side: Any, pairs: Pairs, entry: dict[str, Any], deadline: float) -> None:
    """Run a side, and add the run to its entry."""
    forget_unused_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    run: Run = side.run(pairs, deadline)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    entry.setdefault("runs", []).append({"seconds": run.seconds, "tokens": run.tokens, "peak_bytes": peak})
    entry["incomplete"] = not run.complete
    entry["operations"] = run.operations or None
    entry["passes"] = passes_of(run)


def passes_of(run: Run) -> dict[str, Any]:
    """Return the seconds of each pass, and the rate without the first and the last pass."""
    seconds = [took for took, _ in run.passes]
    steady = run.passes[1:-1]
    return {
        "count": len(seconds),
        "seconds": [round(took, 4) for took in seconds],
        "median_s": statistics.median(seconds) if seconds else None,
        "steady_tokens_per_second": sum(count for _, count in steady) / sum(took for took, _ in steady) if steady else None,
    }


def summarize(entry: dict[str, Any], rate: float) -> None:
    """Set the medians over a side's runs, its utilization and its peak memory."""
    entry["seconds"] = statistics.median(run["seconds"] for run in entry["runs"])
    entry["tokens_per_second"] = statistics.median(run["tokens"] / run["seconds"] for run in entry["runs"])
    entry["utilization"] = entry["operations"] / entry["seconds"] / rate if entry["operations"] else None
    entry["peak_bytes"] = max((run["peak_bytes"] or 0 for run in entry["runs"]), default=0) or None


def measure_head(
    shape: str, model: Any, found: dict[str, Any], device: torch.device, report: Report, end: float, repeats: int = 5
) -> None:
    """Measure the milliseconds of log p(target) for rows of last hidden states: reflogp, and installed kernel libraries."""
    rows, (vocabulary, hidden) = HEAD_ROWS[device.type], model.lm_head.weight.shape
    states = torch.randn(rows, hidden, device=device).to(torch.bfloat16)
    targets, at = torch.randint(vocabulary, (rows,), device=device), torch.arange(rows, device=device)
    weight = model.lm_head.weight

    def ours(compiled: bool) -> Callable[[], torch.Tensor]:
        head = Head(model)
        if compiled:
            head.log_sum_exp = compiled_log_sum_exp()
        return lambda: head.logps(states, at, targets)

    def cut_cross_entropy() -> Callable[[], torch.Tensor]:
        from cut_cross_entropy import linear_cross_entropy

        return lambda: -linear_cross_entropy(states, weight, targets, reduction="none")

    def liger() -> Callable[[], torch.Tensor]:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return lambda: -liger_fused_linear_cross_entropy(states, weight, targets, reduction="none")

    makers: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
        OURS: lambda: ours(False),
        f"{OURS}, compiled": lambda: ours(True),
        "cut-cross-entropy": cut_cross_entropy,
        "Liger": liger,
    }
    packages = {"cut-cross-entropy": "cut_cross_entropy", "Liger": "liger_kernel"}
    for name, make in makers.items():
        found[name] = entry = {"rows": rows}
        forget_unused_memory()
        try:
            if name in packages and importlib.util.find_spec(packages[name]) is None:
                entry["skipped"] = "not installed"
            elif name == f"{OURS}, compiled" and device.type == "cpu":
                entry["skipped"] = "compiling takes a minute on a CPU"
            elif time.perf_counter() > end:
                entry["skipped"] = "no time left"
            else:
                with torch.no_grad():
                    way = make()
                    way()
                    took = []
                    for _ in range(repeats):
                        start = now(device)
                        way()
                        took.append(now(device) - start)
                entry["milliseconds"] = 1000 * statistics.median(took)
        except Exception as error:
            entry["failed"] = reason(error)
    report.write()


def measure_vllm(shape: str, config: Any, found: dict[str, Any], options: argparse.Namespace, report: Report) -> None:
    """Measure vLLM in a separate process, with its own random weights, after all other sides have left the device."""
    python = VLLM_PYTHON if VLLM_PYTHON.is_file() else Path(sys.executable)
    there = VLLM_PYTHON.is_file() or importlib.util.find_spec("vllm") is not None
    entry: dict[str, Any] = {}
    found["sides"][Vllm.name] = entry
    start = time.perf_counter()
    if not there or start > report.end:
        entry["skipped"] = "no time left" if there else "not installed"
        report.said(shape, Vllm.name, entry)
        return
    forget_unused_memory()
    pairs = drawn_pairs(found["data"]["tokens"] // PADDED_STEP, config.vocab_size)
    try:
        with tempfile.TemporaryDirectory() as folder:
            config.architectures = ["Qwen2ForCausalLM"]
            config.save_pretrained(folder)
            vllm = Vllm(Path(folder), python, random_weights=True)
            try:
                vllm.seconds(pairs.spread(16))
                entry["prepare_s"] = round(time.perf_counter() - start, 1)
                seconds = [
                    vllm.seconds(drawn_pairs(pairs.tokens, config.vocab_size, seed)) for seed in range(1, options.rounds + 1)
                ]
            finally:
                vllm.close()
        entry["seconds"] = statistics.median(seconds)
        entry["tokens_per_second"] = pairs.tokens / entry["seconds"]
    except Exception as error:
        entry["failed"] = reason(error)
    entry["elapsed_s"] = round(time.perf_counter() - start, 1)
    report.said(shape, Vllm.name, entry)


def shortened(sequence: Sequence) -> Sequence:
    """Return the end of the prompt (at least one token) and the start of the completion, ERROR_TOKENS tokens at most."""
    completion = list(sequence.completion_ids)[: ERROR_TOKENS - 1]
    return Sequence(list(sequence.prompt_ids)[len(completion) - ERROR_TOKENS :], completion)


def forget_unused_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
