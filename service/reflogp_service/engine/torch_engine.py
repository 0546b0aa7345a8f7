"""The torch engine: a frozen model on one device that scores token sequences.

Knows batches, token budgets and what to do when memory runs out. It is purely token ids: nothing here knows text, keys or
stores. Called by the scoring job and by anyone who has sequences in hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import transformers

from reflogp_service.engine.flops import ForwardFlops, matmul_flops_per_second
from reflogp_service.engine.head import Head
from reflogp_service.engine.load import load_model
from reflogp_service.engine.plain import length_sorted_batches, score_padded
from reflogp_service.engine.sequences import Sequence, problem_of
from reflogp_service.errors import EngineError, InvalidSequencesError, OutOfMemoryError

Logps = npt.NDArray[np.float32]

#: Tokens per batch to begin with. Out-of-memory halves it, so too large a number costs one failed try.
_AUTO_TOKEN_BUDGET = {"cpu": 4_096, "cuda": 32_768}


class TorchEngine:
    """Scores sequences with a reference model.

    Args:
        model: model folder or hub id; safetensors weights.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.
        device: "auto" (CUDA when there), "cpu", "cuda", "cuda:1", …
        token_budget: tokens of one batch, padding included; "auto" begins with a size that suits the device. When memory
            runs out the budget is halved, for good, and the batch is tried again.
        revision: of a hub id.
        trust_remote_code: run modelling code that the checkpoint brings.

    Raises:
        UsageError, CheckpointError: no such model; weights missing, truncated or pickled.
        EngineError: the model cannot be loaded.

    Example:
        engine = TorchEngine("./model", dtype="bfloat16")
        [logps] = engine.score([Sequence(prompt_ids=[1, 5, 9], completion_ids=[7, 2])])   # float32, shape (2,)
    """

    def __init__(
        self,
        model: str,
        dtype: str = "bfloat16",
        device: str = "auto",
        token_budget: int | Literal["auto"] = "auto",
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self._loaded = load_model(model, dtype, device, revision, trust_remote_code)
        self._head = Head(self._loaded.model)
        self._flops = ForwardFlops(self._loaded.model)
        self.device = self._loaded.device
        if token_budget != "auto" and token_budget < 1:
            raise EngineError(f"token_budget {token_budget}: must be at least 1")
        self.token_budget = _AUTO_TOKEN_BUDGET[self.device.type] if token_budget == "auto" else token_budget

    def score(self, sequences: list[Sequence]) -> list[Logps]:
        """token_logps of each sequence: float32 arrays of len(completion_ids), in order.

        Raises:
            InvalidSequencesError: some cannot be scored; its `results` hold the others' values.
            OutOfMemoryError: one sequence alone does not fit the device.
        """
        problems = self.problems(sequences)
        results: list[Any] = [None] * len(sequences)
        for index, logps in self.stream(sequences, skip=problems):
            results[index] = logps
            if not np.isfinite(logps).all():
                problems[index] = "its log-probs are not finite: the model's weights or activations hold NaN or infinity"
                results[index] = None
        if problems:
            raise InvalidSequencesError(problems, results)
        return results

    def problems(self, sequences: list[Sequence]) -> dict[int, str]:
        """Index -> why this model cannot score that sequence; empty when it can score all."""
        found = ((i, problem_of(s, self._loaded.vocab_size, self._loaded.max_positions)) for i, s in enumerate(sequences))
        return {index: problem for index, problem in found if problem}

    def stream(self, sequences: list[Sequence], skip: Any = ()) -> Iterator[tuple[int, Logps]]:
        """(index, token_logps) as batches come off the device, longest sequences first.

        Args:
            sequences: ones without `problems`.
            skip: indices to leave out.
        """
        left = [i for i in range(len(sequences)) if i not in skip]
        while left:
            lengths = [len(sequences[i]) for i in left]
            batch = [left[at] for at in next(length_sorted_batches(lengths, self.token_budget))]
            logps = self._score_batch([sequences[i] for i in batch])
            if logps is None:
                continue  # the budget is smaller now: cut a new batch
            taken = set(batch)
            left = [i for i in left if i not in taken]
            yield from zip(batch, logps, strict=True)

    def flops(self, sequence: Sequence) -> float:
        """Floating point operations of one plain forward over this sequence, head only where it predicts."""
        return self._flops(sequence)

    def peak_flops_per_second(self) -> float:
        """Matrix product rate of this device in this dtype, measured once."""
        return matmul_flops_per_second(self.device, self._loaded.dtype)

    def provenance(self) -> dict[str, Any]:
        """How this engine makes values; stored beside them."""
        return {
            "engine": "torch",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": ".".join(map(str, sys.version_info[:2])),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "dtype": str(self._loaded.dtype).removeprefix("torch."),
            "attention": self._loaded.model.config._attn_implementation,
            "path": "plain",
            "batch_invariant": False,
        }

    def _score_batch(self, batch: list[Sequence]) -> list[Logps] | None:
        """token_logps of a batch, or None after memory ran out and the budget was halved."""
        try:
            return score_padded(self._loaded.model, self._head, batch, self.device)
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise EngineError(f"the forward pass failed: {str(error).splitlines()[0]}") from error
        # Outside the handler, where the failed pass's tensors are no longer held by its traceback.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(batch) == 1:
            raise OutOfMemoryError(
                f"a sequence of {len(batch[0])} tokens alone does not fit the memory of {self.device}; set a max_length"
            )
        padded = len(batch) * max(len(sequence) for sequence in batch)
        self.token_budget = max(1, min(self.token_budget, padded) // 2)
        return None


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text
