"""Estimate how many tokens fit one forward pass.

The estimate may be too high: the engine halves the budget when memory runs out.
"""

from __future__ import annotations

from typing import Any

import torch

from reflogp.scoring.machine.available_memory import free_memory

#: A pass with more tokens than this is not faster: the matrix products are large enough. On a CPU the number is per core,
#: because activations of a longer pass do not fit the cores' caches (two cores, 100M and 500M parameters: 2,048 tokens are a
#: tenth faster than 4,096).
_ENOUGH_TOKENS_CUDA, _ENOUGH_TOKENS_CORE, _MOST_TOKENS_CPU = 65_536, 1_024, 16_384
_LEAST_TOKENS = 512
#: Share of the free memory that activations may take; the rest is for the head's chunks, kernels and fragmentation.
_SHARE = 0.5
#: Upper estimate of the copies of hidden-size and intermediate-size activations that a layer holds at once.
_HIDDEN_COPIES, _INTERMEDIATE_COPIES = 12, 3


#: Most logits that the smallest pass on a CPU holds at once, and bytes of each logit (the model's dtype and float32).
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
    if isinstance(intermediate, list | tuple):  # Gemma 3n's layers differ
        intermediate = max(intermediate)
    return int(dtype.itemsize * (_HIDDEN_COPIES * config.hidden_size + _INTERMEDIATE_COPIES * experts * intermediate))


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process may still take from a CUDA device, or from the machine's or container's memory.

    CUDA memory that torch has reserved and does not use counts as free; so does the machine's page cache.
    """
    if device.type != "cuda":
        return free_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + int(cached)
