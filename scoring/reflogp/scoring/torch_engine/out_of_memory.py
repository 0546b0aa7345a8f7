"""Memory that runs out, in however many ways torch, Triton and CUDA's libraries say so, as one error of reflogp."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from reflogp.scoring.errors import OutOfMemoryError

#: How allocators and libraries say that memory ran out, where they raise a plain RuntimeError.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, Triton or a CUDA library says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


@contextmanager
def memory_errors(device: torch.device, doing: str) -> Iterator[None]:
    """Raise OutOfMemoryError where the block runs out of memory. Other errors pass.

    Args:
        device: that is in use.
        doing: what the block does, as "while …" goes on.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # their variables hold what filled the memory
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OutOfMemoryError(f"the memory of {device} ran out while {doing}: {first}") from error
