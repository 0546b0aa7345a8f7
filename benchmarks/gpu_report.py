"""Run the sides of gpu.py, and report the results: in the JSON file, and as text."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_measures import graphs_compiled
from gpu_sides import Run, exact_values, reason
from pairs import Pairs

from reflogp.scoring.torch_engine import Sequence


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

    def say(self, shape: str, name: str, entry: dict[str, Any], text: Callable[[Any], str]) -> None:
        """Write the file, and print the text about a measurement, or the reason why it has no figures."""
        self.write()
        reasons = [f"{word}: {entry[word]}" for word in ("skipped", "failed") if word in entry]
        print(f"{self.results['elapsed_s']:6.1f} s  {shape}  {name}: {reasons[0] if reasons else text(entry)}", flush=True)


class Sides:
    """The sides of one shape, which share the model's weights and the time.

    Args:
        shape: the shape's name.
        found: the shape's part of the results.
        longest: maximum seconds of preparing a side, and of a run.
        end: time.perf_counter() when the shape's time is up.
    """

    def __init__(self, shape: str, found: dict[str, Any], report: Report, longest: float, end: float) -> None:
        self._shape, self._found, self._report, self._longest, self._end = shape, found, report, longest, end
        self._few: list[Sequence] = []
        self._exact: list[np.ndarray] = []
        self._sides: dict[str, tuple[Any, Pairs]] = {}

    def set_exact(self, model: Any, few: list[Sequence]) -> None:
        """Compute the values with which the sides' values are compared."""
        self._exact = exact_values(model, few)
        self._few = few

    def add(self, plan: Plan) -> Any:
        """Make a side, measure its error, and run it once. Return None if it cannot be measured; its entry has the reason."""
        entry: dict[str, Any] = {}
        self._found["sides"][plan.name] = entry
        side = self._first_run(plan, entry)
        if side is not None:
            self._sides[plan.name] = (side, plan.pairs)
        self._say(plan.name)
        return side

    def _first_run(self, plan: Plan, entry: dict[str, Any]) -> Any:
        start = time.perf_counter()
        if plan.why_not is None and start > self._end:
            plan.why_not = "no time left"
        if plan.why_not is not None:
            entry["skipped"] = plan.why_not
            return None
        forget_unused_memory()
        graphs = graphs_compiled()
        try:
            side = plan.make(min(self._end, start + self._longest))
            entry |= side.about
            if self._few:
                pairs = zip(side.values(self._few), self._exact, strict=True)
                differences = np.concatenate([values - exact for values, exact in pairs])
                entry["error_rms"] = float(np.sqrt(np.mean(differences**2)))
                entry["error_largest"] = float(np.abs(differences).max())
            side.run(plan.pairs, 0.0)  # one pass of full size: kernels are compiled, memory is taken
            entry["prepare_s"] = round(time.perf_counter() - start, 1)
            entry["graphs_compiled"] = {"preparing": graphs_compiled() - graphs, "runs": 0}
            if time.perf_counter() > self._end:
                entry["skipped"] = "no time left after the side was prepared"
                return None
            measured_run(side, plan.pairs, entry, min(self._end, time.perf_counter() + self._longest))
        except Exception as error:  # a kernel, a compiler or an engine may raise any error; the other sides are still measured
            entry["failed"] = reason(error)
            return None
        finally:
            entry["elapsed_s"] = round(time.perf_counter() - start, 1)
        return side

    def run_again(self) -> None:
        """Run each side once more, if the time allows."""
        for name, (side, pairs) in self._sides.items():
            entry = self._found["sides"][name]
            if entry["incomplete"] or time.perf_counter() + entry["runs"][-1]["seconds"] > self._end:
                continue
            try:
                measured_run(side, pairs, entry, self._end)
            except Exception as error:
                entry["later_run_failed"] = reason(error)
            self._say(name)

    def measure(self, name: str, work: Callable[[], dict[str, Any]], text: Callable[[Any], str]) -> None:
        """Add another measurement to the shape's results, or the reason why there is none; print it."""
        entry: dict[str, Any] = {"skipped": "no time left"}
        if time.perf_counter() < self._end:
            try:
                entry = work()
            except Exception as error:  # as of a side
                entry = {"failed": reason(error)}
        self._found[name] = entry
        self._report.say(self._shape, name, entry, text)

    def _say(self, name: str) -> None:
        entry = self._found["sides"][name]
        if "runs" in entry:
            summarize(entry, self._report.results["product_tflops"])
        self._report.say(self._shape, name, entry, text_of)


def measured_run(side: Any, pairs: Pairs, entry: dict[str, Any], deadline: float) -> None:
    """Run a side, and add the run to its entry."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    graphs = graphs_compiled()
    run: Run = side.run(pairs, deadline)
    entry["graphs_compiled"]["runs"] += graphs_compiled() - graphs
    steady = run.passes[1:-1]
    entry.setdefault("runs", []).append(
        {
            "seconds": run.seconds,
            "tokens": run.tokens,
            "steady_tokens_per_second": sum(n for _, n in steady) / sum(took for took, _ in steady) if steady else None,
            "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        }
    )
    entry["incomplete"] = not run.complete
    entry["operations"] = run.operations or None
    entry["pass_seconds"] = [round(took, 4) for took, _ in run.passes]


def summarize(entry: dict[str, Any], products: dict[str, float]) -> None:
    """Set the medians over a side's runs, its utilization and its peak memory."""
    runs = entry["runs"]
    steady = [rate for run in runs if (rate := run["steady_tokens_per_second"])]
    entry["steady_tokens_per_second"] = statistics.median(steady) if steady else None
    entry["tokens_per_second"] = statistics.median(run["tokens"] / run["seconds"] for run in runs)
    entry["seconds"] = statistics.median(run["seconds"] for run in runs)
    if entry["operations"]:
        tflops = entry["operations"] / entry["seconds"] / 1e12
        entry["utilization"] = tflops / products["over_3_seconds"]
        entry["utilization_of_burst"] = tflops / products["burst"]
    entry["peak_bytes"] = max((run["peak_bytes"] or 0 for run in runs), default=0) or None


def rate_of(entry: dict[str, Any]) -> float:
    """Return a side's steady rate, or the rate of whole runs if these have too few passes; 0 if it has no figure."""
    return entry.get("steady_tokens_per_second") or entry.get("tokens_per_second") or 0.0


def text_of(entry: dict[str, Any]) -> str:
    """Return a side's main figures as text, and, of reflogp's sides, what the self-check found."""
    steady = f"{entry['steady_tokens_per_second']:,.0f} tokens/s steady, " if entry["steady_tokens_per_second"] else ""
    parts = [f"{steady}{entry['tokens_per_second']:,.0f} tokens/s in whole runs"]
    if "utilization" in entry:
        parts.append(f"utilization {entry['utilization']:.2f} ({entry['utilization_of_burst']:.2f} of the burst rate)")
    if entry["peak_bytes"]:
        parts.append(f"peak {entry['peak_bytes'] / 1e9:.1f} GB")
    if "error_rms" in entry:
        parts.append(f"error {entry['error_rms']:.4f}")
    parts.append("graphs compiled: {preparing} before the runs, {runs} in them".format(**entry["graphs_compiled"]))
    lines = [", ".join(parts)]
    if check := entry.get("self_check"):
        text = "  {path} path, kernels {kernels}, compiled {compiled}, log-sum-exp {log_sum_exp}, difference {difference:.4f}"
        lines.append(text.format(**check))
        lines.append(f"  rejected: {check['rejected'] or 'nothing'}")
        lines.append(f"  budget of {entry['token_budget']:,} tokens a pass, prepared in {entry['prepare_s']} s")
    return "\n".join(lines)


def forget_unused_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
