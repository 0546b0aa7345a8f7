"""Convert a trainer's padded batch into sequences that a service can score, and their log-probs back into a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]
#: An embedding counts as a table of positions if its number of rows is the config's max_position_embeddings, or is larger by at
#: most this number (OPT's is larger by 2).
_SPARE_POSITIONS = 8


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A batch of prompt and completion tokens, possibly padded on both sides, with a description of which log-probs are needed.

    Attributes:
        input_ids: token ids, shape (rows, width).
        attention_mask: 0 at padding and 1 at all other tokens, shape (rows, width).
        completion: number of columns at the right that need log-probs. If this is the width, a row's first token needs none.
        temperature: value by which logits are divided.
        at_padding: whether log-probs are also needed for the completion's padding.
    """

    input_ids: Ids
    attention_mask: Ids
    completion: int
    temperature: float = 1.0
    at_padding: bool = False

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any, completion: int, **more: Any) -> PaddedBatch:
        """Create a batch from tensors on any device, and wait until they are on the host."""
        return cls(_on_host(input_ids), _on_host(attention_mask), completion, **more)

    def same_as(self, other: PaddedBatch) -> bool:
        return (
            (self.completion, self.temperature, self.at_padding) == (other.completion, other.temperature, other.at_padding)
            and np.array_equal(self.input_ids, other.input_ids)
            and np.array_equal(self.attention_mask, other.attention_mask)
        )

    def wanted(self, absolute_positions: bool) -> tuple[list[Wanted], list[Wanted]]:
        """Return the sequences to score, in two lists: sequences without padding, and sequences that keep their padding.

        Rows in which no token needs a log-prob are left out. A row keeps its left padding if the model has absolute positions
        (see `has_absolute_positions`); otherwise, this padding only shifts all positions by the same amount. A row also keeps
        padding between its tokens, padding that is the only context of the completion, and padding whose log-probs are needed.
        """
        plain, padded = [], []
        prompt = self.input_ids.shape[1] - self.completion
        for row, (ids, mask) in enumerate(zip(self.input_ids, self.attention_mask, strict=True)):
            seen = np.flatnonzero(mask)
            if not len(seen) or (seen[-1] < prompt and not self.at_padding):
                continue
            first, behind = int(seen[0]), int(seen[-1]) + 1
            start = prompt if prompt else first + 1
            if start == behind and not self.at_padding:  # the row's only token has no context
                continue
            has_holes = behind - first != len(seen)
            moved = absolute_positions and first > 0
            values_at_padding = self.at_padding and behind < len(ids)
            if first < start and not (has_holes or moved or values_at_padding):
                plain.append(Wanted(row, start, ids[first:start], ids[start:behind]))
                continue
            begin = 0 if absolute_positions or first >= start else first
            end = len(ids) if self.at_padding else behind
            padded.append(Wanted(row, start, ids[begin:start], ids[start:end], mask[begin:end]))
        return plain, padded

    def filled(self, answers: list[tuple[Wanted, npt.NDArray[np.float32]]]) -> npt.NDArray[np.float32]:
        """Arrange the sequences' log-probs as an array of shape (rows, completion tokens), with zeros where none is needed."""
        values: npt.NDArray[np.float32] = np.zeros(self.input_ids.shape, np.float32)
        for wanted, logps in answers:
            values[wanted.row, wanted.start : wanted.start + len(logps)] = logps
        if not self.at_padding:
            values[self.attention_mask == 0] = 0.0
        return values[:, values.shape[1] - self.completion :]


@dataclass(frozen=True, eq=False)
class Wanted:
    """The sequence to score for one row of a batch.

    Attributes:
        row, start: the row's index in the batch, and the column of the first token to score.
        prompt_ids, completion_ids: token ids of the sequence, of shape (n,) and (m,).
        attention_mask: mask of the prompt and the completion, shape (n + m,), or None if the sequence contains no padding.
    """

    row: int
    start: int
    prompt_ids: Ids
    completion_ids: Ids
    attention_mask: Ids | None = None


def has_absolute_positions(model: torch.nn.Module) -> bool:
    """Return True if an unwrapped model has an embedding table for absolute positions, so that left padding changes a token's
    position embedding."""
    config: Any = model.config
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    tokens = model.get_input_embeddings()  # type: ignore[operator]
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding) and module is not tokens]
    return positions > 0 and any(0 <= table.num_embeddings - positions <= _SPARE_POSITIONS for table in tables)


def _on_host(values: Any) -> Ids:
    ids: Ids = values.detach().cpu().numpy().astype(np.int64)
    return ids
