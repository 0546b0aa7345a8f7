"""Compile decoder layers and functions with torch, each version for any number of tokens.

Without compilation, each operation between the matrix products (norms, rotary embeddings, gates, the log-sum-exp) reads and
writes whole activations several times. On a CPU, these operations together then take half as much time as the matrix products.
torch compiles only one decoder layer of each kind, and all layers of this kind run the compiled code ("regional compilation").
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch.fx.experimental import _config as fx_config

#: Minimum number of parameters of a model that is compiled by default. Smaller models are not compiled, because the first
#: compilation takes 10 to 40 s (torch caches the result on disk).
COMPILE_FROM_PARAMETERS = 50_000_000
#: Fields of model configs that have the number of experts of a layer.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
#: Number of versions of a function that torch may compile in a process (its default is 8). Models of other sizes, other dtypes,
#: heads and windows are other versions. Beyond this number, torch runs the function uncompiled, except within `or_fail`.
MOST_VERSIONS = 64
#: torch 2.11 has its settings for the whole process, so only one thread at a time may change and restore them.
_settings = threading.RLock()


def allow_many_versions() -> None:
    """Let torch compile up to `MOST_VERSIONS` versions of each function that this thread runs.

    The setting stays as it is, because restoring it would take it from another thread's pass.
    """
    if dynamo_config.recompile_limit < MOST_VERSIONS:
        dynamo_config.recompile_limit = MOST_VERSIONS


@contextmanager
def or_fail() -> Iterator[None]:
    """While the block runs, raise an error where torch would run a function with too many versions uncompiled."""
    with _settings, dynamo_config.patch(fail_on_recompile_limit_hit=True):
        yield


def should_compile(model: Any, device: torch.device) -> bool:
    """Return True if compiling can save time: the model is large enough, has no experts, and can be compiled on this device.

    Loops over experts depend on the data, so compilation would split them into many small graphs and save no time. Compilation
    for a CPU needs a C++ compiler.
    """
    config = model.config.get_text_config()
    experts = any(getattr(part, name, None) for part in (config, getattr(config, "ffn_config", None)) for name in _EXPERTS)
    compiler = device.type == "cuda" or shutil.which("g++") or shutil.which("clang++")
    return not experts and compiler is not None and model.num_parameters() >= COMPILE_FROM_PARAMETERS


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Return the decoder layers.

    These are the modules of the first ModuleList that has `num_hidden_layers` modules. If there is no such ModuleList, the
    result is empty.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = (m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    return list(next(lists, torch.nn.ModuleList()))


def compile_layers(model: Any) -> None:
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def uncompile_layers(model: Any) -> None:
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None


def any_size(function: Callable[..., Any], backend: Any = "inductor") -> Callable[..., Any]:
    """Compile a function so that it accepts tensors of any size; a call that would not be compiled raises an error.

    torch still compiles a separate version for tensors with a dimension of size 1.

    Without `use_duck_shape=False`, two sizes that happen to be equal in the first call, for example 2 key heads and 2 blocks of
    a pack, would be compiled as the same size. Without `specialize_float`, a scale or a soft cap would be passed as a CPU
    tensor, and FlexAttention's CUDA template would mistake the tensor for a pointer.
    """
    compiled = torch.compile(function, dynamic=True, backend=backend)
    sizes: Any = fx_config

    def call(*args: Any, **keywords: Any) -> Any:
        allow_many_versions()
        with or_fail(), sizes.patch(use_duck_shape=False), dynamo_config.patch(specialize_float=True):
            return compiled(*args, **keywords)

    return call
