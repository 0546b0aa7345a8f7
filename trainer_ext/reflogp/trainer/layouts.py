"""Translate the column names of tokenized datasets between TRL versions, and share reference columns between processes.

This module never checks TRL's version number; it recognizes a version by the dataset's column names and the trainer's methods.
The table below lists the columns of token ids and the reference columns of each version. In TRL 1.2 and 1.3, KTO's tokens are
already truncated, and the columns for its KL term are KL_prompt_input_ids and KL_completion_input_ids.

    DPO   TRL 0.29 and newer prompt_ids, chosen_ids, rejected_ids                          ref_chosen_logps, …
    DPO   0.13 to 0.28       prompt_input_ids, chosen_input_ids, rejected_input_ids        the same (for IPO: means over tokens)
    KTO   1.6 and newer      prompt_ids, completion_ids, KL_completion_ids                 ref_logps, ref_KL_logps
    KTO   1.4, 1.5           the same as in 1.6                                            reference_logps, …
    KTO   1.2, 1.3           prompt_input_ids, completion_input_ids (includes the prompt)  reference_logps, …

If a run has several processes, one process on each node writes the reference columns to an Arrow file, and all processes on the
node map the file into memory.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.store import UsageError
from reflogp.store.digests import cache_dir
from reflogp.store.joins import KTO_COLUMNS, PAIR_COLUMNS
from reflogp.store.keys import list_lengths, token_lists
from reflogp.store.schema import one_array, stream_buffer
from reflogp.store.windows import without_first

#: Dict from the name of a reference column in the newest TRL to its name in the KTO trainers of TRL 1.5 and older.
_EARLY_KTO_NAMES = {"ref_logps": "reference_logps", "ref_KL_logps": "reference_KL_logps"}
KL_IDS = "KL_completion_ids"
REFERENCE_COLUMNS = frozenset({*PAIR_COLUMNS.values(), *KTO_COLUMNS.values(), *_EARLY_KTO_NAMES.values()})


@dataclass(frozen=True)
class Layout:
    """The columns of a tokenized dataset, and how to convert them to the columns of the newest TRL.

    Attributes:
        columns: names of the columns that contain token ids.
        canonical: function that converts a table of these columns to the columns of the newest TRL. Pairs then have prompt_ids,
            chosen_ids and rejected_ids; KTO rows have prompt_ids, completion_ids and, with KL sequences, KL_completion_ids.
        names: dict that maps reflogp's name of a reference column to the trainer's name, if the two names differ.
        cut: whether the rows are already truncated.
    """

    columns: list[str]
    canonical: Callable[[pa.Table], pa.Table]
    names: dict[str, str]
    cut: bool = False

    def name(self, reference_column: str) -> str:
        return self.names.get(reference_column, reference_column)


def reference_columns(names: Iterable[str]) -> list[str]:
    """Return the names of reference columns among the given column names."""
    return [name for name in names if name in REFERENCE_COLUMNS]


def layout_of(column_names: list[str], trainer: Any = None) -> Layout:
    """Return the layout of a dataset with these columns.

    Args:
        column_names: names of the tokenized dataset's columns.
        trainer: the trainer that reads the reference columns, or None to use the names of the newest TRL.
    """
    there = set(column_names)
    names = _EARLY_KTO_NAMES if hasattr(trainer, "compute_reference_log_probs") else {}
    if {"prompt_input_ids", "chosen_input_ids", "rejected_input_ids"} <= there:
        old = {"prompt_input_ids": "prompt_ids", "chosen_input_ids": "chosen_ids", "rejected_input_ids": "rejected_ids"}
        return Layout(list(old), lambda table: table.rename_columns([old[name] for name in table.column_names]), names)
    if {"prompt_input_ids", "completion_input_ids"} <= there:
        columns = ["prompt_input_ids", "completion_input_ids"]
        columns += [name for name in ("KL_prompt_input_ids", "KL_completion_input_ids") if name in there]
        return Layout(columns, _split_completions, names, cut=True)
    wanted = ["prompt_ids", *PAIR_COLUMNS, *KTO_COLUMNS]
    return Layout([name for name in wanted if name in there], lambda table: table, names)


def _split_completions(table: pa.Table) -> pa.Table:
    """Convert a table to the newest TRL's columns, and remove the prompt's tokens from the start of each completion."""
    columns = {"prompt_ids": token_lists(table["prompt_input_ids"], "prompt_input_ids")}
    for prefix in ("", "KL_"):
        if f"{prefix}completion_input_ids" in table.column_names:
            whole = token_lists(table[f"{prefix}completion_input_ids"], f"{prefix}completion_input_ids")
            prompts = token_lists(table[f"{prefix}prompt_input_ids"], f"{prefix}prompt_input_ids")
            columns[f"{prefix}completion_ids"] = without_first(whole, list_lengths(prompts).astype(np.int64))
    return pa.table(columns)


Columns = dict[str, npt.NDArray[np.float32]]


def save_columns(columns: Columns) -> Path:
    """Write columns, each float32 of shape (n,), to a file in the cache folder, and return the file's path.

    The file's name is a hash of its content, so runs that join the same values share the file. The file can be deleted once no
    run uses it.

    Raises UsageError if the cache folder is not writable.
    """
    return save_table(pa.table({name: pa.array(values, pa.float32()) for name, values in columns.items()}))


def load_columns(file: Path) -> Columns:
    """Return the columns of a file that `save_columns` wrote, as memory-mapped arrays that processes share."""
    table = load_table(file)
    return {name: one_array(table[name]).to_numpy() for name in table.column_names}


def save_table(table: pa.Table) -> Path:
    """Write a table to a file in the cache folder, and return the file's path. See `save_columns` for the file's name."""
    content = stream_buffer(table)
    folder = cache_dir() / "joined"
    file = folder / f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.arrow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.is_file():
            partial = folder / f".{uuid.uuid4().hex}.partial"
            partial.write_bytes(content)
            partial.replace(file)
    except OSError as error:
        raise UsageError(
            f"the cache folder {folder} cannot be written to ({error.strerror or error}); set $REFLOGP_CACHE_DIR to a "
            "writable folder"
        ) from error
    return file


def load_table(file: Path) -> pa.Table:
    """Map a file that `save_table` wrote into memory, and return its table."""
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        return stream.read_all()
