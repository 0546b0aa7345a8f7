"""Collect the token sequences of OpenRLHF's datasets, exactly as OpenRLHF made them, and look up their reference values.

A RewardDataset's row (openrlhf/datasets/reward_dataset.py) has both sides' tokens, truncated and with an EOS as their last
token, and a prompt length that comes from tokenising the prompt alone. The values are in an Arrow file that the processes of a
node share; they are looked up by a row's tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tqdm.auto import tqdm

from reflogp.store import UsageError
from reflogp.store.keys import KEY_TYPE, keys_as_words
from reflogp.trainer.layouts import load_table, save_table

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
        of: dataset's name -> positions in `table` of each row's chosen and rejected sequence, int64 (rows, 2).
    """

    table: pa.Table
    row_keys: list[bytes]
    of: dict[str, npt.NDArray[np.int64]]

    def rows(self, marked: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[np.int64]]:
        """Return dataset's name -> numbers of its rows with a marked sequence; datasets without such rows are left out."""
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


def save_row_values(row_keys: list[bytes], token_logps: pa.LargeListArray) -> Path:
    """Write n rows' values into a file for this node's processes; return its path.

    Args:
        row_keys: 16 bytes each, all different.
        token_logps: large_list<float32>, n lists without nulls: the values of each row's completion.
    """
    keys = pa.array(row_keys, KEY_TYPE)
    order = pa.array(sorted(range(len(row_keys)), key=row_keys.__getitem__), pa.int64())
    return save_table(pa.table({"row": keys.take(order), "token_logps": token_logps.take(order)}))


class RowValues:
    """The values of a file of `save_row_values`, mapped into memory."""

    def __init__(self, file: Path) -> None:
        table = load_table(file).combine_chunks()
        self._hi, self._lo = keys_as_words(table["row"])
        lists = table["token_logps"].chunk(0) if len(table) else pa.array([], pa.large_list(pa.float32()))
        self._offsets: npt.NDArray[np.int64] = lists.offsets.to_numpy()
        self._values: npt.NDArray[np.float32] = lists.values.to_numpy()

    def of(self, token_ids: TokenIds) -> npt.NDArray[np.float32] | None:
        """Return the values of a row's last tokens, in nats; None for a row that is not in the file.

        Args:
            token_ids: prompt and completion, without padding, (n,).
        """
        hi, lo = keys_as_words([row_key(token_ids)])
        first, last = np.searchsorted(self._hi, hi[0], "left"), np.searchsorted(self._hi, hi[0], "right")
        for place in range(int(first), int(last)):
            if self._lo[place] == lo[0]:
                return self._values[self._offsets[place] : self._offsets[place + 1]]
        return None
