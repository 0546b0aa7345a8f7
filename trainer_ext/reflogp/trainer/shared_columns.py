"""Share reference columns among the processes of a node: one writes an Arrow file, and all map it into memory."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset

from reflogp.store import UsageError
from reflogp.store.arrow_stream import stream_buffer
from reflogp.store.digests import cache_dir

Columns = dict[str, npt.NDArray[np.float32]]


def save_columns(columns: Columns) -> Path:
    """Write columns of equal length, each float32 (n,), and return the file's path.

    The file is named by its content, so runs that join the same values share it. It may be deleted when no run uses it.

    Raises UsageError if the cache folder cannot be written.
    """
    return save_table(pa.table({name: pa.array(values, pa.float32()) for name, values in columns.items()}))


def load_columns(file: Path) -> Columns:
    """Return the columns of such a file as arrays that share the file's memory pages with other processes."""
    table = load_table(file)
    return {name: table[name].combine_chunks().to_numpy() for name in table.column_names}


def save_table(table: pa.Table) -> Path:
    """Write a table and return the file's path; see `save_columns`."""
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
            f"the cache folder {folder} cannot be written ({error.strerror or error}); name another in $REFLOGP_CACHE_DIR"
        ) from error
    return file


def load_table(file: Path) -> pa.Table:
    """Return the table of such a file, mapped into memory."""
    return Dataset.from_file(str(file)).data.table
