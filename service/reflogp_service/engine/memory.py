"""How many tokens fit one forward pass.

Knows devices' free memory and what a decoder holds per token. An estimate: when it is too high, the engine halves it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

#: Tokens beyond which a pass gains no speed: the matrix products are as large as they need to be. On a CPU each core adds some,
#: as it adds cache: more than that, and activations leave it (two cores, 100M and 500M parameters: 2,048 tokens are a tenth
#: faster than 4,096).
_ENOUGH_TOKENS_CUDA, _ENOUGH_TOKENS_CORE, _MOST_TOKENS_CPU = 65_536, 1_024, 16_384
_LEAST_TOKENS = 512
#: Share of the free memory that activations may take; the head's chunks, kernels and fragments take the rest.
_SHARE = 0.5
#: Copies of hidden-size and intermediate-size activations alive at once in a layer, generously counted.
_HIDDEN_COPIES, _INTERMEDIATE_COPIES = 12, 3


def auto_token_budget(model: Any, device: torch.device, dtype: torch.dtype) -> int:
    """A token budget from the memory that is free now."""
    config = model.config.get_text_config()
    experts = getattr(config, "num_experts_per_tok", None) or 1
    intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if isinstance(intermediate, list | tuple):  # Gemma 3n's layers differ
        intermediate = max(intermediate)
    per_token = dtype.itemsize * (_HIDDEN_COPIES * config.hidden_size + _INTERMEDIATE_COPIES * experts * intermediate)
    fits = int(_SHARE * free_bytes(device) / per_token)
    enough = _ENOUGH_TOKENS_CUDA
    if device.type == "cpu":
        enough = min(_MOST_TOKENS_CPU, _ENOUGH_TOKENS_CORE * torch.get_num_threads())
    return max(_LEAST_TOKENS, min(enough, fits))


def free_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device, or of this machine as Linux counts it (8 GiB where it cannot be read)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 << 30
