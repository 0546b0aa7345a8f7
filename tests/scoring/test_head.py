"""The output layer in float32, and the log-sum-exp by each implementation, beside float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reflogp.scoring.torch_engine import head as head_module
from reflogp.scoring.torch_engine import log_sum_exp
from reflogp.scoring.torch_engine.head import Head
from reflogp.scoring.torch_engine.log_sum_exp import Logits, eager
from tests.conftest import REPOSITORY
from tools.families import VOCAB, build

#: Rows that predict, more than one chunk of them.
COUNT = 300
TEMPERATURE = 0.7
#: What a family does to the products of its head.
FAMILIES = {
    "Llama": lambda product: product,
    "Phi (partial rotary, biased head)": lambda product: product,
    "Gemma 2 (soft caps, sliding window 8)": lambda product: 5.0 * torch.tanh(product / 5.0),
    "Cohere (logit scale)": lambda product: 0.3 * product,
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("states", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_float32_head_is_exact_to_float32(name, states, device, monkeypatch):
    """In chunks of rows and blocks of columns; states of float32, as Mamba's are, stand above a narrower weight."""
    monkeypatch.setattr(head_module, "_CPU_BLOCK", (64, 48))
    monkeypatch.setattr(head_module, "_WHOLE_LOGITS", {"cpu": 1 << 25, "cuda": 200 * VOCAB})
    model = build(name).to(device, torch.bfloat16 if states == torch.float32 else states)
    weight, bias = model.get_output_embeddings().weight, model.get_output_embeddings().bias
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(COUNT + 50, weight.shape[1], generator=random).to(device, states)
    at = torch.randperm(COUNT + 50, generator=random)[:COUNT].to(device)
    targets = torch.randint(VOCAB, (COUNT,), generator=random).to(device)
    with torch.inference_mode():
        values = Head(model, float32=True).logps(rows, at, targets, TEMPERATURE)
    logits = FAMILIES[name](rows[at].double() @ weight.double().T + (0 if bias is None else bias.double()))
    right = torch.log_softmax(logits / TEMPERATURE, 1).gather(1, targets[:, None])[:, 0]
    assert values.dtype == torch.float32
    assert (values - right).abs().max() <= 2e-6 * right.abs().max()


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMS = [Logits(), Logits(0.3), Logits(1.0, 30.0), Logits(2.0, 5.0)]


def largest_error(reduce, dtypes=DTYPES, forms=FORMS) -> float:
    """In nats, relative to the largest logit where this is above 1."""
    random = torch.Generator().manual_seed(0)
    errors = []
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
                    errors.append(error / max(1.0, float(exact.abs().max())))
    return max(errors)


def test_without_compilation():
    assert largest_error(eager) <= 1e-6


@pytest.mark.slow
def test_compiled():
    assert largest_error(log_sum_exp.compiled(), [torch.bfloat16], [Logits(), Logits(1.0, 30.0)]) <= 1e-6


needs_triton = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="Triton is not built for this machine"
)
INTERPRETED = """
import json
from reflogp.scoring.torch_engine.triton_log_sum_exp import reduce
from tests.scoring.test_head import largest_error
print(json.dumps(largest_error(reduce)))
"""


@needs_triton
def test_the_triton_kernel_in_tritons_interpreter():
    """Triton decides when it is imported whether kernels are compiled or interpreted, so it runs in a process of its own."""
    command, environment = [sys.executable, "-c", INTERPRETED], {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) <= 5e-6  # of a cap of 30, times the rounding of a sigmoid


@needs_triton
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
