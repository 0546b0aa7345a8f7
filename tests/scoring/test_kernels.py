"""CUDA's attention kernels without CUDA: plain torch stands in for what is installed, with the signatures of its versions."""

import dataclasses
import inspect

import pytest
import torch

from reflogp.scoring.torch_engine import attention
from reflogp.scoring.torch_engine.attention import PackLayout, choose_kernel, flash3_varlen, flash_varlen, torch_varlen
from tests.scoring.test_attention import by_formula, error, some_call, some_pack


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


def installed(parameters: str, compute):
    """A kernel with the parameters of an installed version, and no others."""
    signature = inspect.Signature([inspect.Parameter(name, 1, default=None) for name in parameters.split()])

    def kernel(*arguments, **more):
        return compute(*arguments[:7], signature.bind(*arguments, **more).arguments)

    kernel.__signature__ = signature
    return kernel


def of_torch_2_11(*arguments):
    *tensors, given = arguments
    assert given["window_size"][1] == 0
    return variable_length(*tensors, given["scale"], given["window_size"][0])


def of_torch_2_13(query, key, *arguments):
    assert arguments[-1].get("enable_gqa") or query.shape[1] == key.shape[1], "Try setting enable_gqa=True for GQA."
    return of_torch_2_11(query, key, *arguments)


def of_flash(*arguments):
    *tensors, given = arguments
    assert given["causal"]
    return variable_length(*tensors, given["softmax_scale"], given["window_size"][0], given.get("softcap") or None)


TORCH = "query key value cu_seq_q cu_seq_k max_q max_k return_aux scale window_size"
TORCH_2_13 = f"{TORCH} enable_gqa seqused_k block_table num_splits"
FLASH = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
FLASH_2 = f"{FLASH} dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs block_table"
FLASH_3 = (
    f"{FLASH} seqused_q seqused_k softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap"
    " num_splits pack_gqa deterministic sm_margin return_attn_probs"
)
KERNELS = {
    "torch 2.11": (torch_varlen, "_torch_varlen", installed(TORCH, of_torch_2_11)),
    "torch 2.13": (torch_varlen, "_torch_varlen", installed(TORCH_2_13, of_torch_2_13)),
    "flash-attn 2": (flash_varlen, "_flash_varlen", installed(FLASH_2, of_flash)),
    "flash-attn 3": (flash3_varlen, "_flash3_varlen", installed(FLASH_3, of_flash)),
}
#: query heads, key heads, head size, value size
SHAPES = {"own keys": (4, 4, 64, 64), "grouped": (12, 4, 64, 64), "one key head": (10, 1, 128, 128), "latent": (4, 4, 192, 128)}


@pytest.mark.parametrize("copied", [1 << 30, 80_000])
@pytest.mark.parametrize("lengths", [(1, 300, (200, 57, 1)), (12, 40, (9, 7)), (1, 1, (1,))], ids=["long", "short", "tiny"])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("version", KERNELS)
def test_a_variable_length_kernel_agrees_with_the_formula(version, shape, window, lengths, copied, monkeypatch):
    """However many branches are computed at once: as many as there is room for copies of the keys that they share."""
    kernel, name, stand_in = KERNELS[version]
    monkeypatch.setattr(attention, name, lambda: stand_in)
    monkeypatch.setattr(attention, "_GATHERED_BYTES", copied)
    pack = some_pack(*lengths)
    call = some_call(pack, *SHAPES[shape], window)
    found = kernel(PackLayout(pack, torch.device("cpu")), call)
    assert found.shape == (1, len(pack), call.query.shape[1], call.value.shape[-1])
    assert error(found, by_formula(pack, call)) <= 2e-3


ORDER = ["flash3_varlen", "torch_varlen", "flash_varlen", "flex", "by_branch"]


@pytest.mark.parametrize(
    ("change", "able"),
    [
        ({}, ORDER),
        ({"softcap": 30.0}, ["flash3_varlen", "flash_varlen", "flex", "by_branch"]),
        ({"sinks": torch.zeros(4)}, ["flex", "by_branch"]),
        ({"size": 20}, ["flex", "by_branch"]),  # no multiple of 8
        ({"size": 264}, ["flex", "by_branch"]),  # beyond 256
        ({"dtype": torch.float32}, ["flex", "by_branch"]),
        ({"both_ways": True}, ["flex", "by_branch"]),
    ],
    ids=lambda value: next(iter(value), "plain") if isinstance(value, dict) else "",
)
def test_each_layer_gets_the_fastest_kernel_that_can_compute_it(change, able, monkeypatch):
    for _, name, stand_in in KERNELS.values():
        monkeypatch.setattr(attention, name, lambda found=stand_in: found)
    monkeypatch.setattr(attention, "_CPU_KERNELS", attention._CUDA_KERNELS)
    size, dtype = change.pop("size", 64), change.pop("dtype", torch.bfloat16)
    call = some_call(some_pack(1, 10, (5,)), 4, 2, size, size)
    sides = {side: getattr(call, side).to(dtype) for side in ("query", "key", "value")}
    call, chosen = dataclasses.replace(call, **sides, **change), []
    while chosen[-1:] != ["by_branch"]:
        chosen.append(choose_kernel(call, chosen).__name__)
    assert chosen == able
