"""The log-sum-exp and the target's logit, by each implementation, beside float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reflogp.scoring.torch_engine import log_sum_exp
from reflogp.scoring.torch_engine.log_sum_exp import Logits, eager
from tests.conftest import REPOSITORY

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMS = [Logits(), Logits(0.3), Logits(1.0, 30.0), Logits(2.0, 5.0)]


def largest_errors(reduce, dtypes=DTYPES, forms=FORMS) -> dict[str, float]:
    """Largest error of each case, in nats, relative to the largest logit where this is above 1."""
    random = torch.Generator().manual_seed(0)
    errors = {}
    for columns in (1, 7, 4096, 5000, 9001):
        for dtype in dtypes:
            for size in (1.0, 100.0):
                product = (torch.randn(5, columns, generator=random) * size).to(dtype)
                targets = torch.randint(columns, (5,), generator=random)
                for logits in forms:
                    exact = logits(product.double()) / 0.7
                    expected = torch.logsumexp(exact, 1), exact.gather(1, targets[:, None])[:, 0]
                    found = reduce(product, logits, 1 / 0.7, targets)
                    assert all(part.dtype == torch.float32 and part.shape == (5,) for part in found)
                    error = max(float((ours - right).abs().max()) for ours, right in zip(found, expected, strict=True))
                    errors[f"{columns} {dtype} {size} {logits}"] = error / max(1.0, float(exact.abs().max()))
    return errors


def test_without_compilation():
    assert max(largest_errors(eager).values()) <= 1e-6


@pytest.mark.slow
def test_compiled():
    errors = largest_errors(log_sum_exp.compiled(), [torch.bfloat16], [Logits(), Logits(1.0, 30.0)])
    assert max(errors.values()) <= 1e-6


def test_compiled_code_for_cuda_reads_short_products_in_one_kernel(monkeypatch):
    """Inductor chooses split reductions for the short product that it sees first, and keeps them."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: seen.append(options) or function)
    log_sum_exp.compiled.__wrapped__()
    assert seen == [{"dynamic": True, "options": {"split_reductions": False}}]


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="Triton is not built for this machine")
def test_the_triton_kernel_in_tritons_interpreter():
    """Triton decides when it is imported whether kernels are compiled or interpreted, so it runs in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.scoring.interpreted_kernel"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(found["errors"].values()) <= 5e-6  # of a cap of 30, times the rounding of a sigmoid
    once = found["logits"] + 2 * found["rows"]  # each row also reads its target's number and its target's logit
    assert found["read"] == once


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="Triton is not built for this machine")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("has_cap", [False, True])
def test_the_triton_kernel_compiles_for_an_h100_and_fits_in_registers(dtype, has_cap, tmp_path):
    """No GPU is needed to compile. The interpreter accepts kernels that the compiler does not."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from reflogp.scoring.torch_engine import triton_log_sum_exp

    pointers = {"product": f"*{dtype}", "targets": "*i64", "sums": "*fp32", "found": "*fp32"}
    numbers = {"columns": "i32", "form_scale": "fp32", "softcap": "fp32", "scale": "fp32"}
    constants = {"HAS_CAP": has_cap, "COLUMNS": triton_log_sum_exp.COLUMNS}
    signature = pointers | numbers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(triton_log_sum_exp.kernel, signature, constants)
    options = {"num_warps": triton_log_sum_exp.WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    assert "STACK:0" in usage and "LOCAL:0" in usage, usage
