"""Count the operations of a forward pass and measure the peak rate of a device, for model FLOPs utilization.

Model FLOPs utilization (PaLM, arxiv.org/abs/2204.02311, appendix B) is the number of useful operations per second divided by
the device's peak rate. Operations are useful if a log-prob depends on them. This module does not take the peak rate from a
data sheet, but measures it with large matrix products.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F

from reflogp.scoring.torch_engine.packing import Pack

#: Numbers of rows of the square matrices that are multiplied to measure a device's peak rate, by device type.
_SIDES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
#: For each size, the number of warm-up products and the maximum number of products after them. The times of the warm-up
#: products are ignored, because kernels are chosen and clock speeds rise during these products.
_WARM_UP, _REPEATS = 2, 12
#: Time limit for the products of one size, in seconds. A CPU without native instructions for a dtype would need minutes for the
#: larger size.
_PATIENCE = 2.0


class Qwen2Flops:
    """Counts the operations of a Qwen2 forward, from the model's config; each multiply-add counts as two operations."""

    def __init__(self, config: Any) -> None:
        head = config.hidden_size // config.num_attention_heads
        projections = config.hidden_size * head * 2 * (config.num_attention_heads + config.num_key_value_heads)
        self._per_token = 2.0 * config.num_hidden_layers * (projections + 3 * config.hidden_size * config.intermediate_size)
        self._per_score = 4.0 * config.num_hidden_layers * config.hidden_size
        self._per_prediction = 2.0 * config.hidden_size * config.vocab_size

    def __call__(self, tokens: int, scores: float, predictions: int) -> float:
        """Return the operations of a pass.

        Args:
            tokens: number of tokens that go through the layers.
            scores: number of attention scores, one for each query and each key that it may see.
            predictions: number of positions whose logits are computed.
        """
        return self._per_token * tokens + self._per_score * scores + self._per_prediction * predictions

    def of_pack(self, pack: Pack) -> float:
        added = [(branch.stop - branch.start, branch.shared) for branch in pack.branches]
        scores = sum(count * shared + count * (count + 1) / 2 for count, shared in added)
        return self(len(pack), scores, len(pack.predicted))


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the device's peak rate for multiplying square matrices, in operations per second.

    The matrices are random. If all elements were equal, a GPU would draw less power and run faster than with a model's weights.
    Matrices of two sizes are each multiplied several times. The result is the highest rate, because other work on the machine
    can make a product slower, but never faster. The larger size is skipped if a product of this size would take too long at the
    rate measured for the smaller size.
    """
    best = 0.0
    for side in _SIDES[device.type]:
        flops = 2.0 * side**3
        if best and flops / best > _PATIENCE:
            break
        best = max(best, flops / _product_seconds(device, dtype, side))
    return best


@torch.inference_mode()
def _product_seconds(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Compute the product of two random matrices several times with F.linear; return the shortest time in seconds."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    took: list[float] = []
    while len(took) < _WARM_UP + _REPEATS and (len(took) <= _WARM_UP or sum(took) < _PATIENCE):
        _wait_for(device)
        start = time.perf_counter()
        F.linear(left, right)
        _wait_for(device)
        took.append(time.perf_counter() - start)
    return min(took[_WARM_UP:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
