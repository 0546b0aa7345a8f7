"""Every attention kernel on the device itself: against the formula, and in models of eight kinds against float32 forwards."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.scoring.torch_engine import Sequence, TorchEngine, attention
from reflogp.scoring.torch_engine.attention import PackLayout, installed_kernels, kernel_names
from reflogp.scoring.torch_engine.log_sum_exp import Logits
from tests.conftest import plain_token_logps
from tests.gpu.device import DEVICE, NEEDS_GPU
from tests.scoring.test_attention import SHAPES, by_formula, error, pack_with_images, some_call, some_pack
from tools.families import build
from tools.fidelity import rms, some_pairs

pytestmark = NEEDS_GPU

KERNELS = kernel_names(DEVICE.partition(":")[0])
#: Kernel -> what it cannot compute; by_branch takes its place there.
LIMITS = {
    "flash3_varlen": {"float32", "sinks"},
    "torch_varlen": {"float32", "sinks", "soft cap"},
    "flash_varlen": {"float32", "sinks"},
    "flex": set(),
    "cpu_blocks": {"float32", "sinks", "soft cap"},
    "by_branch": set(),
}

FAMILIES = {
    "grouped heads": "Llama",
    "window": "Mistral, sliding window 8",
    "soft cap": "Gemma 2 (soft caps, sliding window 8)",
    "sinks": "gpt-oss (sinks, sliding window 8)",
    "experts": "Qwen3-MoE",
    "tied head": "Llama (tied head, attention bias)",
    "latent attention": "DeepSeek-V3 (latent attention)",
    "partial rotary": "StableLM (partial rotary)",
}
#: Errors of two bfloat16 passes of one model differ by chance; a wrong key or position costs whole nats.
CHANCE = 1.25


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    """Each test compiles its own variants, so that none of them is one too many for torch."""
    torch._dynamo.reset()


def require(kernel: str) -> None:
    if kernel not in installed_kernels(torch.device(DEVICE).type):
        pytest.skip(f"{kernel} is not installed, or not for this device")


@pytest.mark.parametrize("lengths", [(1, 300, (500, 257, 1)), (12, 40, (9, 7)), (1, 1, (1,))], ids=["long", "short", "tiny"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "odd tile"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_agrees_with_the_formula(kernel, shape, window, lengths):
    require(kernel)
    pack = some_pack(*lengths)
    call = some_call(pack, *SHAPES[shape], window)
    there = {name: getattr(call, name).to(DEVICE) for name in ("query", "key", "value")}
    with torch.inference_mode():
        found = getattr(attention, kernel)(PackLayout(pack, torch.device(DEVICE)), dataclasses.replace(call, **there))
    assert found.shape == (1, len(pack), call.query.shape[1], call.value.shape[-1])
    assert error(found.cpu(), by_formula(pack, call)) <= 2e-3


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("kernel", ["flex", "by_branch"])
def test_image_tokens_that_attend_in_both_directions(kernel, window):
    require(kernel)
    pack = pack_with_images()
    call = dataclasses.replace(some_call(pack, *SHAPES["grouped"], window), both_ways=True)
    there = {name: getattr(call, name).to(DEVICE) for name in ("query", "key", "value")}
    with torch.inference_mode():
        layout = PackLayout(pack, torch.device(DEVICE), both_ways=True)
        found = getattr(attention, kernel)(layout, dataclasses.replace(call, **there))
    assert error(found.cpu(), by_formula(pack, call)) <= 2e-3


@functools.cache
def expected(family: str) -> tuple[list[Sequence], list[np.ndarray], float]:
    """(sequences, their values by float32 forwards on a CPU, RMS error of plain bfloat16 forwards on the device)."""
    sequences, model = some_pairs(24), build(family)
    exact = [np.array(plain_token_logps(model, s.prompt_ids, s.completion_ids)) for s in sequences]
    model = model.to(DEVICE, torch.bfloat16)
    plain = []
    for sequence in sequences:
        ids = torch.from_numpy(sequence.ids()).to(DEVICE)
        start = len(sequence.prompt_ids)
        with torch.no_grad():
            logps = torch.log_softmax(model(ids[None], use_cache=False).logits[0, start - 1 : -1].float(), -1)
        plain.append(logps.gather(1, ids[start:, None])[:, 0].cpu().numpy())
    return sequences, exact, rms(plain, exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("feature", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_family_agrees_with_float32_forwards(kernel, feature, dtype, tmp_path):
    require(kernel)
    sequences, exact, plain_error = expected(FAMILIES[feature])
    build(FAMILIES[feature]).save_pretrained(tmp_path)
    others = [name for name in KERNELS if name != kernel]
    engine = TorchEngine(str(tmp_path), dtype, DEVICE, refused_kernels=others)
    check = engine.self_check
    assert check.path == "packed", check.rejected
    assert check.kernels == (["by_branch"] if {feature, dtype} & LIMITS[kernel] else [kernel]), check.rejected
    found = engine.score(sequences)
    if dtype == "float32":
        assert max(np.abs(ours - right).max() for ours, right in zip(found, exact, strict=True)) <= 1e-3
        assert rms(found, exact) <= 1e-4
    else:
        assert rms(found, exact) <= plain_error * CHANCE


@pytest.mark.parametrize("feature", ["grouped heads", "window", "latent attention"])
def test_compiled_layers_agree_with_float32_forwards(feature, tmp_path):
    sequences, exact, plain_error = expected(FAMILIES[feature])
    build(FAMILIES[feature]).save_pretrained(tmp_path)
    engine = TorchEngine(str(tmp_path), "bfloat16", DEVICE, compile_layers=True)
    assert engine.self_check.compiled, engine.self_check.rejected
    assert rms(engine.score(sequences), exact) <= plain_error * CHANCE


@pytest.mark.skipif(DEVICE == "cpu", reason="the kernel is for CUDA")
@pytest.mark.parametrize("logits", [Logits(), Logits(0.3), Logits(1.0, 30.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [151_936, 32_003])
def test_the_log_sum_exp_agrees_with_float64(columns, dtype, logits):
    from reflogp.scoring.torch_engine.triton_log_sum_exp import reduce

    product = (torch.randn(300, columns, device=DEVICE) * 20).to(dtype)
    targets = torch.randint(columns, (300,), device=DEVICE)
    sums, found = reduce(product, logits, 1 / 0.7, targets)
    exact = logits(product.double()) / 0.7
    assert float((sums - torch.logsumexp(exact, 1)).abs().max()) <= 1e-4
    assert float((found - exact.gather(1, targets[:, None])[:, 0]).abs().max()) <= 1e-4


def test_the_chosen_kernel_is_the_fastest_that_is_installed(tmp_path):
    build("Llama").save_pretrained(tmp_path)
    check = TorchEngine(str(tmp_path), "bfloat16", DEVICE).self_check
    assert check.kernels == installed_kernels(torch.device(DEVICE).type)[:1], check.rejected
    assert not check.rejected.keys() - {"cpu_blocks"}  # which not every CPU can run
    assert check.log_sum_exp == ("eager" if DEVICE == "cpu" else "triton")


def test_a_padded_model_agrees_with_float32_forwards(tmp_path):
    """What cannot be packed takes the padded path, on the device as well."""
    build("Bloom (ALiBi)").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    sequences = some_pairs(8)
    exact = [np.array(plain_token_logps(model, s.prompt_ids, s.completion_ids)) for s in sequences]
    with pytest.warns(UserWarning, match="padded path"):
        engine = TorchEngine(str(tmp_path), "float32", DEVICE)
    assert rms(engine.score(sequences), exact) <= 1e-4
