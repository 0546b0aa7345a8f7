"""Compute attention over packs (see packing.py) with the fastest suitable kernel.

Each token of a pack attends only to tokens of its own sequence.

`packed_attention` is registered with transformers' AttentionInterface as "reflogp_packed", so no model-specific code is needed.
No mask function is registered under this name, so transformers makes no mask. (While making one, it would ask the device
whether the positions are those of a pack, and the host would wait for the answer in each pass.)
Packed attention supports scaling, sliding windows, soft caps and attention sinks.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from reflogp.scoring.torch_engine import cpu_attention
from reflogp.scoring.torch_engine.compilation import any_size
from reflogp.scoring.torch_engine.device import to_device
from reflogp.scoring.torch_engine.memory import is_out_of_memory
from reflogp.scoring.torch_engine.packing import Pack, image_ends

NAME = "reflogp_packed"

#: Maximum number of attention scores that `_scores_by_hand` computes at once: 2**26 float32 numbers take 256 MiB.
_MAX_SCORES = 1 << 26
#: Number of queries, and of keys, in a FlexAttention block (torch's default).
_FLEX_BLOCK = 128
#: Largest head size that FlashAttention's kernels support, and the number by which head sizes must be divisible (see the README
#: of flash-attn).
_FLASH_MOST, _FLASH_MULTIPLE = 256, 8
#: Maximum size of the keys and values that a variable-length kernel reads at once, in bytes, if branches share tokens. Each
#: branch then needs its own copy of the shared keys: 307 completions on a prompt of 4,096 tokens, which fill a pack of 65,536
#: tokens, have 2.7 GB in each layer with 4 key heads of size 128, and 21 GB with 32. The copies are made for a few branches at
#: a time. (Smaller packs would need less memory, too, but would compute the prompt more often: a token of a 7B model takes
#: 22 µs of an H100, and its copies in all layers take 0.06 µs with 4 key heads and 0.5 µs with 32.)
_GATHERED_BYTES = 1 << 30
#: The reason why causal kernels cannot compute some packs with images.
_BOTH_WAYS = "images whose tokens attend to each other in both directions are not supported"


class KernelFailedError(RuntimeError):
    """An attention kernel raised an error. The self-check catches this exception and tries the next kernel."""

    def __init__(self, kernel: str, error: Exception) -> None:
        self.kernel = kernel
        self.reason = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
        super().__init__(f"{kernel}: {self.reason}")


class Varlen(NamedTuple):
    """The arguments of one call of a variable-length kernel, which computes consecutive branches of a pack.

    Attributes:
        rows: the branches' tokens in the pack.
        gather: indices of each branch's keys in the pack, concatenated; None if no branch of the pack shares tokens, so that
            the keys are the branches' own tokens.
        queries, keys: cumulative numbers of the branches' queries and keys (the kernel's cu_seqlens), int32 (branches + 1,).
    """

    rows: slice
    gather: torch.Tensor | None
    queries: torch.Tensor
    keys: torch.Tensor
    longest_query: int
    longest_key: int


class PackLayout:
    """A pack's tensors on the device, uploaded in a single copy before the forward pass and used by every layer.

    Attributes:
        token_ids: ids of the pack's tokens, int64 (tokens,).
        positions: for each token of the pack, its position in its own sequence, int64 (tokens,).
        parents: for each predicted token, the index of the token whose hidden state predicts it, int64 (predictions,).
        targets: ids of the predicted tokens, int64 (predictions,).
        spans: list with a tuple for each branch: the index of the branch's first token, the index after its last token, and the
            number of keys that it shares with earlier branches.
        declined: dict from a kernel's name to the reason why the kernel could not compute a layer. Only `cpu_blocks` is
            recorded, for layers that `by_branch` computed instead, in bfloat16 on a CPU.
    """

    def __init__(self, pack: Pack, device: torch.device, refused: Collection[str] = (), both_ways: bool = False) -> None:
        self.device = device
        self.refused = refused
        self.both_ways = both_ways
        self.spans = [(branch.start, branch.stop, branch.shared) for branch in pack.branches]
        self.layers_seen = 0
        self.windows_seen = 0
        self.kernels: set[str] = set()
        self.declined: dict[str, str] = {}
        self._paths = [branch.path for branch in pack.branches]
        self._offsets = np.cumsum([0, *map(len, self._paths)], dtype=np.int64)
        self._every_place = np.concatenate(self._paths)
        queries = np.array([0, *(stop for _, stop, _ in self.spans)], np.int64)
        # If no branch shares tokens, the keys of each branch are its own tokens in order, and no indices are needed to gather
        # keys.
        places = self._every_place if any(shared for _, _, shared in self.spans) else self._every_place[:0]
        targets = pack.token_ids[pack.predicted]
        arrays = [pack.token_ids, pack.positions, pack.parents, targets, queries, self._offsets, places]
        uploaded = to_device(arrays, device)
        self.token_ids, self.positions, self.parents, self.targets, self._queries, self._keys, self._places = uploaded
        self._pack = pack
        self._ends = image_ends(pack.token_ids, both_ways)
        self._cache: dict[str, Any] = {}

    def path(self, branch: int) -> torch.Tensor:
        """Return the indices of a branch's keys in the pack, int64 (keys,)."""
        if not len(self._places):
            start, stop, _ = self.spans[branch]
            return torch.arange(start, stop, device=self.device)
        return self._places[self._offsets[branch] : self._offsets[branch + 1]]

    def mask(self, branch: int, window: int | None) -> torch.Tensor | None:
        """Return a branch's attention mask, bool (queries, keys), or None if an ordinary causal mask is enough."""
        start, stop, shared = self.spans[branch]
        length = shared + stop - start
        ends = self._ends[start:stop] - start + shared  # indices within the path; no image is divided between branches
        has_images = self.both_ways and bool((ends != np.arange(shared, length) + 1).any())
        if window is not None and window >= length:
            window = None
        if window is None and shared == 0 and not has_images:
            return None

        def make() -> torch.Tensor:
            query = torch.arange(shared, length, device=self.device)[:, None]
            key = torch.arange(length, device=self.device)[None]
            seen = key < torch.from_numpy(ends).to(self.device)[:, None] if has_images else key <= query
            return seen if window is None else seen & (key > query - window)

        made: torch.Tensor = self._once(f"mask {branch} {window}", make)
        return made

    def varlen(self, most_keys: int) -> list[Varlen]:
        """Return the arguments of a variable-length kernel's calls, for a few branches in each call.

        Args:
            most_keys: maximum number of keys in a call if branches share tokens. A branch with more keys is alone in its call.
        """

        def make() -> list[Varlen]:
            calls, first, count = [], 0, len(self.spans)
            while first < count:
                most = self._offsets[first] + most_keys
                end = max(first + 1, int(np.searchsorted(self._offsets, most, "right")) - 1) if len(self._places) else count
                spans = self.spans[first:end]
                calls.append(
                    Varlen(
                        slice(spans[0][0], spans[-1][1]),
                        self._places[self._offsets[first] : self._offsets[end]] if len(self._places) else None,
                        (self._queries[first : end + 1] - self._queries[first]).to(torch.int32),
                        (self._keys[first : end + 1] - self._keys[first]).to(torch.int32),
                        max(stop - start for start, stop, _ in spans),
                        max(map(len, self._paths[first:end])),
                    )
                )
                first = end
            return calls

        made: list[Varlen] = self._once(f"varlen {most_keys}", make)
        return made

    def tree(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the arguments `spans` and `paths` of the CPU kernel (`cpu_attention.attend`)."""
        made: tuple[torch.Tensor, torch.Tensor] = self._once(
            "tree", lambda: (torch.tensor(self.spans), torch.from_numpy(self._every_place))
        )
        return made

    def block_mask(self, window: int | None) -> Any:
        """Return FlexAttention's mask for the pack.

        The tokens of a pack are in depth-first order of the tree of shared prefixes. Therefore, without a sliding window, query
        q attends to key k exactly when k <= q < end[k], where end[k] is the index after the last token of the last branch whose
        path contains token k. If the tokens of an image attend to each other in both directions, the condition k <= q becomes
        k < reach[q], where reach[q] is the index after the last token of the query's image, or q + 1 if the query is a text
        token.
        """
        from torch.nn.attention.flex_attention import BlockMask

        def make() -> Any:
            tokens, blocks = len(self._pack), -(-len(self._pack) // _FLEX_BLOCK)
            last = np.zeros(tokens, np.int64)
            for path, (_, stop, _) in zip(self._paths, self.spans, strict=True):
                last[path] = stop  # stops are ascending, so the last branch whose path contains a token sets the token's end
            [ends, reach], positions = to_device([last, self._ends], self.device), self.positions
            width = None if window is None else _scalar(window, self.device)

            def seen(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
                on_path = (k < reach[q]) & (q < ends[k])
                return on_path if width is None else on_path & (positions[q] - positions[k] < width)

            def extremes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                """Split a tensor of shape (tokens,) into blocks; return the smallest and the largest value of each block."""
                padding = values[-1:].expand(blocks * _FLEX_BLOCK - tokens)
                low, high = torch.cat([values, padding]).view(blocks, _FLEX_BLOCK).aminmax(dim=1)
                return low, high

            # Blocks are compared by their extremes, so the whole (tokens, tokens) mask is never built.
            first = torch.arange(blocks, device=self.device) * _FLEX_BLOCK
            behind = torch.clamp(first + _FLEX_BLOCK, max=tokens)
            least_end, greatest_end = extremes(ends)
            least_reach, greatest_reach = extremes(reach)
            some = (first[None] < greatest_reach[:, None]) & (first[:, None] < greatest_end)
            full = (behind[None] <= least_reach[:, None]) & (behind[:, None] <= least_end)
            full &= behind[None] - first[None] == _FLEX_BLOCK
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
    """Set the layout that packed attention uses in this thread while the `with` block runs."""
    _current.layout = layout
    try:
        yield
    finally:
        _current.layout = None


@dataclass(frozen=True)
class Call:
    """The arguments for computing one layer's attention. The tensors have the shapes that `packed_attention` describes."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    both_ways: bool = False


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the layout differs from pack to pack
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention over the current pack.

    transformers passes all arguments after `attention_mask` by keyword, so these parameters must keep their names.

    Args:
        query: queries, shape (1, heads, tokens, head size).
        key: keys, shape (1, key heads, tokens, head size).
        value: values, shape (1, key heads, tokens, value size).
        attention_mask: must be None, because the pack's layout defines what each token attends to.
        scaling: factor applied to the attention scores; None for 1/sqrt(head size).
        sliding_window: maximum number of keys that a query attends to, including its own key (Mistral,
            arxiv.org/abs/2310.06825); None for no limit.
        softcap: if set, each score becomes softcap * tanh(score / softcap) (Gemma 2, arxiv.org/abs/2408.00118).
        kwargs: arguments that only some models pass. `s_aux`, shape (heads,), contains the attention sinks of gpt-oss: for each
            head, an extra logit that is part of the softmax but has no value vector. A `position_bias`, or `is_causal=False`,
            raises RuntimeError. Other arguments, such as dropout, are ignored.

    Returns:
        The attention output, shape (1, tokens, heads, value size), and None, because no attention weights are returned.

    Raises:
        RuntimeError: the layer has a mask or a position bias, the layer is not causal self-attention, or `packed`
            has not set a layout.
        KernelFailedError: the chosen kernel raised an error other than an out-of-memory error.
    """
    layout: PackLayout | None = getattr(_current, "layout", None)
    if layout is None:
        raise RuntimeError("packed attention was called, but no pack is being computed in this thread")
    if kwargs.get("position_bias") is not None or attention_mask is not None or kwargs.get("is_causal") is False:
        raise RuntimeError("the layer has its own mask or position bias, or is not causal")
    if getattr(module, "is_causal", True) is False or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise RuntimeError("the layer is not causal self-attention")
    layout.layers_seen += 1
    layout.windows_seen += sliding_window is not None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    device = query.device.type
    autocast = torch.is_autocast_enabled(device)
    if autocast:  # autocast casts the inputs of torch's own attention, but not those of other kernels
        query, key, value = (side.to(torch.get_autocast_dtype(device)) for side in (query, key, value))
    call = Call(query, key, value, scale, sliding_window, softcap, kwargs.get("s_aux"), layout.both_ways)
    kernel = choose_kernel(call, layout.refused)
    layout.kernels.add(kernel.__name__)
    # If `problem` is None, cpu_blocks was not chosen because it was refused; the self-check already has the reason.
    if kernel is by_branch and device == "cpu" and query.dtype == torch.bfloat16 and (problem := _cpu_blocks_problem(call)):
        layout.declined[cpu_blocks.__name__] = problem
    try:
        # Autocast stays on for by_branch, so that `_scores_by_hand` rounds in the same way as the model's own attention.
        with torch.autocast(device, enabled=autocast and kernel is by_branch):
            return kernel(layout, call), None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise KernelFailedError(kernel.__name__, error) from error


def choose_kernel(call: Call, refused: Collection[str] = ()) -> Callable[[PackLayout, Call], torch.Tensor]:
    """Return the fastest installed kernel that can compute this layer and whose name is not in `refused`.

    If there is no such kernel, return `by_branch`, even if `refused` contains its name.
    """
    for kernel, is_installed, problem in _kernels_of(call.query.device.type):
        if kernel.__name__ not in refused and problem(call) is None and is_installed():
            return kernel
    return by_branch


def kernel_names(device_type: str) -> list[str]:
    """Return the names of all kernels for a device type ("cuda" or "cpu"), fastest first, including those not installed."""
    return [kernel.__name__ for kernel in (*(kernel for kernel, _, _ in _kernels_of(device_type)), by_branch)]


def installed_kernels(device_type: str = "cuda") -> list[str]:
    """Return the names of the installed kernels for a device type ("cuda" or "cpu"), fastest first."""
    installed = [kernel for kernel, is_installed, _ in _kernels_of(device_type) if is_installed()]
    return [kernel.__name__ for kernel in (*installed, by_branch)]


def by_branch(layout: PackLayout, call: Call) -> torch.Tensor:
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
        return "only bfloat16 is supported"
    if call.softcap is not None or call.sinks is not None:
        return "soft caps and attention sinks are not supported"
    if call.both_ways:
        return _BOTH_WAYS
    return cpu_attention.problem(call.query.shape[-1], call.value.shape[-1])


def cpu_blocks(layout: PackLayout, call: Call) -> torch.Tensor:
    spans, paths = layout.tree()
    return cpu_attention.attend(call.query[0], call.key[0], call.value[0], spans, paths, call.scale, call.window)[None]


def _scores_by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, call: Call
) -> torch.Tensor:
    """Compute softmax(cap(scale q·k)) v with separate matrix products, for layers with a soft cap, sinks, or both.

    Compute in float32, one block of queries at a time, and convert the result to the dtype of the queries. Under autocast, the
    matrix products run in the autocast dtype.
    """
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
    """Call torch.nn.attention.varlen's kernel.

    The kernel's causal mask aligns the last query of each branch with the branch's last key.

    Versions of torch after 2.11 require `enable_gqa=True` for grouped-query attention. Version 2.11 supports grouped-query
    attention, but does not have this argument.
    """
    attend = _torch_varlen()
    keywords = {"scale": call.scale, "window_size": _flash_window(call)}
    if "enable_gqa" in _parameters(attend):
        keywords["enable_gqa"] = call.key.shape[1] != call.query.shape[1]
    return _by_varlen(attend, layout, call, keywords)


def flash_varlen(layout: PackLayout, call: Call) -> torch.Tensor:
    """Call FlashAttention 2's variable-length kernel, which supports soft caps.

    Since version 2.1, the kernel's causal mask aligns the last query of each branch with the branch's last key.
    """
    return _by_flash(_flash_varlen(), layout, call)


def flash3_varlen(layout: PackLayout, call: Call) -> torch.Tensor:
    """Call FlashAttention 3's variable-length kernel for Hopper GPUs; its arguments are the same as FlashAttention 2's."""
    return _by_flash(_flash3_varlen(), layout, call)


def _by_flash(attend: Callable[..., Any] | None, layout: PackLayout, call: Call) -> torch.Tensor:
    assert attend is not None
    keywords: dict[str, Any] = {"softmax_scale": call.scale, "causal": True, "window_size": _flash_window(call)}
    if call.softcap is not None:
        keywords["softcap"] = call.softcap
    return _by_varlen(attend, layout, call, keywords)


def _flash_window(call: Call) -> tuple[int, int]:
    """Return the numbers of keys that a query attends to before and after its own position; -1 means all."""
    return (-1 if call.window is None else call.window - 1, 0)


def _by_varlen(attend: Callable[..., Any], layout: PackLayout, call: Call, keywords: dict[str, Any]) -> torch.Tensor:
    size, width = call.value.shape[-1], call.query.shape[-1]
    # In multi-head latent attention, values are narrower than keys.
    value = call.value if size == width else F.pad(call.value, (0, width - size))
    query, key, value = (_flat(tensor) for tensor in (call.query, call.key, value))
    parts = []
    for rows, gather, queries, keys, longest_query, longest_key in layout.varlen(_GATHERED_BYTES // (2 * key[0].nbytes)):
        own_key, own_value = (key, value) if gather is None else (key[gather], value[gather])
        found = attend(query[rows], own_key, own_value, queries, keys, longest_query, longest_key, **keywords)
        parts.append(found[0] if isinstance(found, tuple) else found)
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[None, ..., :size]


def flex(layout: PackLayout, call: Call) -> torch.Tensor:
    """Call FlexAttention, which supports soft caps and sinks.

    The mask lets several branches attend to the same keys, so shared keys need not be copied for each branch.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    query = call.query
    cap = call.softcap

    def capped(score: torch.Tensor, batch: Any, head: Any, q: Any, k: Any) -> torch.Tensor:
        return score if cap is None else cap * torch.tanh(score / cap)

    found = _compiled_flex(query.device.type)(
        query,
        call.key,
        call.value,
        score_mod=None if cap is None else capped,
        block_mask=layout.block_mask(call.window),
        scale=call.scale,
        enable_gqa=call.key.shape[1] != query.shape[1],
        kernel_options=_flex_options(query) if query.device.type == "cuda" else None,
        return_aux=None if call.sinks is None else AuxRequest(lse=True),
    )
    if call.sinks is None:
        out: torch.Tensor = found
    else:  # a sink is one more term in the softmax's denominator
        plain, aux = found
        out = plain * torch.sigmoid(aux.lse - call.sinks.float()[None, :, None])[..., None].to(plain.dtype)
    return out.transpose(1, 2)


def _flex_options(query: torch.Tensor) -> dict[str, Any]:
    """Return options for FlexAttention's CUDA kernel.

    For packs shorter than 128 tokens, torch would use another kernel, which does not support dynamic shapes (pytorch#147756).

    With torch's three stages of loads in advance, wide heads need more shared memory than the 232,448 bytes of an H100: 279,808
    for float32 latent heads (192 and 128), and 263,168 for bfloat16 heads of 512. With one stage, 131,072 and 98,304
    (tools/sm90 compiles these kernels), which an A100 has, too.
    """
    size, is_float32 = query.shape[-1], query.dtype == torch.float32
    is_wide = size > 128 if is_float32 else size > 256
    return {"BACKEND": "TRITON", "num_stages": 1} if is_wide else {"BACKEND": "TRITON"}


def _block_lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key blocks that each query block reads, in FlexAttention's format.

    The first tensor, shape (1, 1, query blocks), contains the number of key blocks that each query block reads. The second
    tensor has the shape (1, 1, query blocks, key blocks): the row of a query block begins with the indices of the key blocks
    that it reads, and the rest of the row is ignored.
    """
    counts = blocks.sum(1, dtype=torch.int32)
    indices = torch.argsort((~blocks).to(torch.int8), dim=1, stable=True).to(torch.int32)
    return counts[None, None], indices[None, None]


@cache
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    """Return a number as a zero-dimensional tensor on a device, for use in a mask function that FlexAttention compiles."""
    with torch.inference_mode(False):
        return torch.tensor(value, device=device)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor (1, heads, tokens, size) to a contiguous tensor (tokens, heads, size)."""
    return tensor[0].transpose(0, 1).contiguous()


@cache
def _torch_varlen() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

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
def _flash3_varlen() -> Callable[..., Any] | None:
    try:
        if torch.cuda.get_device_capability()[0] != 9:  # FlashAttention 3's kernels are built for Hopper only
            return None
        from flash_attn_interface import flash_attn_varlen_func
    except (ImportError, RuntimeError, AssertionError):
        return None
    found: Callable[..., Any] = flash_attn_varlen_func
    return found


def _varlen_problem(call: Call) -> str | None:
    size = call.query.shape[-1]
    if call.query.dtype not in (torch.bfloat16, torch.float16):
        return "only bfloat16 and float16 are supported"
    if size > _FLASH_MOST or size % _FLASH_MULTIPLE or call.value.shape[-1] > size:
        return f"head sizes {size} (keys) and {call.value.shape[-1]} (values) are not supported"
    if call.both_ways:
        return _BOTH_WAYS
    return "attention sinks are not supported" if call.sinks is not None else None


def _torch_varlen_problem(call: Call) -> str | None:
    return "soft caps are not supported" if call.softcap is not None else _varlen_problem(call)


class _Kernel(NamedTuple):
    compute: Callable[[PackLayout, Call], torch.Tensor]
    is_installed: Callable[[], bool]
    problem: Callable[[Call], str | None]


#: Kernels for each device type, fastest first. `by_branch` is the last resort on every device and can compute any layer.
_CPU_KERNELS = (_Kernel(cpu_blocks, lambda: cpu_attention.problem(64, 64) is None, _cpu_blocks_problem),)
_CUDA_KERNELS = (
    _Kernel(flash3_varlen, lambda: _flash3_varlen() is not None, _varlen_problem),
    _Kernel(torch_varlen, lambda: True, _torch_varlen_problem),
    _Kernel(flash_varlen, lambda: _flash_varlen() is not None, _varlen_problem),
    _Kernel(flex, lambda: True, lambda call: None),
)


def _kernels_of(device_type: str) -> tuple[_Kernel, ...]:
    return _CPU_KERNELS if device_type == "cpu" else _CUDA_KERNELS


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


@cache
def _compiled_flex(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    chosen: Any = any_size(flex_attention) if device_type == "cuda" else flex_attention
    return cast(Callable[..., Any], chosen)


AttentionInterface.register(NAME, packed_attention)
