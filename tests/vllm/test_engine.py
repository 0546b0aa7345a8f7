"""The vLLM engine gives a plain float32 forward's values, whatever its prefix cache holds and whenever it ends."""

import numpy as np
import pytest
import torch

from reflogp.scoring.errors import EngineError, InvalidSequencesError
from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.scoring.vllm_engine import engine as vllm_engine
from tests.conftest import plain_token_logps
from tests.scoring.test_adapters import save_adapter
from tests.vllm.conftest import load

pytestmark = pytest.mark.vllm


def differences(values, sequences, model):
    """Largest difference from a plain forward, nats per token, of each sequence."""
    expected = (plain_token_logps(model, s.prompt_ids, s.completion_ids) for s in sequences)
    return np.array([np.abs(ours - plain).max() for ours, plain in zip(values, expected, strict=True)])


def test_values_of_300_pairs_are_a_plain_forwards(engine, pairs, plain_model):
    assert len(pairs) == 600
    assert differences(engine.score(pairs), pairs, plain_model).max() <= 1e-5
    assert engine.provenance()["engine"] == "vllm"
    assert engine.provenance()["prefix_cache"] is True
    assert engine.retries == 0, "the guard foresees every hit that would cost a value"


def test_without_the_cache_and_with_larger_blocks(model, pairs, plain_model):
    some = pairs[:120]
    for option in ({"enable_prefix_caching": False}, {"block_size": 64}):
        other = load(model, vllm_options=option)
        try:
            assert differences(other.score(some), some, plain_model).max() <= 1e-5
            assert other.provenance()["prefix_cache"] is option.get("enable_prefix_caching", True)
            assert other.provenance()["block_size"] == option.get("block_size", 32)
        finally:
            other.close()


def pairs_at_block_borders(count, vocabulary, block):
    """Pairs whose completions have their first tokens in common, prompts about a multiple of the block long; some twice."""
    random = np.random.default_rng(7)
    made = []
    for _ in range(count):
        prompt = random.integers(0, vocabulary, block * random.integers(1, 3) + random.integers(-4, 5))
        shared = random.integers(0, vocabulary, random.integers(0, 2 * block))
        sides = [np.concatenate([shared, random.integers(0, vocabulary, random.integers(1, 9))]) for _ in range(2)]
        made += [Sequence(prompt, side) for side in sides]
        if random.random() < 0.1:
            made.append(made[-1])
    return made


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
def test_no_value_is_garbage_where_hits_reach_into_completions(engine, model, guarded, monkeypatch):
    """Unguarded, every request reads the cache: what then comes back wrong is noticed and asked for again."""
    if not guarded:
        monkeypatch.setattr(vllm_engine, "may_read_cache", lambda ordered, block: [True] * len(ordered))
    sequences = pairs_at_block_borders(1000 if guarded else 200, engine.vocab_size, 32)
    before = engine.retries
    values = engine.score(sequences)
    expected = TorchEngine(model, "float32", compile_layers=False).score(sequences)
    assert max(np.abs(a - b).max() for a, b in zip(values, expected, strict=True)) <= 1e-4
    assert (engine.retries == before) if guarded else (engine.retries > before + 100)


def test_what_cannot_be_scored_is_named(engine):
    good = Sequence([5, 6, 7], [8, 9])
    bad = [
        Sequence([5], [engine.vocab_size]),
        Sequence([], [5]),
        Sequence([5], []),
        Sequence([5] * 2047, [5]),
        Sequence([5, 6], [7], [0, 1, 1]),
    ]
    with pytest.raises(InvalidSequencesError) as caught:
        engine.score([good, *bad])
    words = ["outside the model's vocabulary", "prompt is empty", "completion is empty", "at most 2047", "padded batch"]
    assert all(word in caught.value.problems[at + 1] for at, word in enumerate(words))
    assert len(caught.value.results[0]) == 2
    with pytest.raises(EngineError, match="temperature"):
        next(engine.passes([good], temperature=0.7))


def test_a_float32_head_is_what_bfloat16_is_compared_in(model, pairs, plain_model):
    """Errors of bfloat16 are rounding's, and no larger than the torch engine's own by more than a third."""
    some = pairs[:80]
    plain = [plain_token_logps(plain_model, s.prompt_ids, s.completion_ids) for s in some]

    def error(values):
        return float(np.sqrt(np.mean(np.concatenate([(a - b) ** 2 for a, b in zip(values, plain, strict=True)]))))

    other = load(model, "bfloat16")
    try:
        ours = error(TorchEngine(model, "bfloat16", compile_layers=False).score(some))
        assert 1e-4 < error(other.score(some)) <= 1.33 * ours
    finally:
        other.close()


def test_an_adapter_is_scored_as_peft_runs_it(model, pairs, plain_model, tmp_path):
    expected = save_adapter(model, tmp_path, target_modules=["q_proj", "v_proj", "down_proj"])
    other, some = load(tmp_path), pairs[:60]
    try:
        values = other.score(some)
    finally:
        other.close()
    assert differences(values, some, expected).max() <= 1e-4
    assert differences(values, some, plain_model).min() > 1e-2, "the adapter does something"


def test_an_adapter_that_vllm_applies_wrongly_is_refused(model, tmp_path):
    save_adapter(model, tmp_path, target_modules=["lm_head", "q_proj"])
    with pytest.raises(EngineError, match=r"lm_head.*, and vLLM would apply these changes incorrectly"):
        load(tmp_path)


def test_what_stops_vllm_at_the_start_is_said(model):
    with pytest.raises(EngineError, match="vLLM cannot load the model"):
        load(model, vllm_options={"max_num_batched_tokens": -5})


def test_the_most_probable_tokens_are_a_plain_forwards(model, pairs, plain_model):
    k, some = 30, pairs[:40]  # vLLM's own limit is 20
    other = load(model, top_k=k)
    try:
        found = other.score(some)
    finally:
        other.close()
    for sequence, values in zip(some, found, strict=True):
        ids = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]])
        with torch.inference_mode():
            whole = torch.log_softmax(plain_model(ids).logits[0, len(sequence.prompt_ids) - 1 : -1], 1)
        assert np.abs(values.logps - torch.topk(whole, k).values.numpy()).max() <= 1e-4
        assert np.abs(values.logps - whole.gather(1, torch.from_numpy(values.ids).long()).numpy()).max() <= 1e-4
        targets = whole.gather(1, torch.as_tensor(sequence.completion_ids)[:, None])[:, 0].numpy()
        assert np.abs(values.token_logps - targets).max() <= 1e-4
