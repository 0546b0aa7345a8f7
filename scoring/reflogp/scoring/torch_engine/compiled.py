"""Compiles what stands between the matrix products: norms, rotary embeddings, gates, the head's log-sum-exp.

Eager, each of those reads and writes whole activations several times; on a CPU they cost half as much as the products. One
decoder layer is compiled and its code serves all of them ("regional compilation"), for any architecture. Knows torch.compile.
Called by the torch engine at load.
"""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any

import torch

from reflogp.scoring.torch_engine.flops import expert_count

#: Compiling takes 10 to 40 seconds the first time (torch keeps the result on disk), so smaller models are left alone.
COMPILE_FROM_PARAMETERS = 50_000_000


def worth_compiling(model: Any, device: torch.device) -> bool:
    """Whether compiling can pay: a large enough model, a compiler at hand, and no experts.

    Experts' loops depend on the data, so they break into many small graphs that gain nothing.
    """
    experts = expert_count(model.config.get_text_config())
    compiler = device.type == "cuda" or shutil.which("g++") or shutil.which("clang++")
    return not experts and compiler is not None and model.num_parameters() >= COMPILE_FROM_PARAMETERS


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The decoder layers: the one list of modules that is as long as the config says."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    return list(next(lists, torch.nn.ModuleList()))


def compile_layers(model: Any) -> None:
    """Compile every decoder layer in place, for any number of tokens."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def uncompile_layers(model: Any) -> None:
    """Undo `compile_layers`."""
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None


@cache
def compiled_log_sum_exp() -> Any:
    """`head.log_sum_exp` in one pass over the logits instead of five."""

    def whole(product: torch.Tensor, logits: Any, scale: float) -> torch.Tensor:
        return torch.logsumexp(logits(product.float()) * scale, 1)

    return torch.compile(whole, dynamic=True)
