"""Collect the token sequences of a framework's datasets, exactly as the framework created them.

This module also writes and reads the Arrow file with the sequences' reference log-probs, which all processes on a node share.
In this file, the key of a sequence is a hash of the sequence's tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tqdm.auto import tqdm

from reflogp.store import UsageError
from reflogp.store.keys import KEY_TYPE, keys_as_words
from reflogp.store.schema import one_array
from reflogp.trainer.layouts import load_table, save_table

TokenIds = npt.NDArray[np.uint32]

#: Label of a token that the loss ignores. torch's cross_entropy and all frameworks built on transformers use this number.
IGNORED = -100
#: Personalisation string for blake2b, which keeps the keys of `row_key` distinct from the keys in a store.
_ROW_PERSON = b"reflogp.row.v1"
_ROWS_AT_ONCE = 1024


class TokenDataset(Protocol):
    """A framework's tokenized dataset, with exactly the tokens that the framework puts into its batches.

    Iterating over the dataset yields one list of sequences per row (two sequences for a preference pair). Each sequence is a
    tuple (token_ids, completion_start): the token ids without padding, and the index of the completion's first token (the
    number of tokens if the completion is empty). Every row has the same number of sequences.
    """

    def __len__(self) -> int:
        """Return the number of rows."""

    def __iter__(self) -> Iterator[Sequence[tuple[TokenIds, int]]]:
        """Iterate over the rows in dataset order."""


class LabelledColumns:
    """A TokenDataset that reads a `datasets.Dataset` with a column of labels for each column of token ids.

    A completion begins at the first token whose label is not -100.

    Args:
        dataset: the `datasets.Dataset` to read.
        columns: one tuple for each sequence of a row, with the name of the sequence's column of token ids and the name of its
            column of labels.

    Raises UsageError if the dataset lacks any of these columns.
    """

    def __init__(self, dataset: Any, columns: Sequence[tuple[str, str]]) -> None:
        names = [name for pair in columns for name in pair]
        missing = [name for name in names if name not in (dataset.column_names or ())]
        if missing:
            raise UsageError(
                f"the tokenized dataset has no column {' or '.join(missing)}; its columns are {dataset.column_names}"
            )
        self._rows = dataset.select_columns(names).with_format("arrow")
        self._columns = columns

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[list[tuple[TokenIds, int]]]:
        for table in self._rows.iter(_ROWS_AT_ONCE):
            columns = [(one_array(table[ids]), one_array(table[labels])) for ids, labels in self._columns]
            for row in range(len(table)):
                found = []
                for ids, labels in columns:
                    found.append(labelled(*(list_[row].values.to_numpy(zero_copy_only=False) for list_ in (ids, labels))))
                yield found


def labelled(token_ids: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[TokenIds, int]:
    """Return a sequence in the form that a TokenDataset yields: its token ids, and the index of its completion's first token.

    Args:
        token_ids: token ids without padding, shape (n,).
        labels: -100 for tokens that the loss ignores, shape (n,). The completion begins at the first token whose label is not
            -100. If all labels are -100, the completion is empty and the index is n.
    """
    whole = np.asarray(token_ids).astype(np.uint32)
    used = np.flatnonzero(np.asarray(labels) != IGNORED)
    return whole, int(used[0]) if len(used) else len(whole)


def row_key(token_ids: TokenIds) -> bytes:
    """Return a 16-byte key of a sequence's tokens. The key does not depend on where the prompt ends and the completion
    begins."""
    return hashlib.blake2b(token_ids.astype("<u4").tobytes(), digest_size=16, person=_ROW_PERSON).digest()


@dataclass(frozen=True)
class Sequences:
    """The n distinct sequences of some datasets, and the dataset rows that contain them.

    Attributes:
        table: table of n rows with the columns prompt_ids and completion_ids (large_list<uint32>), which `reflogp score` can
            read.
        row_keys: the result of `row_key` for each sequence's tokens.
        of: dict from each dataset's name to the row numbers in `table` of the dataset's sequences, int64 of shape
            (dataset rows, sequences per dataset row).
    """

    table: pa.Table
    row_keys: list[bytes]
    of: dict[str, npt.NDArray[np.int64]]

    def rows(self, marked: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[np.int64]]:
        """Return a dict from each dataset's name to the indices of its rows that contain at least one selected sequence.

        Datasets without such rows are omitted.

        Args:
            marked: mask of the selected sequences, bool of shape (n,), in the order of `table`.
        """
        found = {name: np.flatnonzero(marked[places].any(1)) for name, places in self.of.items()}
        return {name: rows for name, rows in found.items() if len(rows)}


def sequences_of(datasets: Mapping[str, TokenDataset]) -> Sequences:
    """Collect the distinct sequences of the given datasets.

    Sequences with the same tokens are collected only once. If their completions begin at different tokens, the longest
    completion is used. This is correct because a token's log-prob depends on the tokens before it, but not on where the prompt
    ends.

    Args:
        datasets: the datasets by name.
    """
    tokens: list[TokenIds] = []
    begins: list[int] = []
    places: dict[bytes, int] = {}
    of = {}
    for name, dataset in datasets.items():
        rows = []
        for sequences in tqdm(dataset, desc=f"Tokens of {name}", total=len(dataset), unit="row", mininterval=1):
            row = []
            for whole, begin in sequences:
                place = places.setdefault(row_key(whole), len(tokens))
                if place == len(tokens):
                    tokens.append(whole)
                    begins.append(begin)
                begins[place] = min(begins[place], begin)
                row.append(place)
            rows.append(row)
        of[name] = np.array(rows, np.int64).reshape(len(rows), -1)
    prompts = _lists(whole[:begin] for whole, begin in zip(tokens, begins, strict=True))
    completions = _lists(whole[begin:] for whole, begin in zip(tokens, begins, strict=True))
    return Sequences(pa.table({"prompt_ids": prompts, "completion_ids": completions}), list(places), of)


def _lists(parts: Iterable[TokenIds]) -> pa.LargeListArray:
    arrays = list(parts)
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    values = np.concatenate([np.empty(0, np.uint32), *arrays])
    return pa.LargeListArray.from_arrays(offsets, pa.array(values, pa.uint32()))


def save_row_values(row_keys: list[bytes], token_logps: pa.LargeListArray) -> Path:
    """Write the log-probs of n sequences to a file that this node's processes share, and return the file's path.

    Args:
        row_keys: the keys of the sequences, from `row_key`; all must be different.
        token_logps: the log-probs of each sequence's completion tokens, as an array of type large_list<float32> without nulls.
    """
    keys = pa.array(row_keys, KEY_TYPE)
    order = pa.array(sorted(range(len(row_keys)), key=row_keys.__getitem__), pa.int64())
    return save_table(pa.table({"row": keys.take(order), "token_logps": token_logps.take(order)}))


class RowValues:
    """The values in a file that `save_row_values` wrote, mapped into memory."""

    def __init__(self, file: Path) -> None:
        table = load_table(file)
        self._hi, self._lo = keys_as_words(table["row"])
        lists = one_array(table["token_logps"])
        self._offsets: npt.NDArray[np.int64] = lists.offsets.to_numpy()
        self._values: npt.NDArray[np.float32] = lists.values.to_numpy()

    def of(self, token_ids: TokenIds) -> npt.NDArray[np.float32] | None:
        """Return the log-probs (in nats) of a sequence's completion tokens, or None if the sequence is not in the file.

        Args:
            token_ids: token ids of the prompt, followed by those of the completion, without padding, shape (n,).
        """
        hi, lo = keys_as_words([row_key(token_ids)])
        first, last = np.searchsorted(self._hi, hi[0], "left"), np.searchsorted(self._hi, hi[0], "right")
        for place in range(int(first), int(last)):
            if self._lo[place] == lo[0]:
                return self._values[self._offsets[place] : self._offsets[place + 1]]
        return None
