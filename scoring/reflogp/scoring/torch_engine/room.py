"""Check from the headers of a checkpoint's files whether the model fits a device, before any weight is read."""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import Any

import torch

from reflogp.scoring.errors import OutOfMemoryError
from reflogp.scoring.machine.available_memory import total_memory
from reflogp.scoring.torch_engine.memory import free_bytes, least_pass_bytes
from reflogp.store.checkpoint import Checkpoint

#: Copies of one projection of a layer's experts that exist while transformers joins the experts' matrices into one tensor: gate
#: and up, each stacked, then both in one tensor.
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
        alone: compare with all of the device's memory, as if nothing else used it, and not with what is free now.

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
            ways.append(f"--dtype bfloat16 (it needs {_gib(sum(half))}; its values are another reference's)")
    if device.type == "cuda" and (way := _spread(checkpoint, config, dtype, device, free, parameters)):
        ways.append(way)
    if not alone and weights + pass_bytes <= _total_bytes(device):
        ways.append("end what else uses this memory")
    raise OutOfMemoryError(
        f"{checkpoint.folder} does not fit the memory of {device} in {dtype}: it needs {_gib(weights + pass_bytes)} "
        f"({_gib(weights)} of weights, {_gib(pass_bytes)} for a pass), and "
        f"{_gib(free)} {'is all it has' if alone else 'are free'}. "
        + (f"What works: {', or '.join(ways)}" if ways else "Take a machine with more memory")
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
                + (f" --dtype {plain} (its values are another reference's)" if plain != dtype else "")
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
