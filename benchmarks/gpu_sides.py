"""Define sides that gpu.py compares on one device: reflogp's engine with each attention kernel, padded transformers forwards.

They share one copy of the weights in memory; each side has its own model object around them. Needs torch, transformers and
reflogp's engine.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flops import Qwen2Flops
from pairs import Pairs

from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.scoring.torch_engine.attention import installed_kernels
from reflogp.scoring.torch_engine.load import in_memory
from reflogp.scoring.torch_engine.packing import packs

#: Maximum number of float32 logits that the padded side's head computes at once: 2**28 are 1 GiB.
_LOGITS_AT_ONCE = 1 << 28
#: Batch sizes of the padded sides, in sequences.
BATCHES = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Run:
    """One run over some pairs.

    Attributes:
        seconds: from the first sequence to the last value on the host.
        tokens: tokens of the data: both sequences of a pair count in full, without sharing and padding.
        operations: computed operations, two per multiply-add; padding counts, shared tokens count once. 0 if unknown.
        passes: (seconds, tokens of the data) of each pass or batch.
        complete: False if the time was up before the last pair.
    """

    seconds: float
    tokens: int
    operations: float
    passes: list[tuple[float, int]]
    complete: bool


def now(device: torch.device) -> float:
    """Wait until the device has finished; return the current time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def reason(error: BaseException) -> str:
    """Return the first line of an error, after its type."""
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def around_same_weights(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Return another model object with the same tensors, or, if `dtype` is given, with its own parameters in that dtype."""
    tensors = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        cast = parameter if dtype is None else torch.nn.Parameter(parameter.to(dtype), requires_grad=False)
        tensors[id(parameter)] = cast
    return copy.deepcopy(model, tensors)


@torch.inference_mode()
def exact_values(model: Any, sequences: list[Sequence]) -> list[np.ndarray]:
    """Return the completions' log-probs from one unpadded float32 forward per sequence, without reflogp's code."""
    model = around_same_weights(model, torch.float32)
    device = next(model.parameters()).device
    found = []
    for sequence in sequences:
        ids = torch.from_numpy(sequence.ids()).to(device)
        start = len(sequence.prompt_ids)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1]
        found.append(torch.log_softmax(logits.double(), -1).gather(1, ids[start:, None])[:, 0].cpu().numpy())
    return found


class Packed:
    """reflogp's engine.

    Args:
        model: the weights.
        kernel: the only attention kernel that the engine may use; None leaves the choice to the engine's self-check.
    """

    def __init__(self, model: Any, kernel: str | None = None) -> None:
        own = around_same_weights(model)
        device = next(own.parameters()).device
        refused = [] if kernel is None else [name for name in installed_kernels(device.type) if name != kernel]
        self.engine = TorchEngine(in_memory(own), refused_kernels=refused)
        check = self.engine.self_check
        if kernel is not None and check.kernels != [kernel]:
            raise RuntimeError(check.rejected.get(kernel) or check.rejected.get("packed") or f"{kernel} declines this model")
        self._work = Qwen2Flops(own.config)
        self._counted: tuple[Pairs | None, float] = (None, 0.0)
        self.about = {"self_check": check.as_dict(), "token_budget": self.engine.token_budget}

    def values(self, sequences: list[Sequence]) -> list[np.ndarray]:
        return self.engine.score(sequences)

    def run(self, pairs: Pairs, deadline: float) -> Run:
        sequences = pairs.sequences()
        device = self.engine.device
        passes, tokens, complete = [], 0, True
        start = before = now(device)
        for landed in self.engine.passes(sequences):
            if problems := [outcome for _, outcome in landed if isinstance(outcome, str)]:
                raise RuntimeError(problems[0])
            count = sum(len(sequences[index]) for index, _ in landed)
            tokens, then = tokens + count, time.perf_counter()
            passes.append((then - before, count))
            before = then
            if then > deadline and tokens < pairs.tokens:
                complete = False
                break
        seconds = now(device) - start
        if complete and self._counted[0] is not pairs:
            self._counted = (pairs, sum(self._work.of_pack(pack) for pack in packs(sequences, self.engine.token_budget)))
        return Run(seconds, tokens, self._counted[1] if complete else 0.0, passes, complete)


class Padded:
    """A hand-written loop that computes as TRL does: batches padded on the right, in the data's order, in the model's dtype.

    Args:
        model: the weights.
        batch: number of sequences per batch.
        attention: transformers' name of an attention implementation.
        whole_logits: True to take log_softmax of the model's logits at all positions, in the model's dtype. Otherwise the head
            runs on completion tokens only, some rows at a time, with log_softmax in float32, as in TRL's fused head since 1.16.
    """

    def __init__(self, model: Any, batch: int, attention: str, whole_logits: bool) -> None:
        self._model = around_same_weights(model).eval()
        self._model.set_attn_implementation(attention)
        self._device = next(self._model.parameters()).device
        self._batch, self._whole_logits = batch, whole_logits
        self._work = Qwen2Flops(self._model.config)
        self.about = {"batch": batch, "attention": attention}

    def values(self, sequences: list[Sequence]) -> list[np.ndarray]:
        found = []
        for first in range(0, len(sequences), self._batch):
            batch = sequences[first : first + self._batch]
            found += np.split(self._forward(batch).cpu().numpy(), np.cumsum([len(s.completion_ids) for s in batch])[:-1])
        return found

    def run(self, pairs: Pairs, deadline: float) -> Run:
        sequences = pairs.sequences()
        passes, operations, complete = [], 0.0, True
        start = before = now(self._device)
        for first in range(0, len(sequences), self._batch):
            batch = sequences[first : first + self._batch]
            self._forward(batch).cpu()
            then = time.perf_counter()
            passes.append((then - before, sum(map(len, batch))))
            before = then
            width = max(map(len, batch))
            positions = len(batch) * width
            predictions = positions if self._whole_logits else sum(len(s.completion_ids) for s in batch)
            operations += self._work(positions, positions * (width + 1) / 2, predictions)
            if then > deadline and first + self._batch < len(sequences):
                complete = False
                break
        return Run(now(self._device) - start, sum(count for _, count in passes), operations, passes, complete)

    @torch.inference_mode()
    def _forward(self, batch: list[Sequence]) -> torch.Tensor:
        """Return the log-probs of the completions' tokens, one sequence after another, float32."""
        rows = [torch.from_numpy(sequence.ids()) for sequence in batch]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(self._device)
        predicts = torch.zeros(ids.shape, dtype=torch.bool)
        for row, sequence in enumerate(batch):
            predicts[row, len(sequence.prompt_ids) - 1 : len(sequence) - 1] = True
        predicts = predicts.to(self._device)[:, :-1]
        if self._whole_logits:
            logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            by_row = [
                torch.log_softmax(one, -1).gather(1, next_[:, None])[:, 0]
                for one, next_ in zip(logits, ids[:, 1:], strict=True)
            ]
            return torch.stack(by_row)[predicts].float()
        states = self._model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1][predicts]
        targets = ids[:, 1:][predicts]
        step = max(1, _LOGITS_AT_ONCE // self._model.config.vocab_size)
        parts = []
        for at in range(0, len(targets), step):
            logits = self._model.lm_head(states[at : at + step]).float()
            parts.append(torch.log_softmax(logits, -1).gather(1, targets[at : at + step, None])[:, 0])
        return torch.cat(parts)


def best_padded(model: Any, trial: Pairs, attention: str, whole_logits: bool, deadline: float) -> Padded:
    """Return the padded side with the fastest batch size for the trial pairs; its `about` has the rate of each batch size."""
    rates: dict[int, float] = {}
    failed: dict[int, str] = {}
    for batch in BATCHES:
        if rates and batch > 2 * len(trial.rows):
            break
        side = Padded(model, batch, attention, whole_logits)
        try:
            side.run(trial.spread(batch // 2), float("inf"))
            run = side.run(trial, float("inf"))
        except RuntimeError as error:  # out of memory, or more elements than a kernel can index
            if not rates:
                raise
            failed[batch] = reason(error)
            break
        rates[batch] = run.tokens / run.seconds
        if rates[batch] < 0.9 * max(rates.values()) or time.perf_counter() > deadline:
            break  # padding costs more than larger products gain, or there is no time for more
    best = Padded(model, max(rates, key=lambda batch: rates[batch]), attention, whole_logits)
    best.about |= {"tokens_per_second_at_batch": rates, "failed_at_batch": failed}
    return best
