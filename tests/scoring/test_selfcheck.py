"""The self-check against what it must find: each defect is hidden from short packs, or from all but one path."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers as tf

from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine import Sequence, TorchEngine, attention, selfcheck
from reflogp.scoring.torch_engine import head as head_module
from reflogp.scoring.torch_engine.load import in_memory
from tests.conftest import largest_error, plain_token_logps
from tests.scoring.test_engine import GQA
from tools.families import VOCAB, build
from tools.fidelity import rms, some_pairs

SIZES = {**GQA, "vocab_size": VOCAB, "max_position_embeddings": 4096}


def llama(cls=tf.LlamaForCausalLM):
    torch.manual_seed(0)
    return cls(tf.LlamaConfig(**SIZES)).eval()


def mistral(window: int):
    torch.manual_seed(0)
    return tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=window)).eval()


def checked(model) -> selfcheck.SelfCheck:
    return TorchEngine(in_memory(model), compile_layers=False).self_check


def forgets_early_keys(layout, call):
    return attention.by_branch(layout, call if len(layout._pack) <= 600 else dataclasses.replace(call, window=600))


def wrong_in_one_block(layout, call):
    return attention.by_branch(layout, call) * (1.0 if len(layout._pack) > 128 else 0.9)


def ignores_the_window(layout, call):
    return attention.by_branch(layout, dataclasses.replace(call, window=None))


def raises(layout, call):
    raise RuntimeError("illegal instruction")


@pytest.mark.parametrize(
    ("kernel", "make", "why"),
    [
        (lambda layout, call: attention.by_branch(layout, call), llama, None),
        (forgets_early_keys, llama, "those of an ordinary forward pass"),
        (wrong_in_one_block, llama, "those of an ordinary forward pass"),
        (ignores_the_window, lambda: mistral(300), "those of an ordinary forward pass"),
        (ignores_the_window, lambda: mistral(900), "those of an ordinary forward pass"),
        (raises, llama, "RuntimeError: illegal instruction"),
    ],
)
def test_a_kernel_that_is_wrong_or_fails_is_named_and_the_next_one_is_taken(kernel, make, why, monkeypatch):
    monkeypatch.setattr(attention, "_CPU_KERNELS", (attention._Kernel(kernel, lambda: True, lambda call: None),))
    check, name = checked(make()), kernel.__name__
    assert check.path == "packed" and check.kernels == [name if why is None else "by_branch"]
    assert check.refused_kernels == (() if why is None else (name,))
    assert why is None or why in check.rejected[name]


class OtherInputs(tf.LlamaForCausalLM):
    """Its own forward reads other tokens than its backbone alone does, so that only its own forward is right."""

    def forward(self, input_ids=None, **keywords):
        return super().forward(input_ids=(input_ids + 1) % VOCAB, **keywords)


def test_the_last_fallback_is_the_models_own_forward():
    model = llama(OtherInputs)
    sequences = some_pairs(8)
    with pytest.warns(UserWarning, match="single path"):
        engine = TorchEngine(in_memory(model), compile_layers=False)
    assert engine.self_check.path == "single" and {"packed", "padded"} <= set(engine.self_check.rejected)
    assert largest_error(engine.score(sequences), model, sequences) <= 1e-4


HEADS = {
    "a soft cap of another name": lambda: tf.RecurrentGemmaForCausalLM(
        tf.RecurrentGemmaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, lru_width=32, attention_window_size=32, pad_token_id=0,
        )
    ),
    "a scale near one": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**SIZES, logits_scaling=1.015)),
    "a scale nearer to one": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**SIZES, logits_scaling=1.002)),
    "a soft cap": lambda: build("Gemma 2 (soft caps, sliding window 8)"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*path, which is slower")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HEADS)
def test_large_logits_are_the_models_own(name, dtype):
    """Trained models have large final norms: a cap or a scale that makes no difference to small logits does so to theirs."""
    torch.manual_seed(0)
    model = HEADS[name]().eval()
    for parameter, weight in model.named_parameters():
        if parameter.endswith("norm.weight") and "layers" not in parameter:
            weight.data += 20.0
    sequences = some_pairs(4)
    model = model.to(dtype)
    plain = [np.array(plain_token_logps(model, s.prompt_ids, s.completion_ids)) for s in sequences]
    found = TorchEngine(in_memory(model), compile_layers=False).score(sequences)
    size = rms(plain, [0 * values for values in plain])
    assert rms(found, plain) <= size * (1e-5 if dtype == torch.float32 else 1e-2)


def test_a_log_sum_exp_that_differs_is_not_used(monkeypatch):
    def too_high(*arguments):
        sums, targets = selfcheck.eager(*arguments)
        return sums + 0.01, targets

    monkeypatch.setattr(selfcheck, "_log_sum_exps", lambda device, compile_layers: [("too high", lambda: too_high)])
    check = checked(llama())
    assert check.log_sum_exp == "eager" and "differ" in check.rejected["log_sum_exp too high"]


def test_products_that_differ_from_the_models_own_logits_are_not_used(monkeypatch):
    monkeypatch.setattr(head_module, "_agree", lambda *arguments: True)  # the formula is taken unseen
    model = tf.GraniteForCausalLM(tf.GraniteConfig(**SIZES, logits_scaling=4.0))
    engine = TorchEngine(in_memory(model), compile_layers=False)
    assert "head" in engine.self_check.rejected and engine._head.logits is None


def test_a_float32_head_of_a_model_whose_logits_only_its_own_code_computes_is_refused(monkeypatch):
    monkeypatch.setattr(head_module.Head, "_find_logits", lambda self: None)
    with pytest.raises(EngineError, match="only the model's own code computes its logits, in bfloat16"):
        TorchEngine(in_memory(llama().to(torch.bfloat16)), lm_head_dtype="float32", compile_layers=False)


def test_a_model_that_cannot_read_the_long_prompt_is_checked_on_the_short_pack(monkeypatch):
    """Its real limit may stand in no field of the config."""

    class Short(tf.LlamaForCausalLM):
        def forward(self, input_ids=None, **keywords):
            if input_ids.shape[1] > 512:
                raise IndexError("index out of range in self")
            return super().forward(input_ids=input_ids, **keywords)

    assert checked(llama(Short)).path == "packed"


def test_a_quantized_head_is_left_to_the_model():
    model = llama()
    head = torch.nn.Linear(64, VOCAB, bias=False)
    weight = head.weight.data.clone()
    head.weight = torch.nn.Parameter((weight * 1000).to(torch.int8), requires_grad=False)
    head.forward = lambda states: states @ (head.weight.to(states.dtype) / 1000).T
    model.lm_head = head
    sequences = some_pairs(4)
    with pytest.warns(UserWarning, match="single path"):
        engine = TorchEngine(in_memory(model), compile_layers=False)
    assert largest_error(engine.score(sequences), model, sequences) <= 1e-4


def test_padded_batches_that_are_wrong_are_not_used_for_sequences_with_a_mask(monkeypatch):
    """A model that is packed still needs them there; its own forward cannot compute a float32 head."""
    real = selfcheck.forward_padded
    monkeypatch.setattr(selfcheck, "forward_padded", lambda *arguments: real(*arguments) - 1.0)
    engine = TorchEngine(in_memory(llama().to(torch.bfloat16)), lm_head_dtype="float32", compile_layers=False)
    assert engine.self_check.path == "packed" and "padded" in engine.self_check.rejected
    [plain] = engine.score([Sequence([5] * 9, [7, 8])])
    assert np.isfinite(plain).all()
    with pytest.raises(EngineError, match="only the model's own code computes its logits"):
        engine.score([Sequence([5] * 9, [7, 8], attention_mask=[1] * 11)])
