"""Estimate how much device memory a model needs, and recognize out-of-memory errors.

Before any weight is read, the number of a model's parameters shows whether it fits on the device. The token budget (the
number of tokens that fit into a forward pass) can only be estimated, so the engine halves it when memory runs out.
Out-of-memory errors from torch, Triton and CUDA's libraries while a model is loaded or checked are re-raised as
OutOfMemoryError.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from reflogp.scoring.errors import OutOfMemoryError
from reflogp.scoring.machine import free_memory, total_memory
from reflogp.store.checkpoint import Checkpoint
from reflogp.store.texts import first_line

#: Numbers of tokens above which longer passes do not compute more tokens per second. The first number applies to CUDA, where
#: the matrix products of passes with this many tokens are large enough. The second number applies to each thread of torch on a
#: CPU (by default, one thread for each core), and the third number is the maximum for all threads together. On a CPU, the
#: activations of longer passes do not fit in the cores' caches. (On two cores, with models of 100M and 500M parameters, passes
#: of 2,048 tokens are 10% faster than passes of 4,096.)
_ENOUGH_TOKENS_CUDA, _ENOUGH_TOKENS_CORE, _MOST_TOKENS_CPU = 65_536, 1_024, 16_384
#: Number of elements of a tensor up to which compiled code counts them in 32 bits. For a larger one, torch compiles the layer
#: again, with 64 bits (Gemma 2 27B has 36,864 values for a token between the products of its MLP).
_MOST_ELEMENTS = (1 << 31) - 1
#: The smallest token budget that `auto_token_budget` returns.
_LEAST_TOKENS = 512
#: Fraction of the free memory that activations may use. The rest is for logits, for buffers of kernels and for fragmentation.
_SHARE = 0.5
#: Number of vectors of the hidden size, and number of vectors of the intermediate size, that a layer has in memory at once for
#: each token. Both numbers are upper estimates.
_HIDDEN_COPIES, _INTERMEDIATE_COPIES = 12, 3


#: Maximum number of logits that the smallest pass on a CPU has in memory at once, and bytes per logit (up to 4 for a copy in
#: the model's dtype, and 4 for a copy in float32).
_LEAST_LOGITS, _LOGIT_BYTES = 1 << 25, 8


def auto_token_budget(model: Any, device: torch.device, dtype: torch.dtype) -> int:
    """Return a token budget, based on the memory that is free now."""
    fits = int(_SHARE * free_bytes(device) / _bytes_per_token(model.config, dtype))
    enough = min(_ENOUGH_TOKENS_CUDA, index_limit(model))
    if device.type == "cpu":
        enough = min(_MOST_TOKENS_CPU, _ENOUGH_TOKENS_CORE * torch.get_num_threads())
    return max(_LEAST_TOKENS, min(enough, fits))


def index_limit(model: Any) -> int:
    """Return the number of tokens up to which no activation in the model's layers has more than `_MOST_ELEMENTS` elements."""
    widths = (module.out_features for module in model.get_decoder().modules() if isinstance(module, torch.nn.Linear))
    return _MOST_ELEMENTS // max(widths, default=1)


def least_pass_bytes(config: Any, device: torch.device, dtype: torch.dtype) -> int:
    """Return how many bytes a pass with the smallest token budget needs in addition to the weights."""
    logits = _LEAST_TOKENS * getattr(config.get_text_config(), "vocab_size", 0)
    if device.type == "cpu":
        logits = min(logits, _LEAST_LOGITS)
    return int(_LEAST_TOKENS * _bytes_per_token(config, dtype) + _LOGIT_BYTES * logits)


def _bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    config = config.get_text_config()
    experts = getattr(config, "num_experts_per_tok", None) or 1
    intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if isinstance(intermediate, list | tuple):  # Gemma 3n has layers of different sizes
        intermediate = max(intermediate)
    return int(dtype.itemsize * (_HIDDEN_COPIES * config.hidden_size + _INTERMEDIATE_COPIES * experts * intermediate))


def free_bytes(device: torch.device) -> int:
    """Return how many bytes this process can still allocate on a device.

    For a CPU, this is the free memory of the machine or container, including the page cache. For a GPU, this includes memory
    that torch has reserved but does not use.
    """
    if device.type != "cuda":
        return free_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + int(cached)


def require_room(
    checkpoint: Checkpoint,
    config: Any,
    dtype: str,
    device: torch.device,
    parameters: int,
    *,
    alone: bool = False,
) -> None:
    """Raise OutOfMemoryError if a checkpoint does not fit on a device.

    Args:
        parameters: number of the model's parameters. This number can be smaller than the number of weights in the files,
            because transformers may not load all weights.
        alone: if True, compare the needed memory with the device's total memory, as if nothing else used the device; if False,
            with the memory that is free now.
    """
    weights, pass_bytes = needed_bytes(checkpoint, config, dtype, device, parameters)
    free = _total_bytes(device) if alone else free_bytes(device)
    if weights + pass_bytes <= free:
        return
    ways = []
    if not is_quantized(checkpoint) and _weights_dtype(dtype) == torch.float32:
        half = needed_bytes(checkpoint, config, "bfloat16", device, parameters)
        if sum(half) <= free:
            needs = f"the model then needs {_gib(sum(half))}"
            ways.append(f"--dtype bfloat16 ({needs}; the values are stored under a different reference id)")
    if device.type == "cuda" and not dtype.endswith("-autocast"):
        ways.append("splitting each layer across several GPUs with --engine vllm --tensor-parallel")
    if not alone and weights + pass_bytes <= _total_bytes(device):
        ways.append("ending the other processes that use this memory")
    raise OutOfMemoryError(
        f"{checkpoint.folder} does not fit in the memory of {device} in {dtype}: it needs {_gib(weights + pass_bytes)} "
        f"({_gib(weights)} for weights, {_gib(pass_bytes)} for a forward pass), but "
        f"{f'the device has only {_gib(free)}' if alone else f'only {_gib(free)} are free'}. "
        + (f"What works: {', or '.join(ways)}" if ways else "Use a machine with more memory")
    )


def needed_bytes(checkpoint: Checkpoint, config: Any, dtype: str, device: torch.device, parameters: int) -> tuple[int, int]:
    """Return (bytes of the weights on the device, additional bytes for a pass with the smallest token budget).

    The arguments are the same as for `require_room`.
    """
    target, text = _weights_dtype(dtype), config.get_text_config()
    weights = parameters * target.itemsize
    if is_quantized(checkpoint):
        weights = sum(tensor.nbytes for tensor in checkpoint.tensors().values())
    if checkpoint.adapter is not None:
        weights += checkpoint.adapter.weight_file.stat().st_size
    least = least_pass_bytes(config, device, target)
    if dtype != str(target).removeprefix("torch."):  # under autocast, the head keeps a 16-bit copy of the output embedding
        least += getattr(text, "vocab_size", 0) * getattr(text, "hidden_size", 0) * 2
    return weights, least


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Return True if the checkpoint's weights are quantized; such weights keep their dtypes when they are loaded."""
    return any("quantization_config" in part for part in (checkpoint.config, checkpoint.config.get("text_config") or {}))


def _weights_dtype(dtype: str) -> torch.dtype:
    return torch.float32 if dtype.endswith("-autocast") else getattr(torch, dtype)


def _total_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else total_memory()


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


#: Error messages of allocators and libraries that raise a plain RuntimeError when memory runs out.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


@contextmanager
def memory_errors(device: torch.device, doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # the frames' variables refer to the tensors that filled the memory
        first = first_line(error)
        raise OutOfMemoryError(f"{device} ran out of memory while {doing}: {first}") from error
