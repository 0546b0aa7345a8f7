"""Configure torch's CUDA allocator to use segments that grow, instead of many segments too small for a larger tensor.

torch reads the setting when a process first uses a GPU, so it must be set before. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Environment variables with the allocator's settings; all of torch's backends read the first.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_GROWING = "expandable_segments:True"


def growing_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to an environment so that segments grow; empty if the user has configured the allocator."""
    return {} if any(name in environment for name in _VARIABLES) else {_VARIABLES[0]: _GROWING}


def without_growing_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the additions of `growing_segments`: vLLM's shared memory does not work with them."""
    return {name: value for name, value in environment.items() if (name, value) != (_VARIABLES[0], _GROWING)}
