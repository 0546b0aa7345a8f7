"""Look up reference values by a row's tokens, in an Arrow file that the processes of a node share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.store.keys import KEY_TYPE, keys_as_words
from reflogp.trainer.openrlhf.sequences import TokenIds, row_key
from reflogp.trainer.shared_columns import load_table, save_table


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
