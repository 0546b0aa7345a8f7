"""Attention over packs, kernel by kernel, beside the formula in float64."""

import dataclasses
import os
import shutil

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoModelForCausalLM

from reflogp.scoring.torch_engine import TorchEngine, attention, cpu_attention
from reflogp.scoring.torch_engine.attention import Call, PackLayout, by_branch, choose_kernel, cpu_blocks
from reflogp.scoring.torch_engine.packing import Pack, packs
from reflogp.scoring.torch_engine.sequences import Sequence
from reflogp.store.images import FIRST_IMAGE_ID
from tests.conftest import largest_error
from tools.families import build
from tools.fidelity import some_pairs

#: query heads, key heads, head size, value size
SHAPES = {
    "grouped": (12, 4, 64, 64),
    "own keys": (8, 8, 128, 128),
    "one key head": (140, 1, 64, 64),
    "latent": (6, 2, 192, 128),
    "odd tile": (5, 5, 10, 6),
}


@pytest.fixture
def multiplies_bfloat16():
    if not torch.cpu.get_capabilities().get("avx512_bf16"):
        assert "avx512_bf16" in str(cpu_attention.problem(64, 64))
        pytest.skip("this CPU does not multiply bfloat16")
    if shutil.which("g++") is None and "CI" not in os.environ:
        pytest.skip("g++ is not installed")


def some_pack(prompts: int, prompt: int, completions: tuple[int, ...]) -> Pack:
    random = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return random.integers(0, 1000, count).tolist()

    sequences = [Sequence(stem, ids(n)) for stem in (ids(prompt) for _ in range(prompts)) for n in completions]
    [pack] = packs(sequences, 1 << 20)
    return pack


def some_call(pack: Pack, heads: int, key_heads: int, size: int, value_size: int, window: int | None = None) -> Call:
    random = torch.Generator().manual_seed(1)

    def made(count: int, width: int) -> torch.Tensor:  # laid out as projections leave them
        return torch.randn(1, len(pack), count, width, generator=random).to(torch.bfloat16).transpose(1, 2)

    return Call(made(heads, size) * 2, made(key_heads, size), made(key_heads, value_size), size**-0.5, window, None, None)


def pack_with_images() -> Pack:
    """Prompts with images, two of which follow each other, and completions; some prompts begin alike."""
    random = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return random.integers(0, 1000, count).tolist()

    def image(count: int) -> list[int]:
        return (random.integers(0, 1000, count) + FIRST_IMAGE_ID).tolist()

    begin, first, second = ids(20), image(150), image(30)
    prompts = [[*begin, *first, *ids(9)], [*begin, *first, *second, *ids(5)], [*first, 1, *image(40), *ids(3)], ids(50)]
    [pack] = packs([Sequence(prompt, ids(n)) for prompt in prompts for n in (30, 17)], 1 << 20)
    return pack


def by_formula(pack: Pack, call: Call) -> torch.Tensor:
    query, key, value = (side[0].double() for side in (call.query, call.key, call.value))
    repeat = query.shape[0] // key.shape[0]
    out = torch.empty(query.shape[1], query.shape[0], value.shape[-1], dtype=torch.float64)
    for branch in pack.branches:
        path = torch.from_numpy(branch.path)
        place = torch.arange(branch.shared, len(path))[:, None]
        seen = torch.arange(len(path))[None] <= place
        if call.both_ways:
            is_image = pack.token_ids[branch.path] >= FIRST_IMAGE_ID
            # the same number within a run of image tokens
            runs = torch.from_numpy(np.where(is_image, np.cumsum(~is_image), -1))
            seen |= (runs[None] == runs[branch.shared :, None]) & (runs[None] >= 0)
        if call.window is not None:
            seen &= torch.arange(len(path))[None] > place - call.window
        k, v = (side[:, path].repeat_interleave(repeat, 0) for side in (key, value))
        scores = query[:, branch.start : branch.stop] @ k.transpose(1, 2) * call.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[branch.start : branch.stop] = (weights @ v).transpose(0, 1)
    return out


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("kernel", [by_branch, attention.flex])
def test_image_tokens_that_attend_in_both_directions(kernel, window):
    """Gemma 3: within its window, a token of an image sees the whole image."""
    pack = pack_with_images()
    assert max(branch.shared for branch in pack.branches) > 170
    one_way = some_call(pack, 4, 2, 32, 32, window)
    call = dataclasses.replace(one_way, both_ways=True)
    assert choose_kernel(call) is by_branch
    found = kernel(PackLayout(pack, torch.device("cpu"), both_ways=True), call)
    assert error(found, by_formula(pack, call)) <= 2e-3 < error(found, by_formula(pack, one_way))
    assert error(kernel(PackLayout(pack, torch.device("cpu")), one_way), by_formula(pack, one_way)) <= 2e-3


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found[0].double() - exact).square().mean().sqrt())


@pytest.mark.usefixtures("multiplies_bfloat16")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [(1, 300, (500, 257, 1)), (12, 40, (9, 7)), (1, 1, (1,))], ids=["long", "short", "tiny"])
def test_the_cpu_kernel_is_as_near_to_the_formula_as_torchs(shape, lengths, window):
    pack = some_pack(*lengths)
    call = some_call(pack, *SHAPES[shape], window)
    assert choose_kernel(call) is cpu_blocks
    layout, exact = PackLayout(pack, torch.device("cpu")), by_formula(pack, call)
    ours, torchs = (error(kernel(layout, call), exact) for kernel in (cpu_blocks, by_branch))
    assert ours <= 1.2 * torchs
    assert ours <= 2e-3


@pytest.mark.usefixtures("multiplies_bfloat16")
def test_more_keys_than_are_copied_at_once():
    """Branches are taken some at a time, so that copies of their keys stay small."""
    pack = some_pack(60, 300, (20, 10))
    call = some_call(pack, 2, 1, 16, 16)
    assert error(cpu_blocks(PackLayout(pack, torch.device("cpu")), call), by_formula(pack, call)) <= 2e-3


@pytest.mark.usefixtures("multiplies_bfloat16")
def test_a_query_or_key_that_is_not_a_number_stays_in_its_branch_and_is_not_hidden():
    pack = some_pack(2, 50, (30, 20))
    call = some_call(pack, 4, 2, 32, 32)
    bad = pack.branches[1].start + 3
    call.query[0, 1, bad] = float("nan")
    out = cpu_blocks(PackLayout(pack, torch.device("cpu")), call)[0]
    assert out[bad, 1].isnan().all()
    assert out.isnan().sum() == call.value.shape[-1]
    call.query[0, 1, bad] = 0.0
    call.key[0, 0, bad] = float("inf")  # its own branch's later queries see it, under the heads of that key head
    out = cpu_blocks(PackLayout(pack, torch.device("cpu")), call)[0]
    seen = torch.zeros(len(pack), dtype=torch.bool)
    seen[bad : pack.branches[1].stop] = True
    assert not out[~seen].isnan().any()
    assert out[seen][:, :2].isnan().all()
    assert not out[seen][:, 2:].isnan().any()


@pytest.mark.usefixtures("multiplies_bfloat16")
def test_without_a_compiler_torchs_kernel_runs_and_the_reason_is_known(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for remembered in (cpu_attention.problem, cpu_attention._loading_problem):
        remembered.cache_clear()
    try:
        pack = some_pack(1, 10, (5,))
        assert choose_kernel(some_call(pack, 4, 2, 32, 32)) is by_branch
        assert "g++" in str(cpu_attention.problem(32, 32))
    finally:
        for remembered in (cpu_attention.problem, cpu_attention._loading_problem):
            remembered.cache_clear()


@pytest.mark.usefixtures("multiplies_bfloat16")
@pytest.mark.parametrize("length", [40, 300, 1100])
def test_the_cpu_kernel_rounds_as_torchs_does(length):
    """Few roundings may differ, by the order of float32 sums: where one in eight does, a sum is 0.05 nats off."""
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, length, 64, generator=random).bfloat16() for _ in range(3))
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1)
    spans = torch.tensor([[0, length, 0]])
    ours = cpu_attention.attend(query[0], key[0], value[0], spans, torch.arange(length), 0.125, None)
    assert float((ours != theirs).float().mean()) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma 2 (soft caps, sliding window 8)", "gpt-oss (sinks, sliding window 8)"])
def test_flex_attention_gives_what_a_plain_forward_gives(name, tmp_path, monkeypatch):
    """The kernel that CUDA falls back to, run here without compiling: its tree mask, window, soft cap and sinks."""
    build(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    monkeypatch.setattr(attention, "choose_kernel", lambda call, refused: attention.flex)
    engine, sequences = TorchEngine(str(tmp_path), "float32"), some_pairs(4)
    assert (engine.self_check.path, engine.self_check.kernels) == ("packed", ["flex"])
    assert largest_error(engine.score(sequences), model, sequences) <= 1e-4


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("window", [None, 400])
def test_blocks_for_flex_attention_are_those_of_the_whole_mask(window, both_ways):
    """Computed block against block; here beside torch's own, which makes the (tokens, tokens) mask first."""
    random = np.random.default_rng(0)
    stems = [random.integers(0, 50, length).tolist() for length in (700, 300, 5)]
    stems[0][100:500] = range(FIRST_IMAGE_ID, FIRST_IMAGE_ID + 400)
    sequences = [
        Sequence([*stem[: 1 + cut % len(stem)], 90 + cut], random.integers(0, 50, 1 + cut % 300).tolist())
        for stem in stems
        for cut in random.integers(0, 1000, 8).tolist()
    ]
    [pack] = packs(sequences, 100_000)
    layout = PackLayout(pack, torch.device("cpu"), both_ways=both_ways)
    made = layout.block_mask(window)
    whole = create_block_mask(made.mask_mod, None, None, len(pack), len(pack), device="cpu")
    assert len(pack) % 128  # the last block is not full
    needed, read = whole.to_dense().bool(), made.to_dense().bool()
    assert not (needed & ~read).any()
    assert (read & ~needed).sum() <= 0.15 * needed.sum(), "reads more than it needs"
    assert _full(made).int().sum() > 0
    assert not (_full(made) & ~_full(whole)).any(), "a block that is taken whole holds a pair that must not be seen"


def _full(mask) -> torch.Tensor:
    """Blocks that are taken whole, bool (query blocks, key blocks)."""
    counts, indices = mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0]
    dense = torch.zeros(indices.shape, dtype=torch.bool)
    for row, count in enumerate(counts.tolist()):
        dense[row, indices[row, :count].long()] = True
    return dense
