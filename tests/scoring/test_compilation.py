"""What torch compiles: how often, for how many kinds of models in one process, and that nothing runs uncompiled unnoticed."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

from reflogp.scoring.torch_engine import Sequence, TorchEngine, attention, compilation, selfcheck
from reflogp.scoring.torch_engine.attention import PackLayout
from reflogp.scoring.torch_engine.load import in_memory
from tests.scoring.test_attention import by_formula, error, some_call, some_pack
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


@pytest.fixture
def few_versions(monkeypatch):
    monkeypatch.setattr(compilation, "MOST_VERSIONS", 2)
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


def qwen2(width: int):
    config = tf.Qwen2Config(
        vocab_size=160,
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return in_memory(tf.Qwen2ForCausalLM(config).to(torch.bfloat16))


@pytest.mark.slow
def test_ten_sizes_of_one_class_stay_compiled(layers):
    for number in range(10):
        before = layers.frame_count
        engine = TorchEngine(qwen2(64 + 16 * number), compile_layers=True)
        assert engine.self_check.compiled, engine.self_check.rejected
        assert layers.frame_count > before, f"size {number + 1} runs uncompiled"


def test_a_size_too_many_is_said_to_be_uncompiled(layers, few_versions):
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


#: heads, key heads, size, value size, dtype, soft cap, window, sinks, prompt
VARIANTS = [
    (heads, key_heads, size, size, dtype, cap, window, sinks, prompt)
    for heads, key_heads, size, dtype in ((4, 2, 16, torch.float32), (8, 8, 32, torch.bfloat16))
    for cap, window, sinks in ((None, None, False), (30.0, None, False), (None, 20, False))
    for prompt in (20, 150)
]


def test_flex_attention_stays_compiled_over_twelve_variants_in_a_process(monkeypatch):
    counter = CompileCounterWithBackend("eager")
    compiled = compilation.any_size(flex_attention, counter)
    monkeypatch.setattr(attention, "_compiled_flex", lambda device_type: compiled)
    assert len(VARIANTS) == 12
    for variant in VARIANTS:
        before = counter.frame_count
        assert flex_error(*variant) <= 2e-3
        assert counter.frame_count > before, f"{variant} runs unfused"


def test_a_flex_variant_too_many_is_refused_by_name(few_versions, monkeypatch):
    compiled = compilation.any_size(flex_attention, CompileCounterWithBackend("eager"))
    monkeypatch.setattr(attention, "_compiled_flex", lambda device_type: compiled)
    monkeypatch.setattr(attention, "choose_kernel", lambda call, refused: attention.flex)
    for variant in VARIANTS[:2]:
        flex_error(*variant)
    with pytest.raises(attention.KernelFailedError, match="flex: FailOnRecompileLimitHit"):
        flex_error(*VARIANTS[2], compute=through_a_layer)


def flex_error(heads, key_heads, size, value_size, dtype, cap, window, sinks, prompt, compute=attention.flex) -> float:
    pack = some_pack(1, prompt, (17, 5))
    call = some_call(pack, heads, key_heads, size, value_size, window)
    for side in ("query", "key", "value"):
        object.__setattr__(call, side, getattr(call, side).to(dtype))
    object.__setattr__(call, "softcap", cap)
    layout = PackLayout(pack, torch.device("cpu"))
    with torch.inference_mode():
        found = compute(layout, call)
    return 0.0 if cap else error(found, by_formula(pack, call))


def through_a_layer(layout, call):
    with attention.packed(layout):
        return attention.packed_attention(
            torch.nn.Module(), call.query, call.key, call.value, None, call.scale, call.window, call.softcap
        )[0]


@pytest.mark.parametrize(
    "name",
    [
        "Llama",
        "Qwen2",
        "Qwen3-MoE",
        "Mistral, sliding window 8",
        "Gemma 2 (soft caps, sliding window 8)",
        "Gemma 3 (sliding window 8)",
        "gpt-oss (sinks, sliding window 8)",
        "DeepSeek-V3 (latent attention)",
        "OLMo 2",
        "GPT-NeoX",
        "StableLM (partial rotary)",
        "Phi-3",
    ],
)
def test_no_mask_is_made_for_a_pack(name, monkeypatch):
    """transformers would ask the device whether the positions are those of a pack, and the host would wait for the answer."""
    from transformers import masking_utils

    from tools.families import build

    engine = TorchEngine(in_memory(build(name)), compile_layers=False)
    assert engine.self_check.path == "packed"
    calls = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: calls.append(positions))
    engine.score(some_pairs(6))
    assert not calls
