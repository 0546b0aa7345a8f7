"""The sequences of OpenRLHF's datasets: the tokens that its loss compares, as OpenRLHF itself made them.

Knows what a RewardDataset's rows are (openrlhf/datasets/reward_dataset.py): both sides' tokens, cut and with their last one
made an EOS, and a prompt length that comes from tokenising the prompt alone. Does not know values. Called by `lookup`.
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

#: blake2b's personalisation: a row's key can never equal a store's.
_ROW_PERSON = b"reflogp.row.v1"


def row_key(token_ids: TokenIds) -> bytes:
    """16 bytes that name a row's tokens, prompt and completion in one; where the prompt ends plays no part."""
    return hashlib.blake2b(token_ids.astype("<u4").tobytes(), digest_size=16, person=_ROW_PERSON).digest()


@dataclass(frozen=True)
class Sequences:
    """n different sequences, and which rows they are of.

    Attributes:
        table: prompt_ids and completion_ids, large_list<uint32>, n rows; what `reflogp score` reads as tokens.
        row_keys: `row_key` of each one's tokens.
        of: dataset's name -> for each of its rows the places of chosen and rejected, int64 (rows, 2).
    """

    table: pa.Table
    row_keys: list[bytes]
    of: dict[str, npt.NDArray[np.int64]]

    def rows(self, marked: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[np.int64]]:
        """Dataset's name -> its rows with a marked sequence; datasets without any are left out."""
        found = {name: np.flatnonzero(marked[places].any(1)) for name, places in self.of.items()}
        return {name: rows for name, rows in found.items() if len(rows)}


def sequences_of(datasets: Mapping[str, Any]) -> Sequences:
    """Walk datasets as their loaders will.

    Rows with the same tokens are one sequence. Where they disagree about the prompt's length the longer completion is taken: a
    token's log-prob depends on what stands before it, and not on what of that is called the prompt.

    Args:
        datasets: name -> RewardDataset.

    Raises UsageError for one that was not made for DPO.
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
