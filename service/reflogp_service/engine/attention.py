"""Attention over packs: each branch's queries attend to the keys on its own path. One place decides which kernel runs.

Registered with transformers' AttentionInterface as "reflogp_packed", so a model needs no code of its own; what a layer passes
(scaling, sliding window, soft cap, sinks) is honoured here. Knows packs and kernels, not models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from reflogp_service.engine import cpu_attention
from reflogp_service.engine.packing import Pack

NAME = "reflogp_packed"

#: Scores held at once by the kernel for soft caps and sinks, in float32 numbers: 2**26 are 256 MiB.
_MAX_SCORES = 1 << 26
#: Queries and keys of one FlexAttention block, torch's default.
_FLEX_BLOCK = 128


class UnsupportedAttentionError(RuntimeError):
    """A layer asks for something that packed attention does not do. The engine then takes the padded path."""


class PackLayout:
    """A pack's branches as tensors on a device, made once per pack and used by every layer."""

    def __init__(self, pack: Pack, device: torch.device) -> None:
        self.device = device
        self.spans = [(branch.start, branch.stop, branch.shared) for branch in pack.branches]
        self.layers_seen = 0
        self.windows_seen = 0
        self.kernels: set[str] = set()
        self.declined: dict[str, str] = {}
        self._paths = [branch.path for branch in pack.branches]
        self._pack = pack
        self._cache: dict[str, Any] = {}

    def path(self, branch: int) -> torch.Tensor:
        """Places of the branch's keys, int64."""
        made: torch.Tensor = self._once(f"path {branch}", lambda: torch.from_numpy(self._paths[branch]).to(self.device))
        return made

    def mask(self, branch: int, window: int | None) -> torch.Tensor | None:
        """Which keys each of a branch's queries sees, bool (queries, keys); None where plain causality says it."""
        start, stop, shared = self.spans[branch]
        length = shared + stop - start
        if window is not None and window >= length:
            window = None
        if window is None and shared == 0:
            return None

        def make() -> torch.Tensor:
            query = torch.arange(shared, length, device=self.device)[:, None]
            key = torch.arange(length, device=self.device)[None]
            seen = key <= query
            return seen if window is None else seen & (key > query - window)

        made: torch.Tensor = self._once(f"mask {branch} {window}", make)
        return made

    def varlen(self) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, int, int]:
        """(keys' places or None where every token is its own key, cu_seqlens of queries, of keys, longest of each)."""

        def make() -> Any:
            queries = torch.tensor([0, *(stop for _, stop, _ in self.spans)], dtype=torch.int32, device=self.device)
            lengths = [len(path) for path in self._paths]
            keys = torch.tensor([0, *lengths], device=self.device).cumsum(0).to(torch.int32)
            gather = None
            if any(shared for _, _, shared in self.spans):
                gather = torch.cat([torch.from_numpy(path) for path in self._paths]).to(self.device)
            return gather, queries, keys, max(stop - start for start, stop, _ in self.spans), max(lengths)

        made: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, int, int] = self._once("varlen", make)
        return made

    def tree(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(int64 (branches, 3): start, stop and keys before; int64: every branch's keys' places, one branch after another)."""
        made: tuple[torch.Tensor, torch.Tensor] = self._once(
            "tree", lambda: (torch.tensor(self.spans), torch.cat([torch.from_numpy(path) for path in self._paths]))
        )
        return made

    def block_mask(self, window: int | None) -> Any:
        """FlexAttention's mask of the pack.

        Packs are laid out in depth-first order, so query q sees key k exactly when k <= q < end[k], where end[k] is the place
        behind the last token that descends from k.
        """
        from torch.nn.attention.flex_attention import BlockMask

        def make() -> Any:
            tokens, blocks = len(self._pack), -(-len(self._pack) // _FLEX_BLOCK)
            last = torch.zeros(tokens, dtype=torch.int64)
            for path, (_, stop, _) in zip(self._paths, self.spans, strict=True):
                last[torch.from_numpy(path)] = stop  # later branches come later, so the last writer is right
            ends, positions = last.to(self.device), torch.from_numpy(self._pack.positions).to(self.device)

            def seen(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
                on_path = (k <= q) & (q < ends[k])
                return on_path if window is None else on_path & (positions[q] - positions[k] < window)

            def extremes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                """Least and greatest of each block's values."""
                padding = values[-1:].expand(blocks * _FLEX_BLOCK - tokens)
                low, high = torch.cat([values, padding]).view(blocks, _FLEX_BLOCK).aminmax(dim=1)
                return low, high

            # Block against block, from each block's extremes: the whole (tokens, tokens) mask never exists.
            first = torch.arange(blocks, device=self.device) * _FLEX_BLOCK
            behind = torch.clamp(first + _FLEX_BLOCK, max=tokens)
            least_end, greatest_end = extremes(ends)
            before = first[:, None] > first[None]
            some = (before & (first[:, None] < greatest_end)) | torch.eye(blocks, dtype=torch.bool, device=self.device)
            full = before & (behind[:, None] <= least_end) & (behind[None] - first[None] == _FLEX_BLOCK)
            if window is not None:
                lowest, highest = extremes(positions)
                some &= lowest[:, None] - highest < window
                full &= highest[:, None] - lowest < window
            partial = some & ~full
            return BlockMask.from_kv_blocks(
                *_block_lists(partial), *_block_lists(full), BLOCK_SIZE=_FLEX_BLOCK, mask_mod=seen, seq_lengths=(tokens, tokens)
            )

        return self._once(f"block mask {window}", make)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]


_current = threading.local()


@contextmanager
def packed(layout: PackLayout) -> Iterator[None]:
    """While the block runs, this thread's packed attention follows `layout`."""
    _current.layout = layout
    try:
        yield
    finally:
        _current.layout = None


@dataclass(frozen=True)
class Call:
    """What one layer asks of attention; shapes as in `packed_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the layout differs from pack to pack
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function for packs.

    Args:
        query: (1, heads, tokens, head size); key, value: (1, key heads, tokens, head size).
        attention_mask: None; the pack's layout is the mask.
        scaling: of the scores; 1/sqrt(head size) when None.
        sliding_window: keys that a query sees, itself included (Mistral, arxiv.org/abs/2310.06825).
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2, arxiv.org/abs/2408.00118).
        s_aux: one logit per head that joins the softmax and takes no value (attention sinks of gpt-oss), (heads,).

    Returns:
        (1, tokens, heads, head size), None.

    Raises:
        UnsupportedAttentionError: position biases, bidirectional layers, or no pack at hand.
    """
    layout: PackLayout | None = getattr(_current, "layout", None)
    if layout is None:
        raise UnsupportedAttentionError("packed attention outside of a pack")
    if kwargs.get("position_bias") is not None or attention_mask is not None or kwargs.get("is_causal") is False:
        raise UnsupportedAttentionError("the layer brings a mask or a position bias of its own")
    if getattr(module, "is_causal", True) is False or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedAttentionError("the layer is not causal self-attention")
    layout.layers_seen += 1
    layout.windows_seen += sliding_window is not None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    call = Call(query, key, value, scale, sliding_window, softcap, s_aux)
    kernel = choose_kernel(call)
    layout.kernels.add(kernel.__name__)
    if kernel is by_branch and query.device.type == "cpu" and query.dtype == torch.bfloat16:
        layout.declined[cpu_blocks.__name__] = str(_cpu_blocks_problem(call))
    return kernel(layout, call), None


def choose_kernel(call: Call) -> Callable[[PackLayout, Call], torch.Tensor]:
    """The one decision about kernels: what can do this layer, fastest first."""
    query, value = call.query, call.value
    if query.device.type == "cpu" and _cpu_blocks_problem(call) is None:
        return cpu_blocks
    if query.device.type == "cuda" and query.shape[-1] == value.shape[-1]:
        half = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256
        if half and call.sinks is None and call.softcap is None and _torch_varlen() is not None:
            return torch_varlen
        if half and call.sinks is None and _flash_varlen() is not None:
            return flash_varlen
        return flex
    return by_branch


def installed_kernels() -> list[str]:
    """Names of the kernels that `choose_kernel` can take for some layer on a CUDA device, the fastest first."""
    optional = {"torch_varlen": _torch_varlen(), "flash_varlen": _flash_varlen()}
    return [*(name for name, kernel in optional.items() if kernel is not None), "flex", "by_branch"]


def by_branch(layout: PackLayout, call: Call) -> torch.Tensor:
    """One attention call per branch; any device, dtype and variant."""
    query, key, value = call.query, call.key, call.value
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for branch, (start, stop, shared) in enumerate(layout.spans):
        q = query[:, :, start:stop]
        if shared:
            path = layout.path(branch)
            k, v = key.index_select(2, path), value.index_select(2, path)
        else:
            k, v = key[:, :, start:stop], value[:, :, start:stop]
        mask = layout.mask(branch, call.window)
        if call.softcap is None and call.sinks is None:
            grouped = k.shape[1] != q.shape[1]
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=call.scale, enable_gqa=grouped
            )
        else:
            attended = _scores_by_hand(q, k, v, mask, call)
        out[0, start:stop] = attended[0].transpose(0, 1)
    return out


def _cpu_blocks_problem(call: Call) -> str | None:
    if call.query.dtype != torch.bfloat16:
        return "only for bfloat16"
    if call.softcap is not None or call.sinks is not None:
        return "the layer has a soft cap or sinks"
    return cpu_attention.problem(call.query.shape[-1], call.value.shape[-1])


def cpu_blocks(layout: PackLayout, call: Call) -> torch.Tensor:
    """All branches at once in bfloat16 on a CPU that multiplies it (cpu_attention.py)."""
    spans, paths = layout.tree()
    return cpu_attention.attend(call.query[0], call.key[0], call.value[0], spans, paths, call.scale, call.window)[None]


def _scores_by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, call: Call
) -> torch.Tensor:
    """softmax(cap(q·k)) with sinks, in float32, some queries at a time. Gives the queries' dtype back."""
    heads, length = query.shape[1], key.shape[2]
    repeat = heads // key.shape[1]
    key, value = (side.float().repeat_interleave(repeat, 1) for side in (key, value))
    step = max(1, _MAX_SCORES // (heads * length))
    parts = []
    for start in range(0, query.shape[2], step):
        part = query[:, :, start : start + step].float()
        rows = part.shape[2]
        scores = torch.matmul(part, key.transpose(2, 3)) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if mask is None:
            seen = torch.ones(rows, length, dtype=torch.bool, device=query.device).tril(start)
        else:
            seen = mask[start : start + rows]
        scores = scores.masked_fill(~seen, float("-inf"))
        if call.sinks is None:
            weights = torch.softmax(scores, -1)
        else:
            sink = call.sinks.float().reshape(1, -1, 1, 1).expand(1, heads, rows, 1)
            weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
        parts.append(torch.matmul(weights, value))
    return torch.cat(parts, 2).to(query.dtype)


def torch_varlen(layout: PackLayout, call: Call) -> torch.Tensor:
    """torch's own variable-length attention (torch.nn.attention.varlen): causal, aligned at each branch's last token."""
    attend = _torch_varlen()
    assert attend is not None
    grouped = call.key.shape[1] != call.query.shape[1]
    left = -1 if call.window is None else call.window - 1
    out: torch.Tensor = attend(*_varlen(layout, call), scale=call.scale, window_size=(left, 0), enable_gqa=grouped)
    return out[None]


def flash_varlen(layout: PackLayout, call: Call) -> torch.Tensor:
    """FlashAttention's variable-length kernel (flash-attn >= 2.1 aligns causality at the last token), with soft caps."""
    attend = _flash_varlen()
    assert attend is not None
    left = -1 if call.window is None else call.window - 1
    out: torch.Tensor = attend(
        *_varlen(layout, call), softmax_scale=call.scale, causal=True, window_size=(left, 0), softcap=call.softcap or 0.0
    )
    return out[None]


def _varlen(layout: PackLayout, call: Call) -> tuple[Any, ...]:
    """What both variable-length kernels take first: (queries, keys, values, cu_seqlens and longest of queries and keys)."""
    gather, cu_queries, cu_keys, longest_query, longest_key = layout.varlen()
    query, key, value = (_flat(tensor) for tensor in (call.query, call.key, call.value))
    if gather is not None:
        key, value = key[gather], value[gather]
    return query, key, value, cu_queries, cu_keys, longest_query, longest_key


def flex(layout: PackLayout, call: Call) -> torch.Tensor:
    """FlexAttention over the whole pack: no keys are gathered, the tree is the mask. Soft caps and sinks included."""
    query, window, softcap = call.query, call.window, call.softcap

    def capped(score: torch.Tensor, batch: Any, head: Any, q: Any, k: Any) -> torch.Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    out, lse = _compiled_flex(query.device.type)(
        query,
        call.key,
        call.value,
        score_mod=capped,
        block_mask=layout.block_mask(window),
        scale=call.scale,
        enable_gqa=call.key.shape[1] != query.shape[1],
        return_lse=True,
    )
    if call.sinks is not None:  # one more term in the denominator
        out = out * torch.sigmoid(lse - call.sinks.float()[None, :, None])[..., None].to(out.dtype)
    attended: torch.Tensor = out.transpose(1, 2)
    return attended


def _block_lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which key blocks each query block reads, as FlexAttention takes them: counts (1, 1, n) and indices (1, 1, n, n)."""
    counts = blocks.sum(1, dtype=torch.int32)
    indices = torch.argsort((~blocks).to(torch.int8), dim=1, stable=True).to(torch.int32)
    return counts[None, None], indices[None, None]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """(1, heads, tokens, size) -> (tokens, heads, size), contiguous."""
    return tensor[0].transpose(0, 1).contiguous()


@cache
def _torch_varlen() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found: Any = varlen_attn
    return cast(Callable[..., Any], found)


@cache
def _flash_varlen() -> Callable[..., Any] | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    found: Callable[..., Any] = flash_attn_varlen_func
    return found


@cache
def _compiled_flex(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    chosen: Any = torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention
    return cast(Callable[..., Any], chosen)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """transformers' mask function for packs: the layout is the mask."""


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _no_mask)
