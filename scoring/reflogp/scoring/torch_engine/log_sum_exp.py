"""Reduce rows of logits to the two numbers that a log-prob needs: their log-sum-exp, and the target's logit.

Each function in this module has the same signature and the same result as `eager`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch

#: Number of rows of logits that are summed at once on a CPU: few enough for their float32 copy to stay in cache.
_SUM_ROWS = 16


@dataclass(frozen=True)
class Logits:
    """Turns the product of hidden states and output embedding into logits: softcap * tanh(scale * product / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


LogSumExp: TypeAlias = Callable[[torch.Tensor, Logits, float, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def eager(product: torch.Tensor, logits: Logits, scale: float, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's log-sum-exp and its target's logit, both float32 (rows,).

    Args:
        product: hidden states times output embedding, shape (rows, columns), in any dtype.
        scale: the logits are multiplied by this number (1 / temperature).
        targets: column of each row's target, int64 (rows,).
    """
    step = _SUM_ROWS if product.device.type == "cpu" else max(1, len(product))
    sums = product.new_empty(len(product), dtype=torch.float32)
    for start in range(0, len(product), step):
        rows = slice(start, start + step)
        sums[rows] = torch.logsumexp(logits(product[rows].float()) * scale, 1)
    return sums, _of_targets(product, logits, scale, targets)


@cache
def compiled() -> LogSumExp:
    """Return a version that torch compiles into one loop over the logits; `eager` makes several copies of them.

    With split reductions, Inductor would divide the rows of a short product among several kernels, which read the logits
    twice, and would keep this code for longer products.
    """

    def whole(product: torch.Tensor, logits: Logits, scale: float) -> torch.Tensor:
        return torch.logsumexp(logits(product.float()) * scale, 1)

    sums = torch.compile(whole, dynamic=True, options={"split_reductions": False})

    def reduce(product: torch.Tensor, logits: Logits, scale: float, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sums(product, logits, scale), _of_targets(product, logits, scale, targets)

    return reduce


def _of_targets(product: torch.Tensor, logits: Logits, scale: float, targets: torch.Tensor) -> torch.Tensor:
    return logits(product.gather(1, targets[:, None])[:, 0].float()) * scale
