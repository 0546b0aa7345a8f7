"""Check models, run passes and call FlexAttention on fake tensors, and record what is compiled (see h100.py)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from unittest import mock

import torch
from transformers import masking_utils

from benchmarks.pairs import drawn_pairs
from reflogp.scoring.torch_engine import attention, selfcheck
from reflogp.scoring.torch_engine.compilation import should_compile
from reflogp.scoring.torch_engine.forward import forward_pack
from reflogp.scoring.torch_engine.head import Head
from reflogp.scoring.torch_engine.load import in_memory
from reflogp.scoring.torch_engine.memory import index_limit
from reflogp.scoring.torch_engine.packing import Pack, packs
from tools.sm90.h100 import DEVICE, Kernel, Record, forget, recorded
from tools.sm90.models import Family


@dataclass(frozen=True)
class Packs:
    """Packs of random tokens with UltraFeedback's lengths: below 128 tokens, a few hundred tokens, and as many as fit."""

    tiny: Pack
    small: Pack
    full: Pack


def draw_packs(most: int = 65_536) -> Packs:
    """Draw packs; the largest has at most `most` tokens."""
    few, many = (drawn_pairs(tokens, vocab_size=32_000).sequences()[:most] for tokens, most in ((200, 4), (80_000, None)))
    [small] = packs(few, 1 << 20, min_shared=4)
    [tiny] = packs([next(sequence for sequence in many if len(sequence) <= 128)], 128)
    return Packs(tiny, small, next(packs(many, most)))


@dataclass
class Compiled:
    """What was compiled for a model.

    Attributes:
        checked: the result of the self-check. All log-probs are 0, so the check finds only kernels that do not compile.
        steps: what each step compiled: "check", then passes over packs ("small", "full", "full again", "tiny"), then the head
            alone ("one row", "temperature").
        mask_calls: number of calls of transformers' `find_packed_sequence_indices` in the step "full again".
        problem: the step that failed, and its error; None if all steps ran.
    """

    family: Family
    checked: selfcheck.SelfCheck | None = None
    steps: dict[str, Record] = field(default_factory=dict)
    mask_calls: int = 0
    problem: str | None = None

    def kernels(self, *steps: str) -> list[Kernel]:
        """Return the kernels of some steps, or of all."""
        return list(chain.from_iterable(made.kernels for name, made in self.steps.items() if not steps or name in steps))


def compile_family(family: Family, drawn: Packs) -> Compiled:
    """Check a model as the engine does, and run passes. What earlier models compiled is forgotten first."""
    forget()
    done = Compiled(family)
    try:
        for name, step in _steps(done, drawn):
            with recorded() as done.steps[name]:
                step()
    except Exception as error:  # a model can fail in any way; the page says how
        done.problem = f"{list(done.steps)[-1]}: {_reason(error)}"
    return done


def _steps(done: Compiled, drawn: Packs) -> Iterator[tuple[str, Callable[[], Any]]]:
    with DEVICE:
        loaded = in_memory(done.family.build())
    head = Head(loaded.model)
    if (most := index_limit(loaded.model)) < len(drawn.full):  # as the engine's token budget
        drawn = draw_packs(most)

    def check() -> None:
        done.checked = selfcheck.check(head, loaded, should_compile(loaded.model, DEVICE))

    def run(pack: Pack) -> None:
        assert done.checked is not None
        forward_pack(loaded.model, head, pack, DEVICE, refused=done.checked.refused_kernels)

    def count_mask_calls() -> None:
        original = masking_utils.find_packed_sequence_indices
        with mock.patch.object(masking_utils, "find_packed_sequence_indices", wraps=original) as calls:
            run(drawn.full)
        done.mask_calls = calls.call_count

    def reduce(rows: int, temperature: float) -> None:
        states = torch.empty(rows, done.family.sizes[0], dtype=done.family.dtype, device=DEVICE)
        indices = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        head.logps(states, indices, indices, temperature)

    yield "check", check
    yield "small", lambda: run(drawn.small)
    yield "full", lambda: run(drawn.full)
    yield "full again", count_mask_calls
    yield "tiny", lambda: run(drawn.tiny)
    yield "one row", lambda: reduce(1, 1.0)
    yield "temperature", lambda: reduce(91, 0.7)


@dataclass(frozen=True)
class Attention:
    """A layer's attention. FlexAttention is compiled again for each combination of these fields.

    Attributes:
        pack: name of the pack (see `Packs`).
    """

    heads: int
    key_heads: int
    size: int
    value_size: int | None = None
    dtype: torch.dtype = torch.bfloat16
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False
    pack: str = "small"

    def call(self, tokens: int) -> attention.Call:
        def states(heads: int, size: int) -> torch.Tensor:
            return torch.empty(1, heads, tokens, size, dtype=self.dtype, device=DEVICE)

        return attention.Call(
            states(self.heads, self.size),
            states(self.key_heads, self.size),
            states(self.key_heads, self.value_size or self.size),
            scale=self.size**-0.5,
            window=self.window,
            softcap=self.softcap,
            sinks=torch.empty(self.heads, dtype=self.dtype, device=DEVICE) if self.sinks else None,
        )


ATTENTIONS = (
    Attention(14, 2, 64),
    Attention(14, 2, 64, pack="tiny"),
    Attention(28, 4, 128),
    Attention(32, 8, 128, window=4096),
    Attention(16, 8, 256, softcap=50.0),
    Attention(16, 8, 256, softcap=50.0, window=4096),
    Attention(16, 16, 192, 128),
    Attention(64, 8, 64, sinks=True),
    Attention(64, 8, 64, sinks=True, window=128),
    Attention(32, 16, 512),
    Attention(28, 4, 128, dtype=torch.float32),
    Attention(16, 16, 192, 128, dtype=torch.float32),
)


@dataclass(frozen=True)
class CompiledAttention:
    """What a call of FlexAttention compiled.

    Attributes:
        chosen: name of the kernel that the engine chooses for this layer.
        problem: the error of the call; None if there was none.
    """

    layer: Attention
    record: Record
    chosen: str
    problem: str | None

    def templates(self) -> list[Kernel]:
        """Return FlexAttention's own kernels, without those that Inductor adds around them."""
        return [kernel for kernel in self.record.kernels if "_tem_" in kernel.name]


@torch.inference_mode()
def compile_attention(layer: Attention, drawn: Packs) -> CompiledAttention:
    layout = attention.PackLayout(getattr(drawn, layer.pack), DEVICE)
    call, problem = layer.call(len(layout.token_ids)), None
    with recorded() as made:
        try:
            attention.flex(layout, call)
        except Exception as error:  # compilers may raise any error
            problem = _reason(error)
    return CompiledAttention(layer, made, attention.choose_kernel(call).__name__, problem)


def _reason(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")
