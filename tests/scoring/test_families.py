"""Fidelity for every family, and independence of a value from its neighbours. The numbers are docs/fidelity.md's."""

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.scoring.torch_engine.load import in_memory
from reflogp.scoring.torch_engine.sequences import problem_of
from tests.conftest import plain_token_logps
from tools.families import FAMILIES, VOCAB, build
from tools.fidelity import measure, some_pairs, spread_among_neighbours
from tools.tiny_models import tiny_model

#: Two bfloat16 passes of one model round differently, so their errors against float32 differ by chance. Five percent is
#: several times what other seeds show.
CHANCE = 1.05


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_agrees_with_plain_forwards(name):
    found = measure(name)
    assert found.float32_max <= 1e-4
    if found.trl_bfloat16 is not None:
        assert found.bfloat16_rms <= found.trl_bfloat16 * CHANCE


@pytest.mark.parametrize(
    "name", ["Qwen3-Next (linear attention)", "Mamba", "Falcon-H1 (attention and Mamba 2)", "Bloom (ALiBi)"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_cannot_be_packed_is_scored_padded_and_says_so(name, dtype, tmp_path):
    build(name).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="padded path, which is slower"):
        engine = TorchEngine(str(tmp_path), dtype)
    assert engine.self_check.path == "padded"
    assert engine.provenance()["self_check"]["rejected"]["packed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "spread"),
    [
        ("Llama", "float32", 1e-5),
        ("Qwen3-MoE", "float32", 1e-5),
        ("Gemma 2 (soft caps, sliding window 8)", "float32", 1e-5),
        ("Llama", "bfloat16", 0.1),
    ],
)
def test_a_value_does_not_depend_on_its_neighbours(name, dtype, spread, tmp_path):
    build(name).save_pretrained(tmp_path)
    assert spread_among_neighbours(TorchEngine(str(tmp_path), dtype, token_budget=600)) <= spread


def test_rotary_embeddings_that_depend_on_the_longest_sequence_do_not_leak(tmp_path):
    """Phi-3's long rope changes every rotation of a pass once one sequence in it is longer than the original context."""
    torch.manual_seed(0)
    factors = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
    config = transformers.Phi3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=40,
        rope_parameters=factors | {"original_max_position_embeddings": 40},
        initializer_range=0.3,
        pad_token_id=0,
    )
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    sequences = some_pairs(16)
    assert {len(s) > 40 for s in sequences} == {True, False}
    engine = TorchEngine(str(tmp_path), "float32")
    assert engine.self_check.path == "packed"
    for values, sequence in zip(engine.score(sequences), sequences, strict=True):
        assert np.abs(values - plain_token_logps(model, sequence.prompt_ids, sequence.completion_ids)).max() <= 1e-4


def test_heads_may_differ_in_size_by_layer(tmp_path):
    """Gemma 4 has wider heads in its layers of full attention; its config refuses to name one size for all layers."""
    built = tiny_model("gemma4_text", AutoModelForCausalLM)
    assert len({layer.self_attn.head_dim for layer in built.model.layers}) == 2
    built.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    sequences = some_pairs(8)
    engine = TorchEngine(str(tmp_path), "float32")
    assert engine.self_check.path == "packed"
    for values, sequence in zip(engine.score(sequences), sequences, strict=True):
        assert np.abs(values - plain_token_logps(model, sequence.prompt_ids, sequence.completion_ids)).max() <= 1e-4


def test_dynamic_rotary_embeddings_of_a_long_sequence_do_not_stay(tmp_path):
    """A sequence as long as the original context, at which transformers itself does not reset the embeddings, has its own."""
    original = 32
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    config = build("Llama").config
    config.rope_parameters, config.max_position_embeddings = rope, original
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    random = np.random.default_rng(0)
    sequences = [
        Sequence(random.integers(1, VOCAB, length - 8).tolist(), random.integers(1, VOCAB, 8).tolist())
        for length in (48, original, 20, 64, original + 1, original - 1, original, 40)
    ]
    engine = TorchEngine(str(tmp_path), "float32")
    together = engine.score(sequences)
    in_turn = [engine.score([sequence])[0] for sequence in sequences]
    for sequence, *found in zip(sequences, together, in_turn, strict=True):
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
        expected = plain_token_logps(fresh, sequence.prompt_ids, sequence.completion_ids)
        assert max(np.abs(values - expected).max() for values in found) <= 1e-4, len(sequence)


TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
OTHER_SHAPES = {
    "a backbone of another name": transformers.Llama4TextConfig(
        **TINY, head_dim=8, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=32, attention_chunk_size=64
    ),
    "YaRN": transformers.Qwen2Config(
        **TINY,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10_000.0,
        },
    ),
}


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_shapes_that_public_reports_name(name, tmp_path):
    """Longer than `max_position_embeddings` too, which is no limit to rotary embeddings."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(OTHER_SHAPES[name]).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32").eval()
    random = np.random.default_rng(0)
    sequences = [Sequence(random.integers(1, VOCAB, size).tolist(), random.integers(1, VOCAB, 8).tolist()) for size in (90, 20)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = TorchEngine(str(tmp_path), "float32")
    for values, sequence in zip(engine.score(sequences), sequences, strict=True):
        assert np.abs(values - plain_token_logps(model, sequence.prompt_ids, sequence.completion_ids)).max() <= 1e-4


def test_a_vision_model_whose_text_model_has_another_attention(tmp_path):
    torch.manual_seed(0)
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    text = transformers.Gemma2Config(**TINY, head_dim=8)
    config = transformers.PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=VOCAB - 1, projection_dim=32
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype="float32").eval()
    assert model.config._attn_implementation != model.config.text_config._attn_implementation
    sequence = Sequence([5, 6, 7, 8], [9, 10, 11])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [values] = TorchEngine(str(tmp_path), "float32").score([sequence])
    assert np.abs(values - plain_token_logps(model, sequence.prompt_ids, sequence.completion_ids)).max() <= 1e-4


def test_a_model_that_is_causal_with_eager_attention_only_is_scored_with_it(tmp_path):
    """Without padding and images, SDPA lets PaliGemma's tokens attend to later ones, so also to those that they predict."""
    tiny_model("paligemma", AutoModelForImageTextToText).save_pretrained(tmp_path)
    sequences = some_pairs(4)
    with pytest.warns(UserWarning, match="padded path"):
        engine = TorchEngine(str(tmp_path), "float32")
    causal, leaky = (
        AutoModelForImageTextToText.from_pretrained(tmp_path, dtype="float32", attn_implementation=name)
        for name in ("eager", "sdpa")
    )
    for values, sequence in zip(engine.score(sequences), sequences, strict=True):
        ids = sequence.prompt_ids, sequence.completion_ids
        assert np.abs(values - plain_token_logps(causal, *ids)).max() <= 1e-4
        assert np.abs(values - plain_token_logps(leaky, *ids)).max() > 0.1, "transformers has mended it: drop the fallback"


def test_a_model_that_attends_to_later_tokens_is_refused(tmp_path):
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=VOCAB, **tiny, initializer_range=0.3)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="BertLMHeadModel is not a causal language model: the log-probs of tokens change by"):
        TorchEngine(str(tmp_path), "float32")


def test_an_encoder_decoder_model_is_refused(tmp_path):
    """Its decoder alone would be loaded as a causal language model."""
    tiny = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=VOCAB, **tiny)).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="bart is an encoder-decoder model"):
        TorchEngine(str(tmp_path), "float32")


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=1, n_head=2), 32),
        (
            transformers.OPTConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                ffn_dim=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=32,
                word_embed_proj_dim=32,
            ),
            32,
        ),
        (transformers.GPTJConfig(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=1, n_head=2, rotary_dim=8), 32),
        (transformers.LlamaConfig(**TINY), None),
        (transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2), None),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_only_a_table_of_positions_limits_the_length(config, limit):
    model = AutoModelForCausalLM.from_config(config)
    long = torch.zeros(1, 33, dtype=torch.long)
    with nullcontext() if limit is None else pytest.raises((IndexError, RuntimeError)):
        model(input_ids=long)
    loaded = in_memory(model)
    assert loaded.max_positions == limit
    if limit is not None:
        problem = problem_of(Sequence([1], [2] * limit), loaded.vocab_size, loaded.max_positions)
        assert "the model has 32 positions" in problem and "max_length" in problem


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_padded_batch_are_what_the_model_makes_of_them(name, tmp_path):
    """Padding on both sides, its positions and its own values included; sequences without padding in the same call."""
    build(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32").eval()
    alone = some_pairs(2)
    rows, width, kept = [], 48, 20
    for sequence in some_pairs(6, seed=5):
        prompt, completion = sequence.prompt_ids[: width - kept], sequence.completion_ids[:kept]
        left, right = width - kept - len(prompt), kept - len(completion)
        mask = [0] * left + [1] * (len(prompt) + len(completion)) + [0] * right
        rows.append(Sequence([0] * left + list(prompt), list(completion) + [0] * right, mask))
    ids = torch.tensor(np.stack([row.ids() for row in rows]))
    mask = torch.tensor([row.attention_mask for row in rows])
    assert 0 < int(mask[:, 0].sum()) + int(mask[:, -1].sum()) < 2 * len(rows), "padding on the left and on the right"
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, width - kept - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(2, ids[:, width - kept :, None])[..., 0].numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = TorchEngine(str(tmp_path), "float32")
    values = engine.score([rows[0], *alone, *rows[1:]])
    assert np.abs(np.stack([values[0], *values[5:]]) - expected).max() <= 1e-4
    for ours, sequence in zip(values[1:5], alone, strict=True):
        assert np.abs(ours - plain_token_logps(model, sequence.prompt_ids, sequence.completion_ids)).max() <= 1e-4


@pytest.mark.parametrize("name", ["Llama", "Gemma 2 (soft caps, sliding window 8)", "Mamba"])
def test_temperature_divides_the_logits(name, tmp_path):
    build(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    sequences = some_pairs(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = TorchEngine(str(tmp_path), "float32")
    for values, sequence in zip(engine.score(sequences, temperature=0.7), sequences, strict=True):
        plain = plain_token_logps(model, sequence.prompt_ids, sequence.completion_ids, temperature=0.7)
        assert np.abs(values - plain).max() <= 1e-4


def test_a_float32_head_is_closer_to_float32(tmp_path):
    build("Llama").save_pretrained(tmp_path)
    sequences = some_pairs()
    half, mixed = (TorchEngine(str(tmp_path), "bfloat16", lm_head_dtype=dtype) for dtype in (None, "float32"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    exact = [np.array(plain_token_logps(model, s.prompt_ids, s.completion_ids)) for s in sequences]

    def rms(engine):
        return np.sqrt(np.mean(np.concatenate([a - b for a, b in zip(engine.score(sequences), exact, strict=True)]) ** 2))

    assert rms(mixed) <= rms(half)


@pytest.mark.slow
def test_compiled_layers_agree(tmp_path):
    """What large models get by default: the layers between the products run through torch.compile."""
    build("Qwen2").save_pretrained(tmp_path)
    sequences = some_pairs(8)
    compiled, eager = (TorchEngine(str(tmp_path), "float32", compile_layers=flag) for flag in (True, False))
    assert compiled.self_check.compiled
    assert not eager.self_check.compiled
    for a, b in zip(compiled.score(sequences), eager.score(sequences), strict=True):
        assert np.abs(a - b).max() <= 1e-4
