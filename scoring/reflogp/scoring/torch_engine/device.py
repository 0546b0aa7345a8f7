"""One device and its stream: the current device while a pass runs, uploads that nobody waits for, and copies off it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
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


def to_device(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """Some int64 arrays of one dimension on a device, uploaded as one. The host goes on while a CUDA device copies.

    A copy from pageable memory would make the host wait for everything that the stream has to do before it.
    """
    host = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        host = host.pin_memory()
    return list(torch.split(host.to(device, non_blocking=True), [len(array) for array in arrays]))


class Mark:
    """A moment of a device's stream: now, behind everything that the host has given it. On a CPU that is simply now."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._moment = time.monotonic()
        if device.type == "cuda":
            with on_device(device):
                self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                self._event.record(torch.cuda.current_stream(device))

    def has_passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Return when it has passed."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds of the device between two marks that have passed."""
        if self._event is None:
            return self._moment - earlier._moment
        return float(earlier._event.elapsed_time(self._event)) / 1000


def copy_to_host(values: torch.Tensor) -> tuple[torch.Tensor, Mark]:
    """Begin to copy a tensor to the host.

    Returns:
        (the host's tensor, the mark behind the copy, on the stream of the device that holds the values). The tensor may be read
        only when the mark has passed.
    """
    host = values
    if values.device.type == "cuda":
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        with on_device(values.device):
            host.copy_(values, non_blocking=True)
    return host, Mark(values.device)
