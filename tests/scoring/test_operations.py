"""What a run says it computed, against torch's own count of operations and a count of tokens by their definition."""

import threading
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from reflogp.scoring.torch_engine import Sequence, TorchEngine, flops
from reflogp.scoring.torch_engine.flops import ForwardFlops, matmul_flops_per_second
from reflogp.scoring.torch_engine.sequences import Operations
from reflogp.service.worker.engine_loop import EngineLoop, OnlineRequest
from reflogp.service.worker.job_engine import JobEngine
from tests.scoring.test_engine import random_sequences
from tools.families import FAMILIES, VOCAB, build

LENGTH = 40


def counted(model, count, operators=None):
    """torch's count of operations in a plain forward over `count` tokens; of some operators where they are named."""
    ids = torch.arange(count)[None] % VOCAB
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    found = counter.get_flop_counts()["Global"]
    return sum(number for operator, number in found.items() if operators is None or str(operator).split(".")[-1] in operators)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_more_is_counted_than_a_plain_forward_computes(name):
    model = build(name)
    model.set_attn_implementation("eager")  # masked pairs are computed as well, so the count is an upper bound
    model.set_experts_implementation("eager")  # torch counts no grouped products
    [sequence] = [Sequence([1], list(range(2, LENGTH + 1)))]
    plain = ForwardFlops(model).plain([sequence])
    assert 0.5 * counted(model, LENGTH) <= plain <= counted(model, LENGTH)


def trie(sequences):
    """Every distinct beginning -> whether its last token is predicted."""
    found = defaultdict(bool)
    for sequence in sequences:
        ids = tuple(sequence.ids().tolist())
        for length in range(1, len(ids) + 1):
            found[ids[:length]] |= length > len(sequence.prompt_ids)
    return found


def dialogues():
    """Turns that share long beginnings of each other, and no short ones: each prompt begins with a token of its own."""
    drawn = random_sequences(40, vocab=VOCAB, longest=25, seed=5)
    sequences = []
    for first in range(8):
        prompt = [first, *range(20, 50)]
        for at, other in enumerate(drawn[5 * first : 5 * first + 5]):
            sequences.append(Sequence(prompt, [60 + at, *other.completion_ids]))
        longer = [*sequences[-1].ids().tolist(), 7]
        sequences += [Sequence(longer, [100, 3]), Sequence(longer, [101, 3, 4])]
    return sequences


@pytest.mark.parametrize(
    ("name", "windows"),
    [("Llama", [None] * 3), ("Mistral, sliding window 8", [8] * 3), ("Gemma 2 (soft caps, sliding window 8)", [8, None, 8])],
)
def test_what_is_shared_counts_once(name, windows, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    sequences = dialogues()
    engine = TorchEngine(str(tmp_path), "float32", "cpu", token_budget=100_000, compile_layers=False)
    assert engine.self_check.path == "packed" and engine.operations() == Operations()
    engine.score(sequences)
    config = model.config
    head = 2 * VOCAB * config.hidden_size
    per_token = counted(model, LENGTH, ("mm", "addmm")) / LENGTH - head
    per_pair = 4 * config.num_attention_heads * config.head_dim

    def operations(depths, predictions):
        pairs = sum(min(depth, window or depth) for depth in depths for window in windows)
        return per_token * len(depths) + per_pair * pairs + head * predictions

    nodes = trie(sequences)
    found = engine.operations()
    assert found.computed == pytest.approx(operations([len(node) for node in nodes], sum(nodes.values())), rel=1e-9)
    alone = [operations(range(1, len(s) + 1), len(s.completion_ids)) for s in sequences]
    assert found.plain == pytest.approx(sum(alone), rel=1e-9)
    assert found.sharing_gain > 2
    engine.score(sequences)
    assert engine.operations() - found == found, "a second time as much"


def test_layers_count_the_pairs_that_their_kind_computes():
    kinds = ["full_attention", "sliding_attention", "chunked_attention", "chunked_attention", "linear_attention"]
    config = SimpleNamespace(layer_types=kinds, num_hidden_layers=5, sliding_window=7, attention_chunk_size=5)
    seen = {
        "full_attention": lambda query, key: key <= query,
        "sliding_attention": lambda query, key: query - 7 < key <= query,
        "chunked_attention": lambda query, key: key <= query and key // 5 == query // 5,
        "linear_attention": lambda query, key: False,
    }
    lengths = np.arange(23)
    found = sum(count * pairs(lengths) for count, pairs in flops._attention_layers(config))
    right = [sum(seen[kind](q, k) for kind in kinds for q in range(n) for k in range(n)) for n in lengths]
    assert found.tolist() == right


def test_nothing_is_shared_on_the_padded_path(tmp_path):
    build("Bloom (ALiBi)").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="padded path"):
        engine = TorchEngine(str(tmp_path), "float32", "cpu")
    engine.score(dialogues())
    assert engine.operations().computed > 0 and engine.operations().sharing_gain == 1


def test_what_ran_out_of_memory_does_not_count(reference_folder, monkeypatch):
    sequences = random_sequences(40)
    right = TorchEngine(str(reference_folder), "float32", "cpu")
    right.score(sequences)
    engine = TorchEngine(str(reference_folder), "float32", "cpu")
    launch, failed = engine._launch, []

    def once(unit, temperature):
        if not failed:
            failed.append(unit)
            return None
        return launch(unit, temperature)

    monkeypatch.setattr(engine, "_launch", once)
    engine.score(sequences)
    assert failed and engine.operations().plain == pytest.approx(right.operations().plain)


def test_a_product_of_random_matrices_is_measured(monkeypatch):
    class Products(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.sides = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.linear.default:  # whole, in inference mode
                self.sides += [(side.dtype, tuple(side.shape), float(side.float().std())) for side in args]
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(flops, "_SIDES", {"cpu": (48, 64)})
    before = torch.random.get_rng_state()
    with Products() as products:
        rate = matmul_flops_per_second.__wrapped__(torch.device("cpu"), torch.bfloat16)
    assert rate > 0
    assert {(dtype, shape) for dtype, shape, _ in products.sides} == {(torch.bfloat16, (48, 48)), (torch.bfloat16, (64, 64))}
    assert all(0.9 < deviation < 1.1 for _, _, deviation in products.sides)
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's random numbers are untouched"


class OneEngine:
    """A worker's engines, of which there is one."""

    def __init__(self, engine):
        self._engine = engine

    def get(self, reference_id):
        return self._engine

    peek = get

    def displaced_by(self, reference_id):
        return []


def test_a_job_counts_its_own_passes_and_not_those_of_online_requests(reference_folder):
    sequences, online = random_sequences(60), random_sequences(30, seed=1)
    alone = TorchEngine(str(reference_folder), "float32", "cpu", token_budget=400)
    alone.score(sequences)
    engine = TorchEngine(str(reference_folder), "float32", "cpu", token_budget=400)
    answered = threading.Event()
    loop = EngineLoop(OneEngine(engine), lambda ids: None, lambda answer: answered.set(), 0.0)
    job = JobEngine(loop, engine, "ref", (), {}, lambda keys: None, lambda: None)
    loop.ask(OnlineRequest("request", "ref", online, 1.0, False, None))
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        values = dict(pair for landed in job.flow(iter([sequences])) for pair in landed)
        assert answered.wait(30)
    finally:
        loop.close()
        thread.join()
    assert len(values) == 60
    assert job.operations().computed == pytest.approx(alone.operations().computed)
    assert engine.operations().computed > job.operations().computed
