"""Properties of packs, on sequences that share beginnings in every way."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflogp.scoring.torch_engine.packing import image_ends, packs
from reflogp.scoring.torch_engine.sequences import Sequence
from reflogp.store.images import FIRST_IMAGE_ID
from tests.conftest import PAIRS, wider_data

few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)  # a small alphabet makes common beginnings common


@st.composite
def families(draw):
    """Sequences of which many share prompts, turns and first words, or are equal."""
    stems = draw(st.lists(few_tokens, min_size=1, max_size=4))
    sequences = []
    for _ in range(draw(st.integers(1, 25))):
        whole = draw(st.sampled_from(stems)) + draw(few_tokens)
        cut = draw(st.integers(1, len(whole) - 1))
        sequences.append(Sequence(whole[:cut], whole[cut:]))
    return sequences


budgets = st.integers(1, 80)
least_shared = st.integers(1, 20)


@settings(max_examples=300)
@given(families(), budgets, least_shared)
def test_every_completion_token_is_scored_once_by_its_own_context(sequences, budget, min_shared):
    found = {}
    for pack in packs(sequences, budget, min_shared):
        context = contexts_of(pack)
        for index, where in pack.members:
            assert index not in found
            values = [(context[pack.parents[w]], int(pack.token_ids[pack.predicted[w]])) for w in where]
            found[index] = values
        assert len(set(pack.predicted.tolist())) == len(pack.predicted)
    assert sorted(found) == list(range(len(sequences)))
    for index, sequence in enumerate(sequences):
        whole = [*sequence.prompt_ids, *sequence.completion_ids]
        start = len(sequence.prompt_ids)
        assert found[index] == [(whole[:t], whole[t]) for t in range(start, len(whole))]


def contexts_of(pack) -> dict[int, list[int]]:
    """place -> the tokens that it attends to, itself included, from the branches alone."""
    context = {}
    for branch in pack.branches:
        for place in range(branch.start, branch.stop):
            path = branch.path[: branch.shared + place - branch.start + 1]
            assert path[-1] == place
            context[place] = pack.token_ids[path].tolist()
    return context


@settings(max_examples=200)
@given(families(), budgets, least_shared)
def test_branches_add_every_token_once_and_leak_nothing(sequences, budget, min_shared):
    for pack in packs(sequences, budget, min_shared):
        assert [b.start for b in pack.branches] == [0, *[b.stop for b in pack.branches[:-1]]]
        assert pack.branches[-1].stop == len(pack)
        paths = {tuple(int(t) for t in [*s.prompt_ids, *s.completion_ids]) for s in sequences}
        for branch in pack.branches:
            assert branch.path[-1] == branch.stop - 1
            assert tuple(pack.token_ids[branch.path].tolist()) in paths, "a branch's path is one sequence, and only that"
            assert pack.positions[branch.path].tolist() == list(range(len(branch.path)))


@settings(max_examples=200)
@given(families(), budgets)
def test_a_pack_stays_within_the_budget_unless_one_sequence_is_longer(sequences, budget):
    for pack in packs(sequences, budget):
        assert len(pack) <= budget or len(pack.branches) == 1


def test_equal_sequences_are_computed_once():
    [pack] = packs([Sequence([1] * 20, [2, 3]), Sequence([1] * 20, [2, 3]), Sequence([1] * 19, [1, 2, 3])], 100)
    assert len(pack) == 22
    assert len(pack.predicted) == 3


def test_no_sequences_no_packs():
    assert list(packs([], 100)) == []


def test_the_largest_come_first():
    sizes = [len(pack.branches[0].path) for pack in packs([Sequence([i], [0] * (10 + 7 * i)) for i in range(40)], 300)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("file", wider_data(), ids=lambda path: path.name.split(".")[0])
def test_packs_of_real_data_are_nearly_full_and_share_prompts(file, tokenizer):
    from reflogp.scoring.data.encode import tokenize_examples
    from reflogp.scoring.data.shape import examples_of

    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    rows = [json.loads(line) for line in text.splitlines()[:600]]
    examples = [e for row in rows for e in examples_of(row, "preference" if "chosen" in row else "kto")]
    sequences = [Sequence(p, c) for p, cs in tokenize_examples(examples, tokenizer) for c in cs]
    budget = 8192
    sizes = [len(pack) for pack in packs(sequences, budget)]
    whole = sum(map(len, sequences))
    assert sum(sizes) <= whole
    if file == PAIRS:
        assert sum(sizes) < 0.55 * whole, "two in three of these pairs share their prompt with another"
    full = [min(size, budget) for size in sizes[:-1]]
    assert not full or np.mean(full) / budget > 0.95


def test_an_image_is_never_divided():
    """Images that follow each other may attend to each other, so they are computed together."""
    first, second, third = (list(range(FIRST_IMAGE_ID + 100 * n, FIRST_IMAGE_ID + 100 * n + 30)) for n in range(3))
    text = list(range(20))
    prompts = [
        [*text, *first, 1],
        [*text, *first, *second, 1],
        [*text, *first, *second, 2],
        [*text, *first, *third, 1],
        [*text, *first[:10], *third, 1],
        [*text, *first, 1, *second, 3],
    ]
    sequences = [Sequence(prompt, [n, 5, 6]) for n, prompt in enumerate(prompts)]
    [pack] = packs(sequences, 1 << 20)
    for branch in pack.branches:
        ids = pack.token_ids[branch.path] >= FIRST_IMAGE_ID
        assert not (branch.shared and ids[branch.shared - 1] and ids[branch.shared])
    shared = {branch.sequence: branch.shared for branch in pack.branches}
    assert sorted(shared.values()) == [0, 20, 20, 20, 51, 80]


def test_where_the_images_of_tokens_end():
    ids = np.array([5, *range(FIRST_IMAGE_ID, FIRST_IMAGE_ID + 3), 7, FIRST_IMAGE_ID, 8])
    assert image_ends(ids, both_ways=False).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert image_ends(ids, both_ways=True).tolist() == [1, 4, 4, 4, 5, 6, 7]
    assert image_ends(ids[1:4], both_ways=True).tolist() == [3, 3, 3]
    assert image_ends(ids[:0], both_ways=True).tolist() == []
