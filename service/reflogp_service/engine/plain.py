"""The plain forward pass: right-padded batches of similar lengths, right for every causal model.

Knows batches and the backbone's interface. Does not know vocabularies or stores. Called by the torch engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from reflogp_service.engine.head import Head
from reflogp_service.engine.sequences import Sequence


def length_sorted_batches(lengths: list[int], token_budget: int) -> Iterator[list[int]]:
    """Indices of sequences in batches whose padded size stays within `token_budget`, longest first.

    A sequence longer than the budget is a batch of its own.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > token_budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@torch.inference_mode()
def score_padded(
    model: Any, head: Head, batch: list[Sequence], device: torch.device
) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """token_logps of a batch, float32 arrays of len(completion_ids), in order."""
    lengths = [len(sequence) for sequence in batch]
    width = max(lengths)
    input_ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width, dtype=torch.long)
    predicts = torch.zeros(len(batch), width, dtype=torch.bool)  # positions whose next token is a completion token
    for row, sequence in enumerate(batch):
        input_ids[row, : lengths[row]] = torch.from_numpy(sequence.ids())
        mask[row, : lengths[row]] = 1
        predicts[row, len(sequence.prompt_ids) - 1 : lengths[row] - 1] = True
    targets = torch.roll(input_ids, -1, 1)[predicts].to(device)
    padding = None if min(lengths) == width else mask.to(device)
    states = model.base_model(input_ids=input_ids.to(device), attention_mask=padding, use_cache=False)
    logps = head.logps(states.last_hidden_state[predicts.to(device)], targets)
    return np.split(logps.cpu().numpy(), np.cumsum([len(s.completion_ids) for s in batch])[:-1])
