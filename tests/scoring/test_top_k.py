"""The most probable tokens of each position, beside plain forwards and torch.topk."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.scoring.torch_engine import head as head_module
from reflogp.scoring.torch_engine.head import RunningTop, in_order, top_of
from reflogp.scoring.torch_engine.load import in_memory
from reflogp.scoring.torch_engine.sequences import token_logps_of
from tools.families import FAMILIES, VOCAB, build

K = 16


def sequences(seed=0) -> list[Sequence]:
    """Pairs that share prompts and the beginnings of completions."""
    random = np.random.default_rng(seed)
    ids = lambda count: random.integers(3, VOCAB, count).tolist()  # noqa: E731
    prompts, shared = [ids(count) for count in (1, 5, 19)], ids(3)
    return [Sequence(prompt, shared + ids(4)) for prompt in prompts for _ in range(2)]


@torch.inference_mode()
def plain(model, sequence) -> torch.Tensor:
    """Log-probs of the whole vocabulary at each completion position, by an ordinary forward."""
    whole = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]])
    logits = model(input_ids=whole, use_cache=False).logits[0, len(sequence.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits.float(), 1)


def engine_of(model, k=K) -> TorchEngine:
    return TorchEngine(in_memory(deepcopy(model)), top_k=k)  # the engine changes its model's attention


def largest_error(engine, model) -> float:
    """Return the largest difference of a log-prob from a plain forward's; ids may differ only where these are tied."""
    errors = []
    for sequence, values in zip(sequences(), engine.score(sequences()), strict=True):
        whole = plain(model, sequence)
        best = torch.topk(whole, K).values.numpy()
        assert values.logps.shape == values.ids.shape == (len(sequence.completion_ids), K)
        assert (np.diff(values.logps, axis=1) <= 0).all()
        of_ids = whole.gather(1, torch.from_numpy(values.ids).long()).numpy()
        targets = whole.gather(1, torch.tensor(sequence.completion_ids)[:, None])[:, 0].numpy()
        errors += [np.abs(values.logps - of_ids).max(), np.abs(best - of_ids).max(), np.abs(values.token_logps - targets).max()]
        assert all(len(set(row)) == K for row in values.ids.tolist())
    return max(errors)


@pytest.mark.parametrize("block", [4096, 48])
@pytest.mark.parametrize("name", FAMILIES)
def test_float32_is_a_plain_forwards(name, block, monkeypatch, recwarn):
    monkeypatch.setattr(head_module, "_CPU_BLOCK", (64, block))
    model = build(name).float()
    assert largest_error(engine_of(model), model) <= 1e-4


@pytest.mark.parametrize("name", ["Llama", "Gemma 2 (soft caps, sliding window 8)", "Phi (partial rotary, biased head)"])
def test_bfloat16_is_as_near_to_float32_as_a_plain_bfloat16_forward(name, monkeypatch):
    monkeypatch.setattr(head_module, "_CPU_BLOCK", (64, 48))
    narrow = build(name).bfloat16()
    engine = engine_of(narrow)
    wide = deepcopy(narrow).float()
    ours, theirs = [], []
    for sequence, values in zip(sequences(), engine.score(sequences()), strict=True):
        right = torch.topk(plain(wide, sequence), K).values.numpy()
        theirs.append(torch.topk(plain(narrow, sequence), K).values.numpy() - right)
        ours.append(values.logps - right)
    assert np.sqrt(np.mean(np.concatenate(ours) ** 2)) <= np.sqrt(np.mean(np.concatenate(theirs) ** 2))


@pytest.mark.parametrize("path", ["padded", "single"])
def test_other_paths_give_the_same(path):
    model = build("Llama").float()
    engine = engine_of(model)
    engine.self_check.rejected[path] = "for this test"
    object.__setattr__(engine.self_check, "path", path)
    if path == "single":
        engine.self_check.rejected["padded"] = "for this test"
    assert largest_error(engine, model) <= 1e-4


def test_exact_logits_in_slices_are_the_same(monkeypatch):
    model = build("Llama").bfloat16()
    whole = engine_of(model).score(sequences())
    monkeypatch.setattr(head_module, "_GATHERED_NUMBERS", {"cpu": 1, "cuda": 1})
    for values, sliced in zip(whole, engine_of(model).score(sequences()), strict=True):
        assert np.array_equal(values.ids, sliced.ids) and np.abs(values.logps - sliced.logps).max() <= 1e-5


def test_of_equal_values_the_lower_id_comes_first():
    logps = torch.tensor([[-1.0, -3.0, -1.0, -2.0, -2.0, -1.0]])
    values, ids = top_of(logps, 4)
    assert ids.tolist() == [[0, 2, 5, 3]] and values.tolist() == [[-1.0, -1.0, -1.0, -2.0]]
    running = RunningTop(1, 5, torch.device("cpu"))
    for first in range(0, 6, 2):
        running.add(slice(0, 1), logps[:, first : first + 2], first)
    assert in_order(running.values, running.ids, 4)[1].tolist() == [[0, 2, 5, 3]]


def test_a_k_above_the_number_of_tokens_is_refused():
    with pytest.raises(EngineError, match=r"top_k 161: the model has only 160 tokens"):
        engine_of(build("Llama").float(), VOCAB + 1)


@pytest.mark.filterwarnings("ignore:.*padded path")
@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2 (soft caps, sliding window 8)", "Mamba"])
def test_a_temperature_divides_the_logits(name, k):
    model = build(name).float()
    for sequence, values in zip(sequences(), engine_of(model, k).score(sequences(), 0.7), strict=True):
        whole = torch.log_softmax(plain(model, sequence) / 0.7, 1)
        right = whole.gather(1, torch.tensor(sequence.completion_ids)[:, None])[:, 0].numpy()
        assert np.abs(token_logps_of(values) - right).max() <= 1e-4
        if k:
            assert np.abs(values.logps - torch.topk(whole, K).values.numpy()).max() <= 1e-4


def test_autocast_ranks_rounded_logits(tmp_path):
    build("Llama").float().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    values = TorchEngine(str(tmp_path), "bfloat16-autocast", "cpu", top_k=K).score(sequences())
    for sequence, found in zip(sequences(), values, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            right = torch.topk(plain(model, sequence), K).values.numpy()
        assert np.sqrt(np.mean((found.logps - right) ** 2)) <= 0.02 * max(1.0, float(np.abs(right).max()))


def test_a_head_whose_most_probable_tokens_are_wrong_is_not_used(monkeypatch):
    model = build("Llama").float()
    monkeypatch.setattr(head_module.Head, "_exact_products", lambda self, hidden, ids: 2.0 * torch.ones(ids.shape))
    engine = engine_of(model)
    assert "differ from those of an ordinary forward" in engine.self_check.rejected["top_k"]
    assert largest_error(engine, model) <= 1e-4
