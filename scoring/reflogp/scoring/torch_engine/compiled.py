"""Compile the operations between the matrix products: norms, rotary embeddings, gates, the head's log-sum-exp.

Without compilation each of them reads and writes whole activations several times; on a CPU they cost half as much as the
products. One decoder layer is compiled and all layers use its code ("regional compilation"), for any architecture.
"""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any

import torch

from reflogp.scoring.torch_engine.flops import expert_count

#: Compiling takes 10 to 40 seconds the first time (torch keeps the result on disk), so smaller models are not compiled.
COMPILE_FROM_PARAMETERS = 50_000_000


def should_compile(model: Any, device: torch.device) -> bool:
    """Return True if compiling can pay off: the model is large enough, a compiler is installed, and there are no experts.

    The loops over experts depend on the data, so they break into many small graphs that gain nothing.
    """
    experts = expert_count(model.config.get_text_config())
    compiler = device.type == "cuda" or shutil.which("g++") or shutil.which("clang++")
    return not experts and compiler is not None and model.num_parameters() >= COMPILE_FROM_PARAMETERS


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Return the decoder layers: the first list of modules with as many entries as the config has hidden layers."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    return list(next(lists, torch.nn.ModuleList()))


def compile_layers(model: Any) -> None:
    """Compile each decoder layer in place, for any number of tokens."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def uncompile_layers(model: Any) -> None:
    """Undo `compile_layers`."""
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None


@cache
def compiled_log_sum_exp() -> Any:
    """Return a compiled `head.log_sum_exp`, which reads the logits once instead of five times."""

    def whole(product: torch.Tensor, logits: Any, scale: float) -> torch.Tensor:
        return torch.logsumexp(logits(product.float()) * scale, 1)

    return torch.compile(whole, dynamic=True)
