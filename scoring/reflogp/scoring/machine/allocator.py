"""torch's allocator on CUDA devices: segments that grow, instead of many that no larger tensor fits.

torch reads the setting when a process first uses a GPU, so it is made before torch is imported. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Where torch looks for the allocator's settings; the first is the name that all its backends read.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_GROWING = "expandable_segments:True"


def growing_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment so that segments grow; nothing where the user has set the allocator."""
    return {} if any(name in environment for name in _VARIABLES) else {_VARIABLES[0]: _GROWING}


def without_growing_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what `growing_segments` adds: vLLM shares memory between processes as such segments cannot."""
    return {name: value for name, value in environment.items() if (name, value) != (_VARIABLES[0], _GROWING)}
