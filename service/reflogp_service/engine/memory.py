"""How many tokens fit one forward pass.

Knows devices' free memory and what a decoder holds per token. An estimate: when it is too high, the engine halves it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

#: Tokens beyond which a pass gains no speed: the matrix products are as large as they need to be.
_ENOUGH_TOKENS = {"cpu": 4_096, "cuda": 65_536}
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
    per_token = dtype.itemsize * (_HIDDEN_COPIES * config.hidden_size + _INTERMEDIATE_COPIES * experts * intermediate)
    fits = int(_SHARE * free_bytes(device) / per_token)
    return max(_LEAST_TOKENS, min(_ENOUGH_TOKENS[device.type], fits))


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
