"""The engine on the device itself: neighbours, budgets, and memory that runs out."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest
import torch

from reflogp.scoring.errors import InvalidSequencesError
from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.scoring.torch_engine import engine as torch_engine
from tests.gpu.device import DEVICE, NEEDS_GPU
from tools.families import build
from tools.fidelity import some_pairs, spread_among_neighbours

pytestmark = NEEDS_GPU

#: Bytes beyond the loaded model that may be allocated while memory is scarce; and the pack that a CPU pretends to be too large.
SCARCE_BYTES, SCARCE_TOKENS = 128 << 20, 10_000


@contextlib.contextmanager
def scarce_memory(monkeypatch):
    """Let the allocator refuse what goes beyond SCARCE_BYTES. A CPU refuses packs of more than SCARCE_TOKENS instead."""
    gc.collect()
    if DEVICE == "cpu":
        real = torch_engine.forward_pack

        def refusing(model, head, pack, *arguments):
            if len(pack) > SCARCE_TOKENS:
                raise torch.OutOfMemoryError("pretended")
            return real(model, head, pack, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(torch_engine, "forward_pack", refusing)
            yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(DEVICE) + SCARCE_BYTES) / total, DEVICE)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def save_with_many_positions(folder):
    model = build("Llama")
    model.config.max_position_embeddings = 2_000_000
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "dtype", "spread"),
    [
        ("Llama", "float32", 1e-4),
        ("Qwen3-MoE", "float32", 1e-4),
        ("Gemma 2 (soft caps, sliding window 8)", "float32", 1e-4),
        ("DeepSeek-V3 (latent attention)", "float32", 1e-4),
        ("Llama", "bfloat16", 0.1),
        ("Gemma 2 (soft caps, sliding window 8)", "bfloat16", 0.1),
    ],
)
def test_a_value_does_not_depend_on_its_neighbours(name, dtype, spread, tmp_path):
    build(name).save_pretrained(tmp_path)
    assert spread_among_neighbours(TorchEngine(str(tmp_path), dtype, DEVICE, token_budget=600)) <= spread


def test_a_value_does_not_depend_on_the_token_budget(tmp_path):
    build("Llama").save_pretrained(tmp_path)
    sequences = some_pairs(20)
    results = [TorchEngine(str(tmp_path), "float32", DEVICE, budget).score(sequences) for budget in (1, 200, 100_000)]
    for values in zip(*results, strict=True):
        assert float(np.ptp(np.stack(values), axis=0).max()) <= 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_running_out_of_memory_halves_the_budget_and_loses_nothing(dtype, tmp_path, monkeypatch):
    save_with_many_positions(tmp_path)
    sequences = [Sequence([3 + i % 150] * 700, [3 + (i + 1) % 150] * 700) for i in range(150)]
    expected = TorchEngine(str(tmp_path), dtype, DEVICE, token_budget=1500).score(sequences)
    engine = TorchEngine(str(tmp_path), dtype, DEVICE, token_budget=10_000_000)
    kernels = engine.self_check.kernels
    with scarce_memory(monkeypatch):
        results = engine.score(sequences)
    assert 1 <= engine.token_budget < 150 * 1400
    assert engine.self_check.kernels == kernels and not engine.self_check.refused_kernels
    largest = max(np.abs(ours - right).max() for ours, right in zip(results, expected, strict=True))
    assert largest <= (1e-4 if dtype == "float32" else 0.1)


def test_a_sequence_that_fits_no_memory_is_named_and_the_others_are_scored(tmp_path, monkeypatch):
    save_with_many_positions(tmp_path)
    engine = TorchEngine(str(tmp_path), "bfloat16", DEVICE, token_budget=4096)
    short = some_pairs(4)
    expected = engine.score(short)
    with scarce_memory(monkeypatch), pytest.raises(InvalidSequencesError) as caught:
        engine.score([*short[:3], Sequence([3] * 10, [4] * 400_000), *short[3:]])
    assert list(caught.value.problems) == [3] and "does not fit" in caught.value.problems[3]
    found = [values for index, values in enumerate(caught.value.results) if index != 3]
    for ours, right in zip(found, expected, strict=True):
        assert np.abs(ours - right).max() <= 0.1
