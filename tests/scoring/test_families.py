"""Fidelity for every family, and independence of a value from its neighbours. The numbers are docs/fidelity.md's."""

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.scoring.torch_engine.load import in_memory
from tests.conftest import largest_error, plain_token_logps
from tests.scoring.test_engine import GQA
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


@pytest.mark.parametrize(("name", "dtype"), [("Mamba", "float32"), ("Bloom (ALiBi)", "bfloat16")])
def test_a_model_that_cannot_be_packed_is_scored_padded_and_says_so(name, dtype, tmp_path):
    build(name).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="padded path, which is slower"):
        engine = TorchEngine(str(tmp_path), dtype)
    assert engine.self_check.path == "padded"
    assert engine.provenance()["self_check"]["rejected"]["packed"]


@pytest.mark.parametrize(
    ("name", "dtype", "spread"),
    [
        ("Llama", "float32", 1e-5),
        pytest.param("Qwen3-MoE", "float32", 1e-5, marks=pytest.mark.slow),
        pytest.param("Gemma 2 (soft caps, sliding window 8)", "float32", 1e-5, marks=pytest.mark.slow),
        pytest.param("Llama", "bfloat16", 0.1, marks=pytest.mark.slow),
    ],
)
def test_a_value_does_not_depend_on_its_neighbours(name, dtype, spread, tmp_path):
    build(name).save_pretrained(tmp_path)
    assert spread_among_neighbours(TorchEngine(str(tmp_path), dtype, token_budget=600)) <= spread


TINY = {**GQA, "vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.3}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SIGHT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
CONFIGS = {
    # Phi-3's long rope changes every rotation of a pass once one sequence in it is longer than the original context.
    "long rope": lambda: transformers.Phi3Config(
        **TINY,
        original_max_position_embeddings=40,
        rope_parameters={**LONG_ROPE, "original_max_position_embeddings": 40},
        eos_token_id=2,
    ),
    "YaRN": lambda: transformers.Qwen2Config(**TINY, rope_parameters=YARN),
    "text model with another attention": lambda: transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(intermediate_size=32, **SIGHT),
        text_config=transformers.Gemma2Config(**TINY, head_dim=16),
        image_token_index=VOCAB - 1,
        projection_dim=64,
    ),
}


@pytest.mark.filterwarnings("ignore:.*padded path")
@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_public_reports_name(name, tmp_path):
    """Sequences above and below the original context and `max_position_embeddings`, which is no limit to rotary embeddings."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path, dtype="float32", attn_implementation="eager").eval()
    sequences = some_pairs(16)
    assert {len(s) > 40 for s in sequences} == {len(s) > 64 for s in sequences} == {True, False}
    assert largest_error(TorchEngine(str(tmp_path), "float32").score(sequences), model, sequences) <= 1e-4


@pytest.mark.parametrize(("name", "limit"), [("GPT-2", 256), ("OPT", 256), ("gptj", 256), ("Llama", None), ("Bloom", None)])
def test_only_a_table_of_positions_limits_the_length(name, limit):
    family = next((family for family in FAMILIES if family.startswith(name)), None)
    model = build(family) if family else tiny_model(name, AutoModelForCausalLM)
    long = torch.zeros(1, 257, dtype=torch.long)
    with nullcontext() if limit is None else pytest.raises((IndexError, RuntimeError)):
        model(input_ids=long)
    engine = TorchEngine(in_memory(model), compile_layers=False)
    problems = engine.problems([Sequence([1], [2] * 256)])
    assert bool(problems) == (limit is not None)
    assert all("the model has 256 positions" in text and "max_length" in text for text in problems.values())


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
    assert largest_error(values[1:5], model, alone) <= 1e-4
