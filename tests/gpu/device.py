"""The device that the GPU tests run on: the first CUDA device, and none of them runs where there is none.

REFLOGP_GPU_TESTS_DEVICE=cpu runs them on a CPU, which says that the tests' own code is right and nothing of a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("REFLOGP_GPU_TESTS_DEVICE", "cuda:0")

#: What every module here has as its `pytestmark`.
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cpu" and not torch.cuda.is_available(), reason="no CUDA device"),
]
