"""How much arithmetic a pass needs and how much a device can do: the two halves of model flops utilization.

Model flops utilization (PaLM, arxiv.org/abs/2204.02311, appendix B): useful operations per second, over what the device
reaches. Here "reaches" is measured by a large matrix product, not read from a data sheet.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch

from reflogp_service.engine.sequences import Sequence

_SIDES = {"cpu": (1024, 2048), "cuda": (2048, 8192)}
_REPEATS = 5
#: Seconds that the repeats of one size may take: a CPU without units for a dtype needs minutes for the larger one.
_PATIENCE = 2.0


class ForwardFlops:
    """Operations of one forward pass over a sequence on its own, two per multiply-add.

    Every matrix weight of the backbone works on every token (an expert's on its share of them), attention on each token
    and those before it, the output embedding on completion tokens alone.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0) or 0
        head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        output = model.get_output_embeddings().weight
        self._per_token = 2.0 * _active_weights(model, config, output)
        self._per_attended: float = 4.0 * config.num_hidden_layers * heads * head_dim
        self._per_prediction = 2.0 * float(output.numel())

    def __call__(self, sequence: Sequence) -> float:
        n = len(sequence)
        attended = n * (n + 1) / 2
        return self._per_token * n + self._per_attended * attended + self._per_prediction * len(sequence.completion_ids)


def expert_count(config: Any) -> int | None:
    """Experts of each mixture layer; None for a dense model. Configs name it in two ways."""
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)


def _active_weights(model: Any, config: Any, output: torch.Tensor) -> float:
    experts = expert_count(config)
    share = getattr(config, "num_experts_per_tok", 1) / experts if experts else 1.0
    tables = {id(output), id(model.get_input_embeddings().weight)}
    return sum(
        float(weight.numel()) * (share if "experts" in name else 1.0)
        for name, weight in model.named_parameters()
        if weight.dim() >= 2 and id(weight) not in tables
    )


@cache
def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Best rate of a square matrix product over a few repeats, in operations per second.

    The larger of two sizes counts, unless the smaller one says that it takes too long.
    """
    rate = 0.0
    for side in _SIDES[device.type]:
        flops = 2.0 * side**3
        if rate and flops / rate > _PATIENCE:
            break
        took: list[float] = []
        while len(took) < _REPEATS and sum(took) < _PATIENCE:
            took.append(_product_seconds(device, dtype, side))
        rate = flops / min(took)
    return rate


@torch.inference_mode()
def _product_seconds(device: torch.device, dtype: torch.dtype, side: int) -> float:
    left, right = (torch.full((side, side), 0.5, device=device, dtype=dtype) for _ in range(2))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    torch.mm(left, right)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
