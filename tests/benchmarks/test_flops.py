"""What the benchmarks count as operations, against torch's own count and a count by definition."""

from collections import defaultdict

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from reflogp.scoring.torch_engine import Sequence
from reflogp.scoring.torch_engine.packing import packs
from tests.conftest import REPOSITORY
from tests.versions import skip_before
from tools.families import VOCAB, build


@pytest.fixture
def flops(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    import flops

    return flops


def test_a_plain_forward_has_the_operations_that_torch_counts(flops):
    skip_before("transformers", "5.20", "computes rotary angles otherwise")
    model = build("Qwen2")
    model.set_attn_implementation("eager")  # masked scores are computed as well
    ids = torch.arange(40)[None] % VOCAB
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    assert flops.Qwen2Flops(model.config)(40, 40 * 40, 40) == counter.get_total_flops()


def test_what_is_shared_counts_once(flops):
    """Each distinct beginning of a sequence is one token of the pack, which sees as many tokens as it is long."""
    prompt = [1, *range(20, 50)]
    sequences = [Sequence(prompt, [60 + at, at, 7]) for at in range(5)]
    sequences += [Sequence([*sequences[0].ids().tolist(), 7], [100, at]) for at in range(3)]
    nodes = defaultdict(bool)  # beginning -> whether its last token is predicted
    for sequence in sequences:
        ids = tuple(sequence.ids().tolist())
        for length in range(1, len(ids) + 1):
            nodes[ids[:length]] |= length > len(sequence.prompt_ids)
    count = flops.Qwen2Flops(build("Qwen2").config)
    [pack] = packs(sequences, 1000)
    assert count.of_pack(pack) == count(len(nodes), sum(map(len, nodes)), sum(nodes.values()))
