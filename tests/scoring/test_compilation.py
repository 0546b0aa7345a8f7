"""What torch compiles: how often, for how many kinds of models in one process, and that nothing runs uncompiled unnoticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers as tf
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

from reflogp.scoring.torch_engine import Sequence, TorchEngine, attention, compilation, selfcheck
from reflogp.scoring.torch_engine.attention import PackLayout
from reflogp.scoring.torch_engine.load import in_memory
from tests.scoring.test_attention import by_formula, error, some_call, some_pack
from tests.scoring.test_engine import GQA
from tools.families import VOCAB
from tools.fidelity import some_pairs


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def layers(monkeypatch) -> CompileCounterWithBackend:
    """Counts the graphs of compiled layers; the backend runs them as they are, so that no C++ compiler takes its time."""
    counter = CompileCounterWithBackend("eager")

    def compile_layers(model):
        for layer in compilation.decoder_layers(model):
            layer.compile(dynamic=True, backend=counter)

    monkeypatch.setattr(compilation, "compile_layers", compile_layers)
    monkeypatch.setattr(selfcheck, "compiled_log_sum_exp", lambda: selfcheck.eager)
    return counter


def qwen2(width: int):
    config = tf.Qwen2Config(**{**GQA, "vocab_size": VOCAB, "hidden_size": width, "max_position_embeddings": 4096})
    return in_memory(tf.Qwen2ForCausalLM(config).to(torch.bfloat16))


@torch._dynamo.config.patch(recompile_limit=2)
def test_a_size_too_many_is_said_to_be_uncompiled(layers, monkeypatch):
    monkeypatch.setattr(compilation, "MOST_VERSIONS", 2)
    for number in range(4):
        before = layers.frame_count
        with pytest.warns(UserWarning, match="runs without compiled layers") if number >= 2 else pytest.MonkeyPatch.context():
            engine = TorchEngine(qwen2(64 + 16 * number), compile_layers=True)
        assert engine.self_check.compiled == (number < 2) == (layers.frame_count > before)
        assert ("recompile" in engine.self_check.rejected.get("compiled", "")) == (number >= 2)


def test_nothing_is_compiled_after_the_model_is_loaded(layers):
    engine = TorchEngine(qwen2(64), compile_layers=True, token_budget=700)
    loaded = layers.frame_count
    engine.score(some_pairs(20))
    engine.score(some_pairs(20), temperature=0.7)
    engine.score([Sequence([5] * 9, [7])])  # a request in one block, with a single predicted token
    assert layers.frame_count == loaded


#: heads, key heads, size, dtype, soft cap, window
VARIANTS = [
    (*heads, cap, window)
    for heads in ((4, 2, 16, torch.float32), (8, 8, 32, torch.bfloat16), (4, 1, 64, torch.bfloat16))
    for cap, window in ((None, None), (30.0, None), (None, 20))
]


def test_flex_attention_is_compiled_at_most_twice_for_each_variant_whatever_the_packs(monkeypatch):
    """A graph for each pack would take seconds each and, after eight, fall back to whole score matrices."""
    counter, random = CompileCounterWithBackend("eager"), np.random.default_rng(0)
    compiled = compilation.any_size(flex_attention, counter)
    monkeypatch.setattr(attention, "_compiled_flex", lambda device_type: compiled)
    for variant in VARIANTS:
        *shape, dtype, cap, window = variant
        before = counter.frame_count
        for _ in range(5):
            lengths = random.integers(1, [4, 150, 60, 60]).tolist()
            pack = some_pack(*lengths[:2], tuple(lengths[2:]))
            call = some_call(pack, *shape, shape[-1], window)
            sides = {side: getattr(call, side).to(dtype) for side in ("query", "key", "value")}
            call = dataclasses.replace(call, **sides, softcap=cap)
            with torch.inference_mode():
                found = attention.flex(PackLayout(pack, torch.device("cpu")), call)
            assert cap or error(found, by_formula(pack, call)) <= 2e-3
        assert before < counter.frame_count <= before + 2, f"{variant} runs unfused, or is compiled too often"
