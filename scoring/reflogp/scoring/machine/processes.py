"""Prepare processes that load a model, and say why a process ended. Does not import torch.

torch's CUDA allocator is configured to use segments that grow, instead of many segments too small for a larger tensor. torch
reads the setting when a process first uses a GPU, so it must be set before. Progress bars and notices of the model libraries
stay out of a worker's log.
"""

from __future__ import annotations

import os
import signal
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


def quiet_libraries() -> None:
    """Make transformers log only errors and show no progress bars."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def exit_reason(status: int, log: str) -> str:
    """Return in words why a process ended.

    Args:
        status: exit status; negative for a signal.
        log: name of the log that has the process's output.
    """
    if status < 0:
        name = signal.Signals(-status).name if -status in {int(s) for s in signal.Signals} else str(-status)
        return f"killed by {name}" + (" (out of memory, perhaps)" if -status == signal.SIGKILL else "")
    return f"it ended with status {status}; its last messages are in {log}"
