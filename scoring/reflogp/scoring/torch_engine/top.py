"""Find the most probable tokens of each position, from logits that are computed block by block.

Order: a more probable token comes first; of tokens with the same log-prob, the one with the lower id. If the last of the k
tokens is as probable as others, it is not defined which of them is among the k.
"""

from __future__ import annotations

import torch


class RunningTop:
    """Keeps the columns with the largest values of each row, while the columns of a matrix arrive in blocks.

    Args:
        count: number of rows.
        k: number of columns to keep for each row.

    Attributes:
        values, ids: the largest values of each row and their columns, float32 and int64 (rows, k), in any order.
    """

    def __init__(self, count: int, k: int, device: torch.device) -> None:
        self.values = torch.full((count, k), -torch.inf, device=device)
        self.ids = torch.zeros(count, k, dtype=torch.long, device=device)

    def add(self, rows: slice, block: torch.Tensor, first: int) -> None:
        """Add values of some rows, shape (rows, columns); `first` is the number of the block's first column."""
        values, ids = self.values[rows], self.ids[rows]
        if block.device.type == "cpu" and first:
            # a search in the few values above the smallest that is kept; `topk` would look at each value several times
            new_values, new_ids = _above(block, values.amin(1), first)
        else:
            found = torch.topk(block, min(block.shape[1], values.shape[1]), sorted=False)
            new_values, new_ids = found.values.float(), found.indices + first
        if new_values.shape[1]:
            values, ids = torch.cat([values, new_values], 1), torch.cat([ids, new_ids], 1)
            kept = torch.topk(values, self.values.shape[1], sorted=False)
            self.values[rows], self.ids[rows] = kept.values, ids.gather(1, kept.indices)


def _above(block: torch.Tensor, least: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of each row that are larger than `least`, and their columns; shorter rows are filled with -inf."""
    row, column = (block > least[:, None].to(block.dtype)).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=len(block))
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    width = int(counts.max()) if len(counts) else 0
    values, ids = torch.full((len(block), width), -torch.inf), torch.zeros(len(block), width, dtype=torch.long)
    values[row, place], ids[row, place] = block[row, column].float(), column + first
    return values, ids


def in_order(logps: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest log-probs of each row and their token ids, in the order that this module defines."""
    by_id = ids.argsort(dim=1)
    logps, ids = logps.gather(1, by_id), ids.gather(1, by_id)
    order = logps.argsort(dim=1, descending=True, stable=True)[:, :k]
    return logps.gather(1, order), ids.gather(1, order)


def top_of(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest logits or log-probs of rows that span the whole vocabulary, and their token ids."""
    candidates = torch.topk(values, min(values.shape[1], k + 1), sorted=False)
    return in_order(candidates.values, candidates.indices, k)
