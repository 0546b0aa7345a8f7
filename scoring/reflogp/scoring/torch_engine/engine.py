"""Score token sequences with a frozen model on one device.

The engine chooses the size of each forward pass and recovers when memory runs out. While the device computes a pass, the engine
prepares the next pass and copies the results of the previous one. The engine's input consists of token ids and images;
texts, row keys and stores are handled by other modules.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import transformers

from reflogp.scoring.errors import EngineError, PictureError
from reflogp.scoring.torch_engine.compilation import should_compile
from reflogp.scoring.torch_engine.device import Mark, copy_to_host, on_device
from reflogp.scoring.torch_engine.flow import InFlight, Prepared, Unit
from reflogp.scoring.torch_engine.forward import (
    attention_names,
    attention_of,
    forward_pack,
    forward_padded,
    forward_single,
    padded_batches,
)
from reflogp.scoring.torch_engine.head import Head
from reflogp.scoring.torch_engine.images import ImageFeatures, TooManyPixelsError
from reflogp.scoring.torch_engine.load import LoadedModel, forget_longest_pass, load_model
from reflogp.scoring.torch_engine.memory import auto_token_budget, is_out_of_memory, memory_errors
from reflogp.scoring.torch_engine.packing import Pack, packs
from reflogp.scoring.torch_engine.selfcheck import (
    IMAGE_CHECKS,
    ImageCheck,
    SelfCheck,
    check,
    check_images,
    check_top,
    require_causal,
)
from reflogp.scoring.torch_engine.sequences import Logps, Outcome, Sequence, TokenCounts, in_order, passes_over, problem_of
from reflogp.store.checkpoint import Checkpoint
from reflogp.store.schema import check_top_k
from reflogp.store.texts import counted, first_line, short_repr

#: Number of sequences that are sorted and packed together. Packing more sequences together would take longer, but would hardly
#: increase the number of shared tokens.
_WINDOW = 8_192
#: Minimum of the limit that the engine computes from `pass_seconds`, in tokens. The matrix products of passes with fewer tokens
#: are inefficient. The speed of such passes is therefore not used to compute the limit.
_LEAST_PASS_TOKENS = 1_024
#: Number of consecutive passes that must fit in memory before a halved budget is doubled again. By then, other processes may
#: have freed memory. If they have not, the next pass may fail, which costs little compared with this many passes.
_GOOD_PASSES = 100


class TorchEngine:
    """Scores sequences with a reference model.

    Sequences are packed without padding, and tokens that several sequences share (a prompt, earlier turns, a common first
    sentence) are processed once. When the model is loaded, a few sequences are scored both packed and one at a time. If packing
    fails or changes their log-probs, the engine issues a warning and scores all sequences with a slower method that gives the
    right log-probs (see `self_check`).

    Args:
        model: model folder, hub id, or a checkpoint from `read_checkpoint`. The weights must be in safetensors files. To use a
            certain revision of a model from the hub, pass `resolve_model(model, revision)`. A model that is already in memory
            (see `load.in_memory`) works too. It keeps its dtype and device, and the arguments `dtype` and `device` are ignored.
        dtype: "float32", "bfloat16", "float16", or "checkpoint" for the dtype in config.json. "bfloat16-autocast" and
            "float16-autocast" use float32 weights under torch.autocast, like accelerate's mixed precision.
        device: "auto" (CUDA if available), "cpu", "cuda", "cuda:1", …
        token_budget: maximum number of tokens in one pass; "auto" computes it from the free memory. A sequence that is longer
            than the budget is scored in a pass of its own. When memory runs out, the budget is halved and the pass is retried,
            so no values are lost. After many passes that fit in memory, the budget grows again, up to its initial value.
        lm_head_dtype: "float32" to compute the logits in float32; None for the model's dtype. The dtype of the logits is part
            of the reference id.
        compile_layers: whether to run the decoder layers through torch.compile; None lets the engine decide based on the device
            and the model (`compilation.should_compile`).
        refused_kernels: names of attention kernels that must not be used (`attention.installed_kernels` lists the names).
        trust_remote_code: whether to run modeling code from the checkpoint.
        top_k: number of most probable tokens to compute at each completion position, at most 256. The values of a sequence are
            then a TopLogps.

    Attributes:
        token_budget: current maximum number of tokens in a pass.
        pass_seconds: approximate limit on the device time of each pass, in seconds; None for no limit. The engine converts it
            to a number of tokens (at least 1,024), using the speed of earlier passes. Set a limit while other work is waiting
            for the engine, so that this work need not wait for a long pass.
        self_check: result of the self-check that ran when the model was loaded.
        image_check: result of the check that decides how sequences with images are scored; None until the check has run. The
            check scores the first few of these sequences twice: packed, and one at a time.

    Raises:
        UsageError: the model does not exist, or `dtype` is unknown.
        CheckpointError: the model's weights are missing, truncated or pickled.
        OutOfMemoryError: the model does not fit in the device's memory.
        EngineError: another argument is invalid, or the model cannot be loaded for another reason.

    Examples:
        >>> from reflogp.scoring import Sequence, TorchEngine
        >>> engine = TorchEngine("./sft-model", dtype="bfloat16", device="cpu")
        >>> engine
        TorchEngine(... in bfloat16 on cpu, packed path, at most ... tokens per pass)
        >>> [logps] = engine.score([Sequence(prompt_ids=[1, 5, 9], completion_ids=[7, 2])])
        >>> logps.dtype, logps.shape
        (dtype('float32'), (2,))
        >>> engine.close()
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
        trust_remote_code: bool = False,
        top_k: int = 0,
    ) -> None:
        check_top_k(top_k)
        if token_budget != "auto" and token_budget < 1:
            raise EngineError(f"token_budget {token_budget}: must be at least 1")
        self._loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype, device, trust_remote_code)
        self.device = self._loaded.device
        own_head = self._loaded.dtype_name
        if lm_head_dtype not in (None, "float32", own_head):
            raise EngineError(f"lm_head_dtype {lm_head_dtype!r}: use 'float32', or omit it for the model's dtype, {own_head}")
        self._token_counts = TokenCounts()
        if compile_layers is None:
            compile_layers = should_compile(self._loaded.model, self.device)
        self.pass_seconds: float | None = None
        self.image_check: ImageCheck | None = None
        self._features = ImageFeatures(self._loaded.model, self.device)
        self._tokens_per_second = math.inf
        doing = "the self-check was running"
        with memory_errors(self.device, doing), on_device(self.device), self._loaded.computing():
            require_causal(self._loaded)
            self._own_attention = attention_names(self._loaded.model.config)
            self._head = Head(self._loaded.model, lm_head_dtype == "float32", self._loaded.autocast)
            self.self_check: SelfCheck = check(self._head, self._loaded, compile_layers, refused_kernels)
            self._other_head = lm_head_dtype if lm_head_dtype not in (None, own_head) else None
            if self._head.logits is None or self.self_check.path == "single":
                self._require_own_head()
            if top_k > self._loaded.vocab_size:
                raise EngineError(f"top_k {top_k}: the model has only {self._loaded.vocab_size} tokens")
            self.top_k = self._head.top_k = top_k
            if (problem := check_top(self._head, self._loaded)) is not None:
                self.self_check.rejected["top_k"] = problem
                self._require_own_head()
            if token_budget == "auto":
                token_budget = auto_token_budget(self._loaded.model, self.device, self._loaded.dtype)
        self.token_budget = self._first_budget = token_budget
        self._good_passes = 0

    def _require_own_head(self) -> None:
        if self._other_head is not None:
            raise EngineError(
                f"lm_head_dtype {self._other_head!r}: only the model's own code computes its logits, in "
                f"{self._loaded.dtype_name}; omit it"
            )

    def __repr__(self) -> str:
        name = "closed" if self._loaded.model is None else type(self._loaded.model).__name__
        path, limit = self.self_check.path, counted(self.token_budget, "token")
        return short_repr(
            "TorchEngine", f"{name} in {self._loaded.dtype_name} on {self.device}, {path} path, at most {limit} per pass"
        )

    def score(self, sequences: list[Sequence], temperature: float = 1.0) -> list[Logps]:
        """Return a list of the sequences' token_logps, in the order of `sequences`.

        A sequence's token_logps are a float32 array of length len(completion_ids).

        Args:
            sequences: prompts and completions as token ids. A prompt needs at least one token, because the first token of the
                completion is predicted from the token before it. If the model has a BOS token, begin each prompt with it.
            temperature: the logits are divided by this number (RLOO and GRPO compute log-probs at their sampling temperature).

        Raises:
            InvalidSequencesError: some sequences cannot be scored. The error's `results` contain the values of all other
                sequences.
            EngineError: the temperature is not above 0, or a pass failed.
        """
        if not temperature > 0:
            raise EngineError(f"temperature {temperature}: must be above 0")
        problems = self.problems(sequences)
        return in_order(len(sequences), problems, self.stream(sequences, skip=problems, temperature=temperature))

    def problems(self, sequences: list[Sequence]) -> dict[int, str]:
        """Find the sequences that cannot be scored; return a dictionary from their indices to the reasons."""
        found = ((i, problem_of(s, self._loaded.vocab_size, self._loaded.max_positions)) for i, s in enumerate(sequences))
        return {index: problem for index, problem in found if problem}

    def stream(
        self, sequences: list[Sequence], skip: Collection[int] = (), temperature: float = 1.0
    ) -> Iterator[tuple[int, Outcome]]:
        for landed in self.passes(sequences, skip, temperature):
            yield from landed

    def passes(
        self,
        sequences: list[Sequence],
        skip: Collection[int] = (),
        temperature: float = 1.0,
    ) -> Iterator[list[tuple[int, Outcome]]]:
        return passes_over(sequences, skip, _WINDOW, lambda groups: self.flow(groups, temperature))

    def flow(
        self,
        groups: Iterable[list[Sequence]],
        temperature: float = 1.0,
    ) -> Generator[list[tuple[int, Outcome]]]:
        """Score groups of sequences as they arrive; yield the outcomes of each pass when it finishes.

        Each pass is prepared while the previous pass is computed, even if the two passes belong to different groups. The values
        of a pass are copied to the host while the next pass runs. While the generator is suspended at a yield, the caller may
        use the engine for other work.

        Args:
            groups: lists of sequences that this model can score (see `problems`). The sequences of a group are packed together,
                in an order that the engine chooses. Groups should contain a few thousand sequences. Most shared prefixes are
                then computed only once, and most passes are full. The engine iterates over `groups` in a background thread. The
                iterator must not block. If no sequences are available yet, it must yield an empty group. For an empty group,
                `flow` waits for the pass in flight and yields its outcomes, or an empty list if no pass is in flight.
        """
        waiting: dict[int, Sequence] = {}
        again: deque[Unit] = deque()
        flying: InFlight | None = None
        with self._features.kept(), Prepared(self._units_of_groups(groups, waiting)) as prepared:
            while True:
                try:
                    unit = again.popleft() if again else prepared.take(flying)
                except StopIteration:
                    break
                except (MemoryError, RuntimeError) as error:
                    if flying is not None:
                        yield self._landed(flying, waiting)
                    what = str(error).splitlines()[0] if str(error) else "the host's memory ran out"
                    raise EngineError(f"the next forward pass could not be prepared: {what}") from error
                if unit is None:
                    yield [] if flying is None else self._landed(flying, waiting)
                    flying = None
                    continue
                places = [place for place, _ in unit.members]
                try:
                    if (unit.tokens > self._pass_limit() and len(places) > 1) or self._is_outdated(unit):
                        again.extendleft(reversed(list(self._units_of(places, waiting))))
                        continue
                    launched = self._launch(unit, temperature)
                except PictureError as error:
                    lost = [place for place in places if error.digest in _digests(waiting[place])]
                    for place in lost:
                        del waiting[place]
                    yield [(place, str(error)) for place in lost]
                    others = [place for place in places if place in waiting]
                    again.extendleft(reversed(list(self._units_of(others, waiting))))
                    continue
                except TooManyPixelsError:
                    for half in (places[len(places) // 2 :], places[: len(places) // 2]):
                        again.extendleft(reversed(list(self._units_of(half, waiting))))
                    continue
                except EngineError:
                    if flying is not None:  # do not lose the values of the previous pass
                        yield self._landed(flying, waiting)
                    raise
                if flying is not None:
                    yield self._landed(flying, waiting)
                flying = launched
                if launched is not None:
                    self._count_good_pass()
                elif len(places) == 1:
                    del waiting[places[0]]
                    problem = (
                        f"the sequence has {unit.tokens} tokens and does not fit in the memory of {self.device}, even when it "
                        "is scored alone; set max_length to a smaller number of tokens"
                    )
                    yield [(places[0], problem)]
                else:
                    self.token_budget = max(1, min(self.token_budget, unit.tokens) // 2)
                    self._good_passes = 0
                    again.appendleft(unit)
            if flying is not None:
                yield self._landed(flying, waiting)

    def _is_outdated(self, unit: Unit) -> bool:
        """Return True if a check of images, which may run now, has shown that the unit must be scored in another way."""
        if unit.with_images is not None:
            return not self._agrees_on_images(unit)
        if isinstance(unit.work, Pack) or unit.work[0].images is None:
            return False
        return self._is_single(has_images=True) and not unit.is_single

    def _agrees_on_images(self, unit: Unit) -> bool:
        """Return True if packing does not change the values of sequences with images, so that such sequences may be packed.

        This is checked once, on the first sequences with images. If memory runs out, the check is retried with a single
        sequence. If memory runs out again, `image_check` stays None and True is returned. `_launch` then treats the pass as one
        that does not fit, and the check is repeated on the next pass with images.
        """
        assert isinstance(unit.work, Pack) and unit.with_images is not None
        sequences = [unit.with_images[index] for index, _ in unit.work.members]
        for count in (IMAGE_CHECKS, 1):
            if self.image_check is not None:
                break
            try:
                with on_device(self.device), self._loaded.computing(), self._head.without_top():
                    self.image_check = check_images(
                        self._head,
                        self._loaded,
                        self._features,
                        sequences[:count],
                        self.self_check.refused_kernels,
                        self._own_attention,
                    )
            except (RuntimeError, MemoryError, ValueError, TypeError, LookupError) as error:
                if not is_out_of_memory(error):
                    first = first_line(error)
                    raise EngineError(f"sequences with images could not be scored: {first}") from error
        return self.image_check is None or self.image_check.path == "packed"

    def _count_good_pass(self) -> None:
        self._good_passes += 1
        if self._good_passes >= _GOOD_PASSES:
            self._good_passes = 0
            self.token_budget = min(2 * self.token_budget, self._first_budget)

    def token_counts(self) -> TokenCounts:
        """Return the token counts of all finished passes, not counting the self-check."""
        return self._token_counts

    def close(self) -> None:
        """Free the weights, even if a job or a stopped stream still refers to the engine.

        Afterwards, `problems`, `token_counts` and `provenance` still work, but sequences can no longer be scored.
        """
        if self._loaded.model is not None:
            self._loaded = replace(self._loaded, model=None)
            self._features.close()
            del self._head

    def provenance(self) -> dict[str, Any]:
        """Return the library versions and settings that the engine uses; they are stored together with its log-probs."""
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
        try:
            landed = flying.land()
        except RuntimeError as error:  # errors of the running pass surface here on CUDA
            raise EngineError(f"a forward pass failed on {self.device}: {first_line(error)}") from error
        self._token_counts += flying.unit.token_counts
        if flying.unit.tokens >= _LEAST_PASS_TOKENS:
            self._tokens_per_second = flying.tokens_per_second()
        for place, _ in landed:
            del waiting[place]
        return landed

    def _pass_limit(self) -> int:
        if self.pass_seconds is None:
            return self.token_budget
        return int(min(self.token_budget, max(_LEAST_PASS_TOKENS, self.pass_seconds * self._tokens_per_second)))

    def _units_of_groups(self, groups: Iterable[list[Sequence]], waiting: dict[int, Sequence]) -> Iterator[Unit | None]:
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
        """Divide the sequences into passes of at most `_pass_limit` tokens, and yield the passes."""
        limit = self._loaded.rope_limit
        groups: list[list[int]] = []
        plain: list[int] = []
        masked: list[int] = []
        seen: dict[bytes, list[int]] = {}  # places of sequences with images, by processor settings
        for place in places:
            sequence = waiting[place]
            if limit is not None and len(sequence) > limit:
                groups.append([place])
            elif sequence.images is not None:
                seen.setdefault(sequence.images.vision.tokens.settings, []).append(place)
            else:
                (plain if sequence.attention_mask is None else masked).append(place)
        for chosen in (*groups, plain, *seen.values(), masked):
            for unit in self._shared_units([waiting[place] for place in chosen]):
                yield replace(unit, members=tuple((chosen[at], where) for at, where in unit.members))

    def _shared_units(self, sequences: list[Sequence]) -> Iterator[Unit]:
        is_masked = bool(sequences) and sequences[0].attention_mask is not None
        has_images = bool(sequences) and sequences[0].images is not None
        is_packed = not has_images or self.image_check is None or self.image_check.path == "packed"
        if self.self_check.path == "packed" and not is_masked and is_packed:
            for pack in packs(sequences, self._pass_limit()):
                with_images = sequences if has_images else None
                scored = sum(len(sequences[index]) for index, _ in pack.members)
                yield Unit(pack, pack.members, len(pack), TokenCounts(scored, len(pack)), with_images)
            return
        is_single = self._is_single(has_images)
        budget = 1 if is_single else self._pass_limit()
        for batch in padded_batches(sequences, budget):
            members, start = [], 0
            for index in batch:
                stop = start + len(sequences[index].completion_ids)
                members.append((index, np.arange(start, stop)))
                start = stop
            chosen = [sequences[index] for index in batch]
            tokens, scored = len(batch) * max(map(len, chosen)), sum(map(len, chosen))
            yield Unit(chosen, tuple(members), tokens, TokenCounts(scored, scored), is_single=is_single)

    def _is_single(self, has_images: bool) -> bool:
        """Return True if sequences that are not packed are scored one at a time, because padded batches have wrong values."""
        if has_images and self.image_check is not None and self.image_check.path != "packed":
            return self.image_check.path == "single"
        return "padded" in self.self_check.rejected

    def _launch(self, unit: Unit, temperature: float) -> InFlight | None:
        model, limit = self._loaded.model, self._loaded.rope_limit
        try:
            began = Mark(self.device)
            with on_device(self.device), self._loaded.computing():
                if isinstance(unit.work, Pack):
                    inputs, refused = None, self.self_check.refused_kernels
                    if unit.with_images is not None:
                        if self.image_check is None:
                            return None
                        refused = self.image_check.refused_kernels
                        with attention_of(model, self._own_attention):
                            both_ways = self.image_check.both_ways
                            inputs = self._features.of_pack(unit.work, unit.with_images, both_ways)
                    values = forward_pack(model, self._head, unit.work, self.device, temperature, refused, inputs)
                else:
                    with attention_of(model, self._own_attention):
                        if unit.is_single:
                            self._require_own_head()
                            values = forward_single(model, unit.work[0], self.device, temperature, self.top_k)
                        else:
                            values = forward_padded(self._head, unit.work, self.device, temperature)
            host, landed = copy_to_host(values)
            return InFlight(unit, host, began, landed)
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise EngineError(f"the forward pass failed: {first_line(error)}") from error
        except (ValueError, TypeError, LookupError) as error:  # image processors and models raise these errors for images
            raise EngineError(f"the forward pass failed: {first_line(error)}") from error
        finally:
            if limit is not None and len(unit.members) == 1 and unit.tokens > limit:
                forget_longest_pass(model, limit)
        self._features.clear()
        # Empty the cache only here: inside the handler, the error's traceback still refers to the tensors of the failed pass.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None


def _digests(sequence: Sequence) -> tuple[bytes, ...]:
    return () if sequence.images is None else sequence.images.digests
