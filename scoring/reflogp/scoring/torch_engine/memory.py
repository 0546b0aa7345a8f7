"""Plan a model's use of device memory, and recognise errors that say that memory ran out.

Before any weight is read, the headers of a checkpoint's files show whether the model fits the device. The number of tokens
that fit one forward pass is estimated; the estimate may be too high, so the engine halves the budget when memory runs out. The
out-of-memory errors of torch, Triton and CUDA's libraries become OutOfMemoryError.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from reflogp.scoring.errors import OutOfMemoryError
from reflogp.scoring.machine import free_memory, total_memory
from reflogp.store.checkpoint import Checkpoint
from reflogp.store.texts import first_line

#: Number of tokens above which a longer pass is not faster, because the matrix products are large enough. On a CPU this number
#: is per core, because activations of a longer pass do not fit the cores' caches (two cores, 100M and 500M parameters: 2,048
#: tokens are a tenth faster than 4,096).
_ENOUGH_TOKENS_CUDA, _ENOUGH_TOKENS_CORE, _MOST_TOKENS_CPU = 65_536, 1_024, 16_384
_LEAST_TOKENS = 512
#: Share of the free memory that activations may take; the rest is for the head's chunks, kernels and fragmentation.
_SHARE = 0.5
#: Upper estimate of the copies of hidden-size and intermediate-size activations that a layer holds at once.
_HIDDEN_COPIES, _INTERMEDIATE_COPIES = 12, 3


#: Maximum number of logits that the smallest pass on a CPU holds at once, and bytes of each logit (the model's dtype and
#: float32).
_LEAST_LOGITS, _LOGIT_BYTES = 1 << 25, 8


def auto_token_budget(model: Any, device: torch.device, dtype: torch.dtype) -> int:
    """Return a token budget for the memory that is free now."""
    fits = int(_SHARE * free_bytes(device) / _bytes_per_token(model.config, dtype))
    enough = _ENOUGH_TOKENS_CUDA
    if device.type == "cpu":
        enough = min(_MOST_TOKENS_CPU, _ENOUGH_TOKENS_CORE * torch.get_num_threads())
    return max(_LEAST_TOKENS, min(enough, fits))


def least_pass_bytes(config: Any, device: torch.device, dtype: torch.dtype) -> int:
    """Return the bytes that a pass with the smallest budget needs in addition to the weights.

    Args:
        config: transformers' config of the model.
        device: device of the model.
        dtype: dtype of the weights.
    """
    logits = _LEAST_TOKENS * getattr(config.get_text_config(), "vocab_size", 0)
    if device.type == "cpu":
        logits = min(logits, _LEAST_LOGITS)
    return int(_LEAST_TOKENS * _bytes_per_token(config, dtype) + _LOGIT_BYTES * logits)


def _bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    config = config.get_text_config()
    experts = getattr(config, "num_experts_per_tok", None) or 1
    intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if isinstance(intermediate, list | tuple):  # the layers of Gemma 3n have different sizes
        intermediate = max(intermediate)
    return int(dtype.itemsize * (_HIDDEN_COPIES * config.hidden_size + _INTERMEDIATE_COPIES * experts * intermediate))


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process may still take from a CUDA device, or from the machine's or container's memory.

    CUDA memory that torch has reserved and does not use, and the machine's page cache, count as free.
    """
    if device.type != "cuda":
        return free_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + int(cached)


#: Peak memory while transformers joins the matrices of a layer's experts into one tensor, in units of one projection of all
#: experts: gate and up, each stacked (2), and both in one tensor (2).
_JOINING_COPIES = 4
#: vLLM takes this share of each GPU by default (gpu_memory_utilization).
_VLLM_SHARE = 0.9
_MOST_GPUS = 64
_EXPERT = re.compile(r"\.experts\.\d+\.")


def require_room(
    checkpoint: Checkpoint,
    config: Any,
    dtype: str,
    device: torch.device,
    parameters: int | None = None,
    *,
    alone: bool = False,
) -> None:
    """Raise OutOfMemoryError if a checkpoint does not fit a device.

    Args:
        checkpoint: checkpoint whose headers are read.
        config: transformers' config of the checkpoint.
        dtype: dtype that the model computes in, a name of `reference.Dtype`.
        device: device of the model.
        parameters: number of parameters of the model, or None if unknown; files may hold more than is loaded.
        alone: compare with all of the device's memory, as if nothing else used it, and not with the memory that is free now.

    The message says how much memory is needed and free, and which command would work, if any.
    """
    weights, pass_bytes = needed_bytes(checkpoint, config, dtype, device, parameters)
    free = _total_bytes(device) if alone else free_bytes(device)
    if weights + pass_bytes <= free:
        return
    ways = []
    if not is_quantized(checkpoint) and _weights_dtype(dtype) == torch.float32:
        half = needed_bytes(checkpoint, config, "bfloat16", device, parameters)
        if sum(half) <= free:
            ways.append(f"--dtype bfloat16 (it needs {_gib(sum(half))}; its values belong to another reference)")
    if device.type == "cuda" and (way := _spread(checkpoint, config, dtype, device, free, parameters)):
        ways.append(way)
    if not alone and weights + pass_bytes <= _total_bytes(device):
        ways.append("end the other processes that use this memory")
    raise OutOfMemoryError(
        f"{checkpoint.folder} does not fit the memory of {device} in {dtype}: it needs {_gib(weights + pass_bytes)} "
        f"({_gib(weights)} of weights, {_gib(pass_bytes)} for a pass), and "
        f"{_gib(free)} {'is all it has' if alone else 'are free'}. "
        + (f"What works: {', or '.join(ways)}" if ways else "Use a machine with more memory")
    )


def needed_bytes(
    checkpoint: Checkpoint, config: Any, dtype: str, device: torch.device, parameters: int | None = None
) -> tuple[int, int]:
    """Return (bytes of the weights on the device, bytes that loading or the smallest pass needs in addition).

    The arguments are those of `require_room`.
    """
    target = _weights_dtype(dtype)
    text = config.get_text_config()
    kept = is_quantized(checkpoint)
    sizes = {
        name: prod(tensor.shape) * target.itemsize if tensor.is_float and not kept else tensor.nbytes
        for name, tensor in checkpoint.tensors().items()
    }
    weights = sum(sizes.values())
    vocabulary, hidden = getattr(text, "vocab_size", 0), getattr(text, "hidden_size", 0)
    tables = [name for name, tensor in checkpoint.tensors().items() if tensor.shape == (vocabulary, hidden)]
    if getattr(text, "tie_word_embeddings", False) and len(tables) == 2:  # files may hold a tied embedding twice
        weights -= sizes[tables[0]]
    if parameters is not None and not kept:
        weights = min(weights, parameters * target.itemsize)
    if checkpoint.adapter is not None:
        weights += checkpoint.adapter.weight_file.stat().st_size
    experts: Counter[str] = Counter()
    for name, size in sizes.items():
        if _EXPERT.search(name):
            experts[_EXPERT.sub(".experts.", name)] += size
    joining = _JOINING_COPIES * max(experts.values(), default=0)
    least = least_pass_bytes(config, device, target)
    if dtype != str(target).removeprefix("torch."):  # under autocast the head keeps a 16-bit copy of the output embedding
        least += vocabulary * hidden * 2
    return weights, max(joining, least)


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Return True if the files hold quantized weights, which keep their own dtypes."""
    return any("quantization_config" in part for part in (checkpoint.config, checkpoint.config.get("text_config") or {}))


def _spread(
    checkpoint: Checkpoint, config: Any, dtype: str, device: torch.device, free: int, parameters: int | None
) -> str | None:
    """Return the options that spread the model over the fewest GPUs like this one; None if no supported number is enough."""
    plain = dtype.removesuffix("-autocast")
    weights, pass_bytes = needed_bytes(checkpoint, config, plain, device, parameters)
    heads = getattr(config.get_text_config(), "num_attention_heads", None) or 1
    count = 2
    while count <= _MOST_GPUS and heads % count == 0:
        if weights / count + pass_bytes <= _VLLM_SHARE * free:
            there = torch.cuda.device_count()
            wanting = "" if there >= count else f" on a machine with {count} such GPUs (here: {there})"
            return (
                "--engine vllm --tensor-parallel "
                + str(count)
                + (f" --dtype {plain} (its values belong to another reference)" if plain != dtype else "")
                + wanting
            )
        count *= 2
    return None


def _weights_dtype(dtype: str) -> torch.dtype:
    return torch.float32 if dtype.endswith("-autocast") else getattr(torch, dtype)


def _total_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else total_memory()


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


#: Messages of allocators and libraries that raise a plain RuntimeError when memory runs out.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error of torch, Triton or a CUDA library means that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


@contextmanager
def memory_errors(device: torch.device, doing: str) -> Iterator[None]:
    """Raise OutOfMemoryError if the block runs out of memory. Other errors pass unchanged.

    Args:
        device: the device that the block uses.
        doing: words that follow "while" in the message, such as "the self-check ran".
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # variables of the frames hold the tensors that filled the memory
        first = first_line(error)
        raise OutOfMemoryError(f"the memory of {device} ran out while {doing}: {first}") from error
