"""The torch engine: a frozen model on one device that scores token sequences.

Knows token budgets, the queue between preparation, device and results, and what to do when memory runs out. It is purely token
ids: nothing here knows text, keys or stores. Called by the scoring job and by anyone who has sequences in hand.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import transformers

from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine.compiled import worth_compiling
from reflogp.scoring.torch_engine.device import Mark, copy_to_host, on_device
from reflogp.scoring.torch_engine.flops import ForwardFlops, matmul_flops_per_second
from reflogp.scoring.torch_engine.flow import InFlight, Prepared, Unit
from reflogp.scoring.torch_engine.forward import attention_of, forward_pack, forward_padded, padded_batches
from reflogp.scoring.torch_engine.head import Head
from reflogp.scoring.torch_engine.load import LoadedModel, forget_longest_pass, load_model
from reflogp.scoring.torch_engine.memory import auto_token_budget
from reflogp.scoring.torch_engine.operations import Operations
from reflogp.scoring.torch_engine.out_of_memory import is_out_of_memory, memory_errors
from reflogp.scoring.torch_engine.packing import Pack, packs
from reflogp.scoring.torch_engine.selfcheck import SelfCheck, check
from reflogp.scoring.torch_engine.sequences import Logps, Outcome, Sequence, in_order, passes_over, problem_of
from reflogp.store.checkpoint import Checkpoint

#: Sequences that are sorted and packed together. More would find few more to share with and take longer to place.
_WINDOW = 8_192
#: Passes are not made shorter than this, however slow the device is: the products would be too small to be fast.
_LEAST_PASS_TOKENS = 1_024
#: Passes in a row that must fit before a budget that was halved is doubled: what took the memory may be gone, and one pass that
#: is lost in so many costs little where it is not.
_GOOD_PASSES = 100


class TorchEngine:
    """Scores sequences with a reference model.

    Sequences are packed without padding, and what several share (a prompt, earlier turns, a common first sentence) is computed
    once. At load a few sequences are scored packed and plainly; a model that disagrees is scored on a slower path that agrees,
    with a warning (`self_check`).

    Args:
        model: model folder, hub id, or a checkpoint that was read; safetensors weights. Or a model in memory (load.in_memory),
            which has its own dtype and device: those of the arguments are not looked at.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own. "bfloat16-autocast" and "float16-autocast":
            float32 weights under torch.autocast, as accelerate's mixed precision computes.
        device: "auto" (CUDA when there), "cpu", "cuda", "cuda:1", …
        token_budget: tokens of one pass; "auto" asks the free memory. When memory runs out the budget is halved and
            nothing is lost; after many passes that fit it grows again, up to what it was at first.
        lm_head_dtype: "float32" computes the logits in float32; None in the model's dtype. Part of the reference id.
        compile_layers: run decoder layers through torch.compile; None decides by the model's size (compiled.worth_compiling).
        refused_kernels: attention kernels that may not be used, by name (attention.installed_kernels).
        revision: of a hub id.
        trust_remote_code: run modelling code that the checkpoint brings.

    Attributes:
        token_budget: tokens of a pass at most.
        pass_seconds: device time of a pass at most, or None for as long as pays; set it while somebody waits for a turn.

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
        model: str | Checkpoint | LoadedModel,
        dtype: str = "bfloat16",
        device: str = "auto",
        token_budget: int | Literal["auto"] = "auto",
        *,
        lm_head_dtype: str | None = None,
        compile_layers: bool | None = None,
        refused_kernels: Collection[str] = (),
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if token_budget != "auto" and token_budget < 1:
            raise EngineError(f"token_budget {token_budget}: must be at least 1")
        self._loaded = (
            model if isinstance(model, LoadedModel) else load_model(model, dtype, device, revision, trust_remote_code)
        )
        self.device = self._loaded.device
        own_head = self._loaded.dtype_name
        if lm_head_dtype not in (None, "float32", own_head):
            raise EngineError(f"lm_head_dtype {lm_head_dtype!r}: use float32, or leave it to the model's {own_head}")
        self._flops = ForwardFlops(self._loaded.model)
        self._operations = Operations()
        if compile_layers is None:
            compile_layers = worth_compiling(self._loaded.model, self.device)
        self.pass_seconds: float | None = None
        self._tokens_per_second = math.inf
        self._own_attention = self._loaded.model.config._attn_implementation
        with memory_errors(self.device, "the model was tried"), on_device(self.device):
            self._head = Head(self._loaded.model, lm_head_dtype == "float32", self._loaded.autocast)
            self.self_check: SelfCheck = check(self._head, self._loaded, compile_layers, refused_kernels)
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
        """What comes off the device, pass by pass: (index, token_logps) of its sequences. As `flow`, of sequences in hand.

        Args:
            sequences: ones without `problems`.
            skip: indices to leave out.
            temperature: logits are divided by it.
            before: told the indices of each pass before the device gets it.
        """
        return passes_over(sequences, skip, _WINDOW, before, lambda groups, told: self.flow(groups, temperature, told))

    def flow(
        self,
        groups: Iterable[list[Sequence]],
        temperature: float = 1.0,
        before: Callable[[list[int]], None] | None = None,
    ) -> Generator[list[tuple[int, Outcome]]]:
        """What comes off the device, pass by pass, for as long as groups of sequences come.

        In the place of values stands why there are none: memory that one sequence alone overfills, numbers that are not finite.
        A pass is prepared and uploaded while the one before it is computed, across groups too, and its values are fetched while
        the next one runs. Between two items the engine may be used for something else.

        Args:
            groups: sequences without `problems` that are packed together, the longest first; some thousand at a time share and
                fill passes well. Taken in a thread of this engine, and without waiting: an empty group says that there is none
                at the moment. What flies then lands, and after it an empty list is the item.
            temperature: logits are divided by it.
            before: told the numbers of each pass's sequences before the device gets it.

        Yields:
            (number, token_logps) of a pass's sequences, numbered from 0 through all groups.

        Raises:
            EngineError: a pass failed. What was computed before was yielded.
        """
        waiting: dict[int, Sequence] = {}
        again: deque[Unit] = deque()
        flying: InFlight | None = None
        with Prepared(self._units_of_groups(groups, waiting)) as prepared:
            while True:
                try:
                    unit = again.popleft() if again else prepared.take(flying)
                except StopIteration:
                    break
                except (MemoryError, RuntimeError) as error:
                    if flying is not None:
                        yield self._landed(flying, waiting)
                    what = str(error).splitlines()[0] if str(error) else "the host's memory ran out"
                    raise EngineError(f"the next pass could not be prepared: {what}") from error
                if unit is None:
                    yield [] if flying is None else self._landed(flying, waiting)
                    flying = None
                    continue
                places = [place for place, _ in unit.members]
                if unit.tokens > self._pass_limit() and len(places) > 1:
                    again.extendleft(reversed(list(self._units_of(places, waiting))))
                    continue
                if before is not None:
                    before(places)
                try:
                    launched = self._launch(unit, temperature)
                except EngineError:
                    if flying is not None:  # what was computed before is not lost
                        yield self._landed(flying, waiting)
                    raise
                if flying is not None:
                    yield self._landed(flying, waiting)
                flying = launched
                if launched is not None:
                    self._count_good_pass()
                elif len(places) == 1:
                    del waiting[places[0]]
                    problem = f"its {unit.tokens} tokens alone do not fit the memory of {self.device}; set a max_length"
                    yield [(places[0], problem)]
                else:
                    self.token_budget = max(1, min(self.token_budget, unit.tokens) // 2)
                    self._good_passes = 0
                    again.appendleft(unit)
            if flying is not None:
                yield self._landed(flying, waiting)

    def _count_good_pass(self) -> None:
        """Double a budget that was halved, after enough passes that fit; the next packs are made by it."""
        self._good_passes += 1
        if self._good_passes >= _GOOD_PASSES:
            self._good_passes = 0
            self.token_budget = min(2 * self.token_budget, self._first_budget)

    def operations(self) -> Operations:
        """Operations of all passes so far, counted when their values are here. The check at load is not counted."""
        return self._operations

    def peak_flops_per_second(self) -> float | None:
        """Rate of a product of random matrices on this device in this dtype, measured once; None where memory is too short."""
        try:
            with on_device(self.device):
                return matmul_flops_per_second(self.device, self._loaded.product_dtype)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def close(self) -> None:
        """Let go of the weights, so that whoever still holds the engine, a job or a stopped stream, does not hold them.

        What it knows of the model (problems, operations, provenance) can be asked for afterwards; values cannot.
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

    def _landed(self, flying: InFlight, waiting: dict[int, Sequence]) -> list[tuple[int, Outcome]]:
        """A pass's values; its sequences wait no more."""
        try:
            landed = flying.land()
        except RuntimeError as error:  # CUDA says here what went wrong while the pass ran
            raise EngineError(f"the pass did not end: {str(error).splitlines()[0]}") from error
        self._operations += flying.unit.operations
        if flying.unit.tokens >= _LEAST_PASS_TOKENS:
            self._tokens_per_second = flying.tokens_per_second()
        for place, _ in landed:
            del waiting[place]
        return landed

    def _pass_limit(self) -> int:
        """Tokens of a pass at most, now."""
        if self.pass_seconds is None:
            return self.token_budget
        return int(min(self.token_budget, max(_LEAST_PASS_TOKENS, self.pass_seconds * self._tokens_per_second)))

    def _units_of_groups(self, groups: Iterable[list[Sequence]], waiting: dict[int, Sequence]) -> Iterator[Unit | None]:
        """Passes over all groups, whose sequences are numbered and put into `waiting`; None for an empty group."""
        count = 0
        for group in groups:
            if not group:
                yield None
                continue
            places = list(range(count, count + len(group)))
            count += len(group)
            waiting.update(zip(places, group, strict=True))
            yield from self._units_of(places, waiting)

    def _units_of(self, places: list[int], waiting: dict[int, Sequence]) -> Iterator[Unit]:
        for unit in self._units([waiting[place] for place in places]):
            yield replace(unit, members=tuple((places[at], where) for at, where in unit.members))

    def _units(self, sequences: list[Sequence]) -> Iterator[Unit]:
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
                yield replace(unit, members=tuple((chosen[at], where) for at, where in unit.members))

    def _shared_units(self, sequences: list[Sequence]) -> Iterator[Unit]:
        is_masked = bool(sequences) and sequences[0].attention_mask is not None
        if self.self_check.path == "packed" and not is_masked:
            for pack in packs(sequences, self._pass_limit()):
                yield Unit(pack, pack.members, len(pack), self._flops.packed(pack, sequences))
            return
        budget = 1 if self.self_check.path == "single" else self._pass_limit()
        for batch in padded_batches(sequences, budget):
            members, start = [], 0
            for index in batch:
                stop = start + len(sequences[index].completion_ids)
                members.append((index, np.arange(start, stop)))
                start = stop
            chosen = [sequences[index] for index in batch]
            yield Unit(chosen, tuple(members), len(batch) * max(map(len, chosen)), self._flops.padded(chosen))

    def _launch(self, unit: Unit, temperature: float) -> InFlight | None:
        """Start a pass; None when memory ran out."""
        model, limit = self._loaded.model, self._loaded.rope_limit
        if limit is not None and len(unit.members) == 1 and unit.tokens > limit:
            forget_longest_pass(model, limit)
        try:
            began = Mark(self.device)
            with on_device(self.device), self._loaded.computing():
                if isinstance(unit.work, Pack):
                    refused = self.self_check.refused_kernels
                    values = forward_pack(model, self._head, unit.work, self.device, temperature, refused)
                else:
                    with attention_of(model, self._own_attention):
                        values = forward_padded(model, self._head, unit.work, self.device, temperature)
            host, landed = copy_to_host(values)
            return InFlight(unit, host, began, landed)
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise EngineError(f"the forward pass failed: {str(error).splitlines()[0]}") from error
        # Outside the handler, where the failed pass's tensors are no longer held by its traceback.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None
