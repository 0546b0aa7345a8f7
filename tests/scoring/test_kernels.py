"""CUDA's attention kernels without CUDA: plain torch stands in for what is installed, with the signatures of its versions."""

import copy
import functools

import numpy as np
import pytest
import torch

from reflogp.scoring.torch_engine import TorchEngine, attention, compilation
from reflogp.scoring.torch_engine.attention import PackLayout, choose_kernel, flash3_varlen, flash_varlen, torch_varlen
from reflogp.scoring.torch_engine.packing import packs
from reflogp.scoring.torch_engine.sequences import Sequence
from tests.scoring.test_attention import by_formula, error, some_call, some_pack
from tools.families import build
from tools.fidelity import some_pairs


def variable_length(query, key, value, cu_queries, cu_keys, longest_query, longest_key, scale, left, softcap=None):
    """Variable-length attention by its definition: causal, aligned at each sequence's last token.

    Checks what the real kernels take for granted: contiguous heads, int32 offsets on the values' device, true longest lengths.

    Args:
        query: (tokens, heads, size); key, value: (keys, key heads, size).
        left: keys to the left of a query that it sees; -1 is all.
    """
    size = query.shape[-1]
    assert size % 8 == 0 and key.shape[-1] == value.shape[-1] == size
    assert query.shape[1] % key.shape[1] == 0
    assert all(tensor.is_contiguous() and tensor.device == query.device for tensor in (query, key, value))
    for offsets, rows, longest in ((cu_queries, len(query), longest_query), (cu_keys, len(key), longest_key)):
        assert offsets.dtype == torch.int32 and offsets.device == query.device and offsets.is_contiguous()
        assert offsets[0] == 0 and offsets[-1] == rows and offsets.diff().max() == longest
    out = torch.empty_like(query)
    repeat = query.shape[1] // key.shape[1]
    for at in range(len(cu_queries) - 1):
        rows, columns = slice(*cu_queries[at : at + 2].tolist()), slice(*cu_keys[at : at + 2].tolist())
        q = query[rows].transpose(0, 1).double()
        k, v = (side[columns].transpose(0, 1).double().repeat_interleave(repeat, 0) for side in (key, value))
        place = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
        seen = torch.arange(k.shape[1])[None] <= place
        if left >= 0:
            seen &= torch.arange(k.shape[1])[None] >= place - left
        scores = q @ k.transpose(1, 2) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        out[rows] = (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1).to(out.dtype)
    return out


def torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    """Takes grouped heads as they are."""
    assert window_size[1] == 0
    return variable_length(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size[0])


def torch_2_13(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """Refuses grouped heads unless it is told of them."""
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Try setting enable_gqa=True for GQA.")
    assert window_size[1] == 0
    return variable_length(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size[0])


def flash_2(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert causal
    cap = softcap or None
    return variable_length(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window_size[0], cap)


def flash_3(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    assert causal
    cap = softcap or None
    return variable_length(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window_size[0], cap)


KERNELS = {
    "torch 2.11": (torch_varlen, "_torch_varlen", torch_2_11),
    "torch 2.13": (torch_varlen, "_torch_varlen", torch_2_13),
    "flash-attn 2": (flash_varlen, "_flash_varlen", flash_2),
    "flash-attn 3": (flash3_varlen, "_flash3_varlen", flash_3),
}
#: query heads, key heads, head size, value size
SHAPES = {"own keys": (4, 4, 64, 64), "grouped": (12, 4, 64, 64), "one key head": (10, 1, 128, 128), "latent": (4, 4, 192, 128)}


@pytest.mark.parametrize("lengths", [(1, 300, (200, 57, 1)), (12, 40, (9, 7)), (1, 1, (1,))], ids=["long", "short", "tiny"])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("installed", KERNELS)
def test_a_variable_length_kernel_agrees_with_the_formula(installed, shape, window, lengths, monkeypatch):
    kernel, name, stand_in = KERNELS[installed]
    monkeypatch.setattr(attention, name, lambda: stand_in)
    pack = some_pack(*lengths)
    call = some_call(pack, *SHAPES[shape], window)
    found = kernel(PackLayout(pack, torch.device("cpu")), call)
    assert found.shape == (1, len(pack), call.query.shape[1], call.value.shape[-1])
    assert error(found, by_formula(pack, call)) <= 2e-3


@pytest.mark.parametrize("installed", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_copies_of_shared_keys_are_made_for_a_few_branches_at_a_time(installed, shape, monkeypatch):
    heads, key_heads, size, value_size = SHAPES[shape]
    kernel, name, stand_in = KERNELS[installed]
    most = 700 * 2 * key_heads * size * 2  # of the nine branches' 3,081 keys
    calls = []

    @functools.wraps(stand_in)
    def seen(query, key, value, *arguments, **keywords):
        calls.append((len(query), key.nbytes + value.nbytes))
        return stand_in(query, key, value, *arguments, **keywords)

    monkeypatch.setattr(attention, name, lambda: seen)
    monkeypatch.setattr(attention, "_GATHERED_BYTES", most)
    pack = some_pack(3, 300, (20, 57, 1))
    call = some_call(pack, heads, key_heads, size, value_size, 100)
    found = kernel(PackLayout(pack, torch.device("cpu")), call)
    assert error(found, by_formula(pack, call)) <= 2e-3
    assert len(calls) == 5 and sum(count for count, _ in calls) == len(pack)
    assert max(read for _, read in calls) <= most


@pytest.mark.parametrize(("key_heads", "calls"), [(4, 3), (32, 21)])
def test_many_completions_on_a_long_prompt_need_a_gigabyte_of_copies(key_heads, calls):
    """307 completions of 200 tokens on a prompt of 4,096 fill a pack of 65,536; all copies at once would take 2.7 or 21 GB."""
    random = np.random.default_rng(0)
    prompt = random.integers(0, 1000, 4096).tolist()
    sequences = [Sequence(prompt, random.integers(0, 1000, 200).tolist()) for _ in range(307)]
    [pack] = packs(sequences, 1 << 17)
    bytes_of_key = 2 * key_heads * 128 * 2
    assert 2.6e9 / 4 <= sum(len(branch.path) for branch in pack.branches) * bytes_of_key / key_heads <= 2.8e9 / 4
    planned = PackLayout(pack, torch.device("cpu")).varlen(attention._GATHERED_BYTES // bytes_of_key)
    assert len(planned) == calls
    assert all(len(call.gather) * bytes_of_key <= 1 << 30 for call in planned)


@pytest.mark.parametrize(
    ("size", "dtype", "stages"),
    [
        (128, torch.bfloat16, None),
        (192, torch.bfloat16, None),
        (512, torch.bfloat16, 1),
        (64, torch.float32, None),
        (192, torch.float32, 1),
        (512, torch.float32, 1),
    ],
)
def test_wide_heads_load_less_in_advance(size, dtype, stages):
    """Otherwise they would need more shared memory than an H100 has (tools/sm90 compiles them)."""
    assert attention._flex_options(torch.empty(1, 2, 3, size, dtype=dtype)).get("num_stages") == stages


def test_values_as_wide_as_keys_are_not_copied(monkeypatch):
    padded, pad = [], attention.F.pad
    monkeypatch.setattr(attention.F, "pad", lambda tensor, widths: padded.append(widths) or pad(tensor, widths))
    monkeypatch.setattr(attention, "_torch_varlen", lambda: torch_2_13)
    for shape in ("grouped", "latent"):
        pack = some_pack(1, 30, (20,))
        torch_varlen(PackLayout(pack, torch.device("cpu")), some_call(pack, *SHAPES[shape]))
    assert len(padded) == 1


def on_cuda(monkeypatch, *names: str) -> None:
    """These variable-length kernels are the installed ones, and a CPU's tensors go where a GPU's do."""
    for kernel, name, stand_in in KERNELS.values():
        monkeypatch.setattr(attention, name, lambda found=stand_in if kernel.__name__ in names else None: found)
    monkeypatch.setattr(attention, "_CPU_KERNELS", attention._CUDA_KERNELS)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "flash3_varlen"),
        ({"softcap": 30.0}, "flash3_varlen"),
        ({"sinks": torch.zeros(4)}, "flex"),
        ({"head": 20}, "flex"),  # no multiple of 8
        ({"head": 264}, "flex"),  # beyond 256
        ({"dtype": torch.float32}, "flex"),
        ({"both_ways": True}, "flex"),
    ],
)
def test_each_layer_gets_the_fastest_kernel_that_can_compute_it(change, expected, monkeypatch):
    on_cuda(monkeypatch, "torch_varlen", "flash_varlen", "flash3_varlen")
    pack, size = some_pack(1, 10, (5,)), change.get("head", 64)
    call = some_call(pack, 4, 2, size, size)
    dtype = change.get("dtype", torch.bfloat16)
    sides = {side: getattr(call, side).to(dtype) for side in ("query", "key", "value")}
    call = copy.copy(call)
    options = {
        "softcap": None,
        "sinks": None,
        **{name: value for name, value in change.items() if name not in ("head", "dtype")},
    }
    for name, value in {**sides, **options}.items():
        object.__setattr__(call, name, value)
    order = ["flash3_varlen", "torch_varlen", "flash_varlen", "flex", "by_branch"]
    assert choose_kernel(call).__name__ == expected
    left = [name for name in order[order.index(expected) + 1 :] if name in ("flex", "by_branch") or expected == order[0]]
    if change.get("softcap"):
        left.remove("torch_varlen")
    refused = [expected]
    for name in left:
        assert choose_kernel(call, refused).__name__ == name
        refused.append(name)


@pytest.mark.parametrize("wrong", ["raises", "differs"])
def test_a_kernel_that_fails_is_named_and_the_next_one_is_taken(wrong, tmp_path, monkeypatch):
    on_cuda(monkeypatch, "flash_varlen")
    build("Llama").save_pretrained(tmp_path)

    def failing(query, key, value, *lengths, scale=None, window_size=(-1, -1)):
        if wrong == "raises":
            raise TypeError("varlen_attn() got an unexpected keyword argument")
        return torch.zeros_like(query)

    monkeypatch.setattr(attention, "_torch_varlen", lambda: failing)
    sequences = some_pairs(4)
    engine = TorchEngine(str(tmp_path), "bfloat16")
    check = engine.self_check
    assert (check.path, check.kernels, check.refused_kernels) == ("packed", ["flash_varlen"], ("torch_varlen",))
    why = {"raises": "unexpected keyword", "differs": "those of an ordinary forward pass"}[wrong]
    assert why in check.rejected["torch_varlen"]
    monkeypatch.undo()
    exact = TorchEngine(str(tmp_path), "float32").score(sequences)
    on_cuda(monkeypatch, "flash_varlen")
    monkeypatch.setattr(attention, "_torch_varlen", lambda: failing)
    differences = np.concatenate([a - b for a, b in zip(engine.score(sequences), exact, strict=True)])
    assert np.sqrt(np.mean(differences**2)) <= 0.02


def test_the_reason_of_a_refused_cpu_kernel_is_kept(tmp_path, monkeypatch):
    build("Llama").save_pretrained(tmp_path)

    def cpu_blocks(layout, call):
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(attention, "cpu_blocks", cpu_blocks)
    monkeypatch.setattr(attention, "_CPU_KERNELS", ((cpu_blocks, lambda: True, lambda call: None),))
    monkeypatch.setattr(attention, "_cpu_blocks_problem", lambda call: None)
    check = TorchEngine(str(tmp_path), "bfloat16").self_check
    assert (check.path, check.kernels, check.refused_kernels) == ("packed", ["by_branch"], ("cpu_blocks",))
    assert check.rejected["cpu_blocks"] == "RuntimeError: illegal instruction"


def test_memory_that_runs_out_in_a_kernel_does_not_refuse_the_kernel(tmp_path, monkeypatch):
    on_cuda(monkeypatch, "torch_varlen")
    build("Llama").save_pretrained(tmp_path)
    engine = TorchEngine(str(tmp_path), "bfloat16", token_budget=4096)
    assert engine.self_check.kernels == ["torch_varlen"]
    seen = []

    @functools.wraps(torch_2_13)
    def full(*args, **keywords):
        seen.append(len(args[0]))
        if len(args[0]) > 200:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return torch_2_13(*args, **keywords)

    monkeypatch.setattr(attention, "_torch_varlen", lambda: full)
    values = engine.score(some_pairs(20))
    assert len(values) == 40 and max(seen) > 200
    assert engine.token_budget <= 200


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "window", "soft cap", "sinks"])
def test_flex_attention_is_compiled_at_most_twice_over_fifty_packs(variant, monkeypatch):
    """A graph for each pack would take seconds each and, after eight, fall back to whole score matrices."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    scalars = []

    def backend(graph, inputs):
        tensors = (value for value in inputs if isinstance(value, torch.Tensor))
        scalars.extend(value for value in tensors if value.is_floating_point() and value.dim() == 0)
        return counter(graph, inputs)

    compiled = compilation.any_size(flex_attention, backend)
    monkeypatch.setattr(attention, "_compiled_flex", lambda device_type: compiled)
    random = np.random.default_rng(0)
    for _ in range(50):
        prompts, prompt = int(random.integers(1, 4)), int(random.integers(1, 60))
        pack = some_pack(prompts, prompt, tuple(random.integers(1, 60, 2).tolist()))
        call = some_call(pack, 4, 2, 16, 16, 20 if variant == "window" else None)
        object.__setattr__(call, "softcap", 30.0 if variant == "soft cap" else None)
        object.__setattr__(call, "sinks", torch.zeros(4) if variant == "sinks" else None)
        assert attention.flex(PackLayout(pack, torch.device("cpu")), call).isfinite().all()
    assert 1 <= counter.frame_count <= 2
    assert not scalars, "a number that the compiled kernel would load from a CPU tensor"
