"""One device and its stream: the current device while a pass runs, and copies off it that an event can be waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make a CUDA device the current one of this thread while the block runs; do nothing for a CPU.

    torch's tensor operations follow their tensors, but events, `torch.cuda.current_stream()`, Triton kernels and extensions
    follow the thread's current device, which is GPU 0 until somebody sets it.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


def copy_to_host(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Begin to copy a tensor to the host.

    Returns:
        (the host's tensor, an event or None). Where there is an event, the tensor may be read only after
        `event.synchronize()`: it is recorded behind the copy, on the stream of the device that holds the values.
    """
    if values.device.type != "cuda":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    with on_device(values.device):
        host.copy_(values, non_blocking=True)
        copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(values.device))
    return host, copied
