"""Engines on a device that is not the thread's current one, where events and kernels would follow the current one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from reflogp.scoring.torch_engine import TorchEngine
from reflogp.scoring.torch_engine.device import copy_to_host
from tests.gpu.device import DEVICE, NEEDS_GPU
from tools.families import build
from tools.fidelity import some_pairs

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(DEVICE != "cpu" and torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

DEVICES = ("cpu", "cpu") if DEVICE == "cpu" else ("cuda:0", "cuda:1")
#: Clock cycles that a device is kept busy before the values are written: about half a second.
BUSY_CYCLES = 1_000_000_000


def test_a_copy_waits_for_the_device_that_has_the_values():
    """The event is recorded on that device's stream: on the current device's, which is idle, it would be over at once."""
    values = torch.zeros(1 << 20, device=DEVICES[1])
    if DEVICE != "cpu":
        stale = torch.full((1 << 20,), float("nan"), pin_memory=True)  # the block that the copy will be given
        del stale
        torch.cuda.synchronize(DEVICES[1])
        assert torch.cuda.current_device() == 0
        with torch.cuda.device(DEVICES[1]):
            torch.cuda._sleep(BUSY_CYCLES)
    values.fill_(7.0)
    host, copied = copy_to_host(values)
    copied.wait()
    assert torch.equal(host, torch.full((1 << 20,), 7.0))
    assert DEVICE == "cpu" or torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_engines_of_two_devices_give_the_same_values(dtype, tmp_path):
    """One pass a call, the case in which nothing else waits for the device; both at once, from threads of this process."""
    build("Llama").save_pretrained(tmp_path)
    engines = [TorchEngine(str(tmp_path), dtype, device) for device in DEVICES]
    calls = [some_pairs(2, seed=seed) for seed in range(30)]
    with ThreadPoolExecutor(len(engines)) as threads:
        found = list(threads.map(lambda engine: [engine.score(sequences) for sequences in calls], engines))
    limit = 1e-4 if dtype == "float32" else 0.1
    for first, second in zip(*found, strict=True):
        for ours, other in zip(first, second, strict=True):
            assert np.abs(ours - other).max() <= limit
