"""A Triton kernel for CUDA that computes log_sum_exp.py's two numbers and reads the logits once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reflogp.scoring.torch_engine.log_sum_exp import Logits

#: Number of columns that a program reads at once, and number of its warps: 32 numbers for each thread.
COLUMNS, WARPS = 4096, 4


# Triton would compile annotations of other types than its own.
@triton.jit  # type: ignore[untyped-decorator]
def _logit(product, form_scale, softcap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Do what `Logits` does."""
    value = product.to(tl.float32) * form_scale
    if HAS_CAP:
        value = softcap * (2.0 * tl.sigmoid(2.0 * value / softcap) - 1.0)  # the hyperbolic tangent
    return value


@triton.jit  # type: ignore[untyped-decorator]
def kernel(  # type: ignore[no-untyped-def]
    product,
    targets,
    sums,
    found,
    columns,
    form_scale,
    softcap,
    scale,
    HAS_CAP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Reduce one row: keep the maximum so far, and the sum of exponentials relative to it (arxiv.org/abs/1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    logits = product + row * columns
    maximum = -3.0e38  # not -inf, from which a block of logits that are -inf would make NaN
    total = 0.0
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        value = tl.load(logits + column, mask=column < columns, other=0.0)
        value = tl.where(column < columns, _logit(value, form_scale, softcap, HAS_CAP) * scale, float("-inf"))
        higher = tl.maximum(maximum, tl.max(value, 0))
        total = total * tl.exp(maximum - higher) + tl.sum(tl.exp(value - higher), 0)
        maximum = higher
    tl.store(sums + row, maximum + tl.log(total))
    value = tl.load(logits + tl.load(targets + row))
    tl.store(found + row, _logit(value, form_scale, softcap, HAS_CAP) * scale)


def reduce(product: torch.Tensor, logits: Logits, scale: float, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `log_sum_exp.eager` does; `product` must be contiguous."""
    assert product.is_contiguous()
    sums, found = product.new_empty(2, len(product), dtype=torch.float32)
    cap = logits.softcap
    kernel[(len(product),)](
        product,
        targets,
        sums,
        found,
        product.shape[1],
        float(logits.scale),
        1.0 if cap is None else float(cap),
        scale,
        HAS_CAP=cap is not None,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return sums, found
