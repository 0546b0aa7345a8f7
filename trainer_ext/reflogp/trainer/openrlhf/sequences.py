"""Collect the token sequences of OpenRLHF's datasets, exactly as OpenRLHF made them.

A RewardDataset's row (openrlhf/datasets/reward_dataset.py) has both sides' tokens, truncated and with an EOS as their last
token, and a prompt length that comes from tokenising the prompt alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tqdm.auto import tqdm

from reflogp.store import UsageError

TokenIds = npt.NDArray[np.uint32]

#: blake2b's personalisation, so that a row's key can never equal a store's key.
_ROW_PERSON = b"reflogp.row.v1"


def row_key(token_ids: TokenIds) -> bytes:
    """Return 16 bytes that identify a row's tokens, prompt and completion together; the prompt's length plays no part."""
    return hashlib.blake2b(token_ids.astype("<u4").tobytes(), digest_size=16, person=_ROW_PERSON).digest()


@dataclass(frozen=True)
class Sequences:
    """n different sequences, and the rows that they belong to.

    Attributes:
        table: prompt_ids and completion_ids, large_list<uint32>, n rows; `reflogp score` reads it as tokens.
        row_keys: `row_key` of each sequence's tokens.
        of: dataset's name -> for each of its rows the positions of chosen and rejected, int64 (rows, 2).
    """

    table: pa.Table
    row_keys: list[bytes]
    of: dict[str, npt.NDArray[np.int64]]

    def rows(self, marked: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[np.int64]]:
        """Return dataset's name -> its rows with a marked sequence; datasets without any are left out."""
        found = {name: np.flatnonzero(marked[places].any(1)) for name, places in self.of.items()}
        return {name: rows for name, rows in found.items() if len(rows)}


def sequences_of(datasets: Mapping[str, Any]) -> Sequences:
    """Collect the sequences of datasets, row by row as their data loaders read them.

    Rows with the same tokens are one sequence. If they have different prompt lengths, the longer completion is used: a token's
    log-prob depends on the tokens before it, and not on which of these count as the prompt.

    Args:
        datasets: name -> RewardDataset.

    Raises UsageError for a dataset that was not made for DPO.
    """
    tokens: list[TokenIds] = []
    begins: list[int] = []
    places: dict[bytes, int] = {}
    of = {}
    for name, dataset in datasets.items():
        if not getattr(dataset, "is_dpo", False):
            raise UsageError(f"the {name} dataset has no prompt lengths: make the RewardDataset with is_dpo=True")
        of[name] = np.empty((len(dataset), 2), np.int64)
        for row in tqdm(range(len(dataset)), desc=f"Tokens of {name}", unit="row", mininterval=1):
            chosen, chosen_mask, rejected, rejected_mask, prompt_length = dataset[row]
            for side, (token_ids, mask) in enumerate(((chosen, chosen_mask), (rejected, rejected_mask))):
                whole = token_ids[mask.bool()].numpy().astype(np.uint32)
                place = places.setdefault(row_key(whole), len(tokens))
                if place == len(tokens):
                    tokens.append(whole)
                    begins.append(int(prompt_length))
                begins[place] = min(begins[place], int(prompt_length))
                of[name][row, side] = place
    prompts = _lists(whole[:begin] for whole, begin in zip(tokens, begins, strict=True))
    completions = _lists(whole[begin:] for whole, begin in zip(tokens, begins, strict=True))
    return Sequences(pa.table({"prompt_ids": prompts, "completion_ids": completions}), list(places), of)


def _lists(parts: Iterable[TokenIds]) -> pa.LargeListArray:
    arrays = list(parts)
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    values = np.concatenate([np.empty(0, np.uint32), *arrays])
    return pa.LargeListArray.from_arrays(offsets, pa.array(values, pa.uint32()))
