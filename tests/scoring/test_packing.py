"""Properties of packs, on sequences that share beginnings in every way."""

from hypothesis import given, settings
from hypothesis import strategies as st

from reflogp.scoring.torch_engine.packing import packs
from reflogp.scoring.torch_engine.sequences import Sequence
from reflogp.store.images import FIRST_IMAGE_ID

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


def contexts_of(pack) -> dict[int, list[int]]:
    """place -> the tokens that it attends to, itself included, from the branches alone."""
    context = {}
    for branch in pack.branches:
        for place in range(branch.start, branch.stop):
            path = branch.path[: branch.shared + place - branch.start + 1]
            assert path[-1] == place
            context[place] = pack.token_ids[path].tolist()
    return context


@settings(max_examples=400)
@given(families(), st.integers(1, 80), st.integers(1, 20))
def test_every_completion_token_is_scored_once_by_its_own_context_within_the_budget(sequences, budget, min_shared):
    found = {}
    whole = [[*sequence.prompt_ids, *sequence.completion_ids] for sequence in sequences]
    for pack in packs(sequences, budget, min_shared):
        assert len(pack) <= budget or len(pack.branches) == 1
        assert [b.start for b in pack.branches] == [0, *[b.stop for b in pack.branches[:-1]]]
        assert pack.branches[-1].stop == len(pack)
        for branch in pack.branches:
            assert pack.token_ids[branch.path].tolist() in whole, "a branch's path is one sequence, and only that"
            assert pack.positions[branch.path].tolist() == list(range(len(branch.path)))
        context = contexts_of(pack)
        for index, where in pack.members:
            assert index not in found
            found[index] = [(context[pack.parents[w]], int(pack.token_ids[pack.predicted[w]])) for w in where]
        assert len(set(pack.predicted.tolist())) == len(pack.predicted)
    assert sorted(found) == list(range(len(sequences)))
    for index, (ids, sequence) in enumerate(zip(whole, sequences, strict=True)):
        assert found[index] == [(ids[:t], ids[t]) for t in range(len(sequence.prompt_ids), len(ids))]


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
    shared = {branch.sequence: branch.shared for branch in pack.branches}
    assert sorted(shared.values()) == [0, 20, 20, 20, 51, 80]
