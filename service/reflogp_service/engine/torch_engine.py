"""The torch engine: a frozen model on one device that scores token sequences.

Knows token budgets, the queue between preparation, device and results, and what to do when memory runs out. It is purely token
ids: nothing here knows text, keys or stores. Called by the scoring job and by anyone who has sequences in hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import transformers

from reflogp_service.engine.compiled import worth_compiling
from reflogp_service.engine.device import copy_to_host, on_device
from reflogp_service.engine.flops import ForwardFlops, matmul_flops_per_second
from reflogp_service.engine.forward import attention_of, forward_pack, forward_padded, padded_batches
from reflogp_service.engine.head import Head
from reflogp_service.engine.load import forget_longest_pass, load_model
from reflogp_service.engine.memory import auto_token_budget
from reflogp_service.engine.out_of_memory import is_out_of_memory, memory_errors
from reflogp_service.engine.packing import Pack, packs
from reflogp_service.engine.selfcheck import SelfCheck, check
from reflogp_service.engine.sequences import NOT_FINITE, Logps, Outcome, Sequence, in_order, problem_of
from reflogp_service.errors import EngineError
from reflogp_store.checkpoint import Checkpoint

#: Sequences that are sorted and packed together. More would find few more to share with and take longer to place.
_WINDOW = 8_192
#: Passes in a row that must fit before a budget that was halved is doubled: what took the memory may be gone, and one pass that
#: is lost in so many costs little where it is not.
_GOOD_PASSES = 100


class TorchEngine:
    """Scores sequences with a reference model.

    Sequences are packed without padding, and what several share (a prompt, earlier turns, a common first sentence) is computed
    once. At load a few sequences are scored packed and plainly; a model that disagrees is scored on a slower path that agrees,
    with a warning (`self_check`).

    Args:
        model: model folder, hub id, or a checkpoint that was read; safetensors weights.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own. "bfloat16-autocast" and "float16-autocast":
            float32 weights under torch.autocast, as accelerate's mixed precision computes.
        device: "auto" (CUDA when there), "cpu", "cuda", "cuda:1", …
        token_budget: tokens of one pass; "auto" asks the free memory. When memory runs out the budget is halved and
            nothing is lost; after many passes that fit it grows again, up to what it was at first.
        lm_head_dtype: "float32" computes the logits in float32; None in the model's dtype. Part of the reference id.
        compile_layers: run decoder layers through torch.compile; None decides by the model's size (compiled.worth_compiling).
        revision: of a hub id.
        trust_remote_code: run modelling code that the checkpoint brings.

    Raises:
        UsageError, CheckpointError: no such model; weights missing, truncated or pickled.
        OutOfMemoryError: the device has no room for it.
        EngineError: the model cannot be loaded.

    Example:
        engine = TorchEngine("./model", dtype="bfloat16")
        [logps] = engine.score([Sequence(prompt_ids=[1, 5, 9], completion_ids=[7, 2])])   # float32, shape (2,)
    """

    def __init__(
        self,
        model: str | Checkpoint,
        dtype: str = "bfloat16",
        device: str = "auto",
        token_budget: int | Literal["auto"] = "auto",
        *,
        lm_head_dtype: str | None = None,
        compile_layers: bool | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if token_budget != "auto" and token_budget < 1:
            raise EngineError(f"token_budget {token_budget}: must be at least 1")
        self._loaded = load_model(model, dtype, device, revision, trust_remote_code)
        self.device = self._loaded.device
        own_head = self._loaded.dtype_name
        if lm_head_dtype not in (None, "float32", own_head):
            raise EngineError(f"lm_head_dtype {lm_head_dtype!r}: use float32, or leave it to the model's {own_head}")
        self._flops = ForwardFlops(self._loaded.model)
        if compile_layers is None:
            compile_layers = worth_compiling(self._loaded.model, self.device)
        self._own_attention = self._loaded.model.config._attn_implementation
        with memory_errors(self.device, "the model was tried"), on_device(self.device):
            self._head = Head(self._loaded.model, lm_head_dtype == "float32", self._loaded.autocast)
            self.self_check: SelfCheck = check(self._head, self._loaded, compile_layers)
            if token_budget == "auto":
                token_budget = auto_token_budget(self._loaded.model, self.device, self._loaded.dtype)
        self.token_budget = self._first_budget = token_budget
        self._good_passes = 0

    def score(self, sequences: list[Sequence], temperature: float = 1.0) -> list[Logps]:
        """token_logps of each sequence: float32 arrays of len(completion_ids), in order.

        Args:
            sequences: prompts and completions as token ids. A prompt holds at least one token: where a model has a BOS token it
                begins with it; without any token before it, a completion's first token has no log-prob.
            temperature: logits are divided by it (RLOO and GRPO compare at their sampling temperature).

        Raises:
            InvalidSequencesError: some cannot be scored; its `results` hold the others' values.
        """
        if not temperature > 0:
            raise EngineError(f"temperature {temperature}: must be above 0")
        problems = self.problems(sequences)
        return in_order(len(sequences), problems, self.stream(sequences, skip=problems, temperature=temperature))

    def problems(self, sequences: list[Sequence]) -> dict[int, str]:
        """Index -> why this model cannot score that sequence; empty when it can score all."""
        found = ((i, problem_of(s, self._loaded.vocab_size, self._loaded.max_positions)) for i, s in enumerate(sequences))
        return {index: problem for index, problem in found if problem}

    def stream(
        self, sequences: list[Sequence], skip: Collection[int] = (), temperature: float = 1.0
    ) -> Iterator[tuple[int, Outcome]]:
        """(index, token_logps) as passes come off the device; as `passes`, one sequence at a time."""
        for landed in self.passes(sequences, skip, temperature):
            yield from landed

    def passes(
        self,
        sequences: list[Sequence],
        skip: Collection[int] = (),
        temperature: float = 1.0,
        before: Callable[[list[int]], None] | None = None,
    ) -> Iterator[list[tuple[int, Outcome]]]:
        """What comes off the device, pass by pass, the longest of each window first: (index, token_logps) of its sequences.

        In the place of values stands why there are none: memory that one sequence alone overfills, numbers that are not finite.
        The next pass is prepared while the device computes, and a pass's values are fetched while the next one runs. Between
        two items the engine may be used for something else.

        Args:
            sequences: ones without `problems`.
            skip: indices to leave out.
            temperature: logits are divided by it.
            before: told the indices of each pass before the device gets it.
        """
        wanted = [i for i in range(len(sequences)) if i not in skip]
        for start in range(0, len(wanted), _WINDOW):
            yield from self._window_passes(sequences, wanted[start : start + _WINDOW], temperature, before)

    def _window_passes(
        self,
        sequences: list[Sequence],
        left: list[int],
        temperature: float,
        before: Callable[[list[int]], None] | None,
    ) -> Iterator[list[tuple[int, Outcome]]]:
        while left:
            done: set[int] = set()
            flying: _Flying | None = None
            for unit in _prepared_ahead(self._units([sequences[i] for i in left])):
                if before is not None:
                    before([left[at] for at, _ in unit.members])
                try:
                    launched = self._launch(unit, temperature)
                except EngineError:
                    if flying is not None:  # what was computed before is not lost
                        yield flying.land(left)
                    raise
                if launched is None and len(unit.members) == 1:
                    [(alone, _)] = unit.members
                    done.add(alone)
                    problem = f"its {unit.tokens} tokens alone do not fit the memory of {self.device}; set a max_length"
                    yield [(left[alone], problem)]
                    continue
                if launched is None:
                    self.token_budget = max(1, min(self.token_budget, unit.tokens) // 2)
                    self._good_passes = 0
                    break  # prepare what is left anew, in smaller packs
                if flying is not None:
                    yield flying.land(left)
                flying = launched
                self._count_good_pass()
                done.update(at for at, _ in unit.members)
            if flying is not None:
                yield flying.land(left)
            left = [index for at, index in enumerate(left) if at not in done]

    def _count_good_pass(self) -> None:
        """Double a budget that was halved, after enough passes that fit; the next packs are made by it."""
        self._good_passes += 1
        if self._good_passes >= _GOOD_PASSES:
            self._good_passes = 0
            self.token_budget = min(2 * self.token_budget, self._first_budget)

    def flops(self, sequence: Sequence) -> float:
        """Floating point operations of one plain forward over this sequence, head only where it predicts."""
        return self._flops(sequence)

    def peak_flops_per_second(self) -> float | None:
        """Matrix product rate of this device in this dtype, measured once; None where memory is too full to measure it."""
        try:
            return matmul_flops_per_second(self.device, self._loaded.product_dtype)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def close(self) -> None:
        """Let go of the weights, so that whoever still holds the engine, a job or a stopped stream, does not hold them.

        What it knows of the model (problems, flops, provenance) can be asked for afterwards; values cannot.
        """
        if self._loaded.model is not None:
            self._loaded = replace(self._loaded, model=None)
            del self._head

    def provenance(self) -> dict[str, Any]:
        """How this engine makes values; stored beside them."""
        return {
            "engine": "torch",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": ".".join(map(str, sys.version_info[:2])),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "dtype": self._loaded.dtype_name,
            "self_check": self.self_check.as_dict(),
            "batch_invariant": False,
        }

    def _units(self, sequences: list[Sequence]) -> Iterator[_Unit]:
        """Passes over all of `sequences` within the present budget: those beyond the rope limit alone, masked ones padded."""
        limit = self._loaded.rope_limit
        groups: list[list[int]] = []
        plain: list[int] = []
        masked: list[int] = []
        for index, sequence in enumerate(sequences):
            if limit is not None and len(sequence) > limit:
                groups.append([index])
            else:
                (plain if sequence.attention_mask is None else masked).append(index)
        for chosen in (*groups, plain, masked):
            for unit in self._shared_units([sequences[index] for index in chosen]):
                yield _Unit(unit.work, tuple((chosen[at], where) for at, where in unit.members), unit.tokens)

    def _shared_units(self, sequences: list[Sequence]) -> Iterator[_Unit]:
        is_masked = bool(sequences) and sequences[0].attention_mask is not None
        if self.self_check.path == "packed" and not is_masked:
            for pack in packs(sequences, self.token_budget):
                yield _Unit(pack, pack.members, len(pack))
            return
        budget = 1 if self.self_check.path == "single" else self.token_budget
        for batch in padded_batches(sequences, budget):
            members, start = [], 0
            for index in batch:
                stop = start + len(sequences[index].completion_ids)
                members.append((index, np.arange(start, stop)))
                start = stop
            chosen = [sequences[index] for index in batch]
            yield _Unit(chosen, tuple(members), len(batch) * max(map(len, chosen)))

    def _launch(self, unit: _Unit, temperature: float) -> _Flying | None:
        """Start a pass; None when memory ran out."""
        model, limit = self._loaded.model, self._loaded.rope_limit
        if limit is not None and len(unit.members) == 1 and unit.tokens > limit:
            forget_longest_pass(model, limit)
        try:
            with on_device(self.device), self._loaded.computing():
                if isinstance(unit.work, Pack):
                    refused = self.self_check.refused_kernels
                    values = forward_pack(model, self._head, unit.work, self.device, temperature, refused)
                else:
                    with attention_of(model, self._own_attention):
                        values = forward_padded(model, self._head, unit.work, self.device, temperature)
            return _Flying.begin(unit, values)
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise EngineError(f"the forward pass failed: {str(error).splitlines()[0]}") from error
        # Outside the handler, where the failed pass's tensors are no longer held by its traceback.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None


@dataclass(frozen=True)
class _Unit:
    """One pass: a pack or a padded batch, where each member's values will be, and its size in tokens."""

    work: Pack | list[Sequence]
    members: tuple[tuple[int, npt.NDArray[np.int64]], ...]
    tokens: int


@dataclass(frozen=True)
class _Flying:
    """A pass whose values are on their way off the device: `values` is host memory, written when `copied` has happened."""

    unit: _Unit
    values: torch.Tensor
    copied: Any

    @classmethod
    def begin(cls, unit: _Unit, values: torch.Tensor) -> _Flying:
        return cls(unit, *copy_to_host(values))

    def land(self, indices: list[int]) -> list[tuple[int, Outcome]]:
        """The pass's values, once they are here; `indices` are the caller's numbers of the members."""
        if self.copied is not None:
            self.copied.synchronize()
        values = self.values.numpy()
        landed: list[tuple[int, Outcome]] = []
        for index, where in self.unit.members:
            logps = values[where]
            landed.append((indices[index], logps if np.isfinite(logps).all() else NOT_FINITE))
        return landed


def _prepared_ahead(units: Iterator[_Unit]) -> Iterator[_Unit]:
    """`units`, each made in the background while the one before it is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="reflogp-pack") as background:
        coming = background.submit(next, units, None)
        while (unit := coming.result()) is not None:
            coming = background.submit(next, units, None)
            yield unit
