"""Turn the out-of-memory errors of torch, Triton and CUDA's libraries into OutOfMemoryError."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from reflogp.scoring.errors import OutOfMemoryError

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
        doing: words that follow "while" in the message, such as "the model was tried".
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # variables of the frames hold the tensors that filled the memory
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OutOfMemoryError(f"the memory of {device} ran out while {doing}: {first}") from error
