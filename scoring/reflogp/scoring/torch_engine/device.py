"""Set a thread's current device, copy tensors asynchronously, and keep the number of OpenMP threads low.

On a CPU, torch is slower when a process has more OpenMP threads than cores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device this thread's current device while the `with` block runs; do nothing for a CPU.

    torch's tensor operations run on the device of their tensors. Events, `torch.cuda.current_stream()`, Triton kernels and
    extensions, however, use the thread's current device, which is GPU 0 by default.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """Upload 1-D int64 arrays in a single copy; return one tensor per array.

    Arrays for a CUDA device are first put into pinned memory, so that the host does not wait for the copy. With pageable
    memory, the host would wait for all earlier work in the stream.
    """
    host = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        host = host.pin_memory()
    return list(torch.split(host.to(device, non_blocking=True), [len(array) for array in arrays]))


class Mark:
    """A point in a device's current stream.

    A mark has passed when the device has finished all work that was launched in this stream before the mark was created. On a
    CPU, a mark has passed as soon as it is created.
    """

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
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Return the device time between `earlier` and this mark, in seconds. Both marks must have passed."""
        if self._event is None:
            return self._moment - earlier._moment
        return float(earlier._event.elapsed_time(self._event)) / 1000


def copy_to_host(values: torch.Tensor) -> tuple[torch.Tensor, Mark]:
    """Start copying a tensor to the host.

    Returns:
        A tensor on the host, and a mark in the device's stream after the copy. Do not read the tensor until the mark has
        passed. A tensor that is already on the CPU is returned without a copy.
    """
    host = values
    if values.device.type == "cuda":
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        with on_device(values.device):
            host.copy_(values, non_blocking=True)
    return host, Mark(values.device)


Result = TypeVar("Result")


def run_in_own_thread(function: Callable[[], Result]) -> Result:
    """Call a function in a new thread that exits after the call; return the function's result or raise its error.

    libgomp gives each thread that runs a parallel operation its own pool of worker threads, and keeps the pool until that
    thread exits. If all pools together have more threads than the process has cores, libgomp's threads sleep between operations
    instead of spinning (see GOMP_SPINCOUNT in libgomp's manual). Operations then take longer. For example, on two cores, a
    model that was loaded in one thread and run in another reached only 65% of its normal speed. Because the new thread exits,
    its pool cannot slow down later work. If the caller is interrupted, `function` keeps running in the new thread.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="reflogp-load", daemon=True).start()
    return outcome.result()
