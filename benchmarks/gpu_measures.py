"""Measure what gpu.py reports beside the speed of its sides: products, compiled graphs, kernels and heads."""

from __future__ import annotations

import importlib.util
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.utils
import torch.nn.functional as F
from flops import matmul_flops_per_second
from gpu_sides import now, reason
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from reflogp.scoring.torch_engine import log_sum_exp
from reflogp.scoring.torch_engine.head import Head

#: Seconds of products without a pause, and rows of the square matrices, by device type.
SUSTAINED_SECONDS, SIDE = 3.0, {"cuda": 8192, "cpu": 1024}
#: Number of kernels to list.
KERNELS = 22
#: Names of kernels that compute attention (FlexAttention is the only "triton_tem_"), and of those that compute other matrix
#: products. "aten::" is the prefix of a CPU's operators.
ATTENTION = re.compile(r"flash|fmha|attention|triton_tem_", re.IGNORECASE)
PRODUCT = re.compile(r"nvjet|gemm|gemv|splitk|aten::(mm|addmm|bmm|baddbmm)$", re.IGNORECASE)
#: Number of rows in the comparison of heads.
HEAD_ROWS = {"cuda": 8192, "cpu": 256}


@torch.inference_mode()
def product_rates(device: torch.device) -> dict[str, float]:
    """Return the TFLOP/s of bfloat16 matrix products: the fastest of a short burst, and the mean over 3 seconds.

    Models run at the second rate: within milliseconds, the power limit lowers the clocks of a GPU.
    """
    burst = matmul_flops_per_second(device, torch.bfloat16)
    left, right = (torch.randn(SIDE[device.type], SIDE[device.type], device=device).to(torch.bfloat16) for _ in range(2))
    each = 2.0 * len(left) ** 3
    group = max(1, round(0.1 * burst / each))  # products between two looks at the clock
    count, seconds, start = 0, 0.0, now(device)
    while seconds < SUSTAINED_SECONDS:
        for _ in range(group):
            F.linear(left, right)
        count += group
        seconds = now(device) - start
    return {"burst": burst / 1e12, "over_3_seconds": count * each / seconds / 1e12}


def graphs_compiled() -> int:
    """Return how many graphs torch.compile has compiled in this process; compiling again for other shapes counts again."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def kernels_by_time(device: torch.device, work: Callable[[], Any]) -> dict[str, Any]:
    """Return the kernels that take most of the device's time while `work` runs, and how the time is divided.

    On a CPU, operators take the place of kernels.

    Returns:
        `seconds` of the whole; `busy`, the share of these seconds in which a kernel ran; `products` and `attention`, shares of
        all kernels' time; `kernels`, a list with the name, seconds, share and number of calls of each.
    """
    on_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiler:
        start = now(device)
        work()
        seconds = now(device) - start
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    found = [event for event in profiler.key_averages() if event.device_type == kind and not event.is_user_annotation]
    rows = [(event.self_device_time_total if on_cuda else event.self_cpu_time_total, event.key, event.count) for event in found]
    total = sum(took for took, _, _ in rows)
    if not total:
        raise RuntimeError("the profiler recorded no kernel")
    attention = sum(took for took, name, _ in rows if ATTENTION.search(name))
    products = sum(took for took, name, _ in rows if PRODUCT.search(name) and not ATTENTION.search(name))
    return {
        "seconds": seconds,
        "busy": total / 1e6 / seconds,
        "products": products / total,
        "attention": attention / total,
        "kernels": [
            {"name": name[:160], "seconds": took / 1e6, "share": took / total, "calls": calls}
            for took, name, calls in sorted(rows, reverse=True)[:KERNELS]
        ],
    }


def table_of(kernels: dict[str, Any]) -> str:
    """Return the result of `kernels_by_time` as text."""
    busy, products, attention = (f"{kernels[name]:.1%}" for name in ("busy", "products", "attention"))
    lines = [
        f"busy {busy} of {kernels['seconds']:.2f} s; of the kernels' time, matrix products {products}, attention {attention}"
    ]
    for row in kernels["kernels"]:
        lines.append(f"  {row['share']:6.1%} {1000 * row['seconds']:10.2f} ms {row['calls']:7,} calls  {row['name'][:90]}")
    return "\n".join(lines)


def head_times(model: Any, device: torch.device, end: float) -> dict[str, dict[str, Any]]:
    """Return the milliseconds of log p(target) for rows of last hidden states: reflogp, and installed kernel libraries.

    Args:
        end: time.perf_counter() after which no head is measured.
    """
    rows, (vocabulary, hidden) = HEAD_ROWS[device.type], model.lm_head.weight.shape
    states = torch.randn(rows, hidden, device=device).to(torch.bfloat16)
    targets, at = torch.randint(vocabulary, (rows,), device=device), torch.arange(rows, device=device)
    weight = model.lm_head.weight

    def ours(reduction: Any) -> Callable[[], torch.Tensor]:
        head = Head(model)
        head.log_sum_exp = reduction
        return lambda: head.logps(states, at, targets)

    def by_triton() -> Callable[[], torch.Tensor]:
        from reflogp.scoring.torch_engine.triton_log_sum_exp import reduce

        return ours(reduce)

    def cut_cross_entropy() -> Callable[[], torch.Tensor]:
        from cut_cross_entropy import linear_cross_entropy

        return lambda: -linear_cross_entropy(states, weight, targets, reduction="none")

    def liger() -> Callable[[], torch.Tensor]:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return lambda: -liger_fused_linear_cross_entropy(states, weight, targets, reduction="none")

    makers: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
        "reflogp": lambda: ours(log_sum_exp.eager),
        "reflogp, compiled": lambda: ours(log_sum_exp.compiled()),
        "reflogp, Triton": by_triton,
        "cut-cross-entropy": cut_cross_entropy,
        "Liger": liger,
    }
    packages = {"reflogp, Triton": "triton", "cut-cross-entropy": "cut_cross_entropy", "Liger": "liger_kernel"}
    found: dict[str, dict[str, Any]] = {}
    for name, make in makers.items():
        found[name] = entry = {"rows": rows}
        try:
            if name in packages and importlib.util.find_spec(packages[name]) is None:
                entry["skipped"] = "not installed"
            elif name != "reflogp" and device.type == "cpu":
                entry["skipped"] = "compiling takes a minute on a CPU, and the other heads need a GPU"
            elif time.perf_counter() > end:
                entry["skipped"] = "no time left"
            else:
                entry["milliseconds"] = 1000 * _median_seconds(make(), device)
        except Exception as error:  # a kernel or a compiler may raise any error; the other heads are still measured
            entry["failed"] = reason(error)
    return found


def heads_text(heads: dict[str, dict[str, Any]]) -> str:
    """Return the result of `head_times` as text."""
    return ", ".join(f"{name} {row['milliseconds']:.2f} ms" for name, row in heads.items() if "milliseconds" in row)


@torch.no_grad()
def _median_seconds(work: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    work()
    took = []
    for _ in range(repeats):
        start = now(device)
        work()
        took.append(now(device) - start)
    return statistics.median(took)
