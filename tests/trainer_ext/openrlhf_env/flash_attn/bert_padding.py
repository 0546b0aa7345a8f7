"""Rows without their padding, and back: the same results as flash_attn.bert_padding's, by indexing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]


def index_first_axis(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """tensor[indices]; (rows, …) and (n,) give (n, …)."""
    return tensor[indices]


def unpad_input(
    tensor: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """(batch, length, …) -> (tokens, …), their places in (batch * length), where each row begins, the longest, all lengths."""
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(attention_mask.flatten()).flatten()
    begins = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return tensor.flatten(0, 1)[indices], indices, begins, int(lengths.max()), lengths


def pad_input(tokens: torch.Tensor, indices: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """(tokens, …) -> (batch, length, …), zero where there is padding."""
    padded = tokens.new_zeros(batch * length, *tokens.shape[1:])
    return padded.index_put((indices,), tokens).unflatten(0, (batch, length))
