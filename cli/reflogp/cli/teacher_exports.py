"""Datasets for distillation: the most probable tokens of joined rows, in the formats of axolotl and DistillKit.

axolotl-kd: a dataset of the type axolotl.integrations.kd.chat_template (src/axolotl/integrations/kd/chat_template.py): Parquet
rows with the lists `logprobs` and `target_token_ids`, which describe the last tokens of the chat.

distillkit: the files of DistillKit's capture (distillkit/sample_logits_vllm.py). In data_0.parquet, `input_ids` has a row's
token ids, and the j-th entries of `compressed_logprobs` and `bytepacked_indices` describe the token j + 1.
distillkit/compression/config.py describes the compression; of its settings, these files use the ones that lose nothing: all
log-probs are float16, as they are stored, and each id takes the bits that the largest id needs, the first bit of an id first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from reflogp.store import UsageError
from reflogp.store.files import write_atomically
from reflogp.store.joins import INPUT_IDS_COLUMN, ROW_COLUMN

_IDS, _LOGPS = "ref_top_ids", "ref_top_logps"
#: Rows in memory at a time, and positions whose ids are taken apart into bits at a time: 4 * k * bits bytes a position.
_ROWS_AT_ONCE, _POSITIONS_AT_ONCE = 64, 4096
_WHOLE = "whole sequences: score and join rows with `messages` or `text`"
#: What DistillKit needs to decode the files, as it writes its own settings.
_CONFIG = """\
# Settings of the section teacher.logprob_compressor of a training run with DistillKit. `d` says how many bits an id takes.
d: {d}
k: {k}
exact_k: {k}
exact_dtype: float16
polynomial_terms: null
residual_bins: []
delta_encoding: false
error_diffusion: false
"""


def write_axolotl(joined: Path, output: Path) -> dict[str, Any]:
    """Write a Parquet file for axolotl's plugin for distillation.

    Raises UsageError if the joined file has no conversations with most probable tokens, or was truncated at the end.
    """
    if output.suffix != ".parquet":
        raise UsageError(f"the output {output} is written as a Parquet file, so its name must end in .parquet")
    opened, found = _open(joined)
    names = opened.schema_arrow.names
    kept = [name for name in ("messages", "conversations", "tools") if name in names]
    if not {"messages", "conversations"} & set(kept):
        raise UsageError(f"{joined} has no conversations: score and join rows with a column `messages`, both with --top-k")
    if found["max_length"] is not None and found["truncation_mode"] == "keep_start":
        raise UsageError(
            f"{joined} was joined with max_length {found['max_length']}, but axolotl aligns the values with the end of each "
            "chat: run `reflogp join` again without --max-length"
        )
    renamed = [*kept, "logprobs", "target_token_ids"]
    tables = (table.select([*kept, _LOGPS, _IDS]).rename_columns(renamed) for table in _tables(opened))
    return _summary("axolotl-kd", output, _write(output, tables), found)


def write_distillkit(joined: Path, output: Path) -> dict[str, Any]:
    """Write a folder with a dataset for DistillKit, and with the settings of its compression.

    Raises UsageError if the joined file has other rows than whole sequences with most probable tokens, or was truncated.
    """
    opened, found = _open(joined)
    if INPUT_IDS_COLUMN not in opened.schema_arrow.names:
        raise UsageError(
            f"{joined} has preference pairs, but DistillKit reads whole sequences: join rows with `messages` or `text`"
        )
    if found["max_length"] is not None:
        raise UsageError(
            f"{joined} was joined with max_length {found['max_length']}, but DistillKit cuts the sequences itself: run "
            "`reflogp join` again without --max-length"
        )
    largest_id = 0
    for table in _tables(opened):
        without = _lengths(table, INPUT_IDS_COLUMN) - 1 - _lengths(table, _IDS)
        if without.any():
            row = table[ROW_COLUMN][int(without.argmax())]
            raise UsageError(f"{joined}: row {row} has a prompt without values, but DistillKit reads {_WHOLE}")
        largest_id = max(largest_id, _values(table, _IDS).max(initial=0))
    bits = max(1, int(largest_id).bit_length())
    file = output / "data_0.parquet"
    rows = _write(file, (_compressed(table, found["top_k"], bits) for table in _tables(opened)))
    (output / "compression_config.yaml").write_text(_CONFIG.format(d=1 << bits, k=found["top_k"]))
    return _summary("distillkit", file, rows, found)


WRITERS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {"axolotl-kd": write_axolotl, "distillkit": write_distillkit}


def _open(joined: Path) -> tuple[pq.ParquetFile, dict[str, Any]]:
    """Return a joined file with one sequence a row, and what it says about its values."""
    try:
        opened = pq.ParquetFile(joined)
        found: dict[str, Any] = json.loads(opened.metadata.metadata[b"reflogp"])
    except (pa.ArrowException, OSError, TypeError, KeyError, ValueError) as error:
        raise UsageError(f"{joined} cannot be read as output of `reflogp join`: {error!r}") from error
    if not any(name.endswith("_top_ids") for name in opened.schema_arrow.names):
        raise UsageError(
            f"{joined} has no most probable tokens: score and join rows with `messages` or `text`, both with --top-k"
        )
    return opened, found


def _tables(opened: pq.ParquetFile) -> Iterator[pa.Table]:
    return map(pa.table, opened.iter_batches(_ROWS_AT_ONCE))


def _write(file: Path, tables: Iterator[pa.Table]) -> int:
    """Write tables to a Parquet file. Return the number of rows."""
    written, writer = 0, None
    with write_atomically(file) as partial, partial.open("wb") as opened:
        for table in tables:
            writer = writer or pq.ParquetWriter(opened, table.schema, compression="zstd")
            writer.write_table(table)
            written += len(table)
        if writer is not None:
            writer.close()
    return written


def _compressed(table: pa.Table, k: int, bits: int) -> pa.Table:
    positions, ids = _lengths(table, _IDS), _values(table, _IDS).reshape(-1, k)
    logps = _values(table, _LOGPS).astype("<f2").reshape(-1, k)
    packed = np.empty((len(ids), -(-k * bits // 8)), np.uint8)
    for start in range(0, len(ids), _POSITIONS_AT_ONCE):
        part = ids[start : start + _POSITIONS_AT_ONCE, :, None]
        of_ids = (part >> np.arange(bits - 1, -1, -1, dtype=np.int32)) & 1
        packed[start : start + _POSITIONS_AT_ONCE] = np.packbits(of_ids.reshape(len(part), k * bits), axis=1)
    return pa.table(
        {
            "input_ids": table[INPUT_IDS_COLUMN].cast(pa.list_(pa.uint64())),
            "compressed_logprobs": _lists(logps.view(np.uint8), positions),
            "bytepacked_indices": _lists(packed, positions),
        }
    )


def _lengths(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = pc.list_value_length(table[column]).to_numpy().astype(np.int64)
    return lengths


def _values(table: pa.Table, column: str) -> npt.NDArray[Any]:
    """Return all values of a column of lists of lists."""
    values: npt.NDArray[Any] = pc.list_flatten(pc.list_flatten(table[column])).to_numpy()
    return values


def _lists(values: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64]) -> pa.ListArray:
    """Return the bytes of each position, shape (positions, bytes), as a list of lists for each row."""
    starts = pa.array(np.arange(len(values) + 1, dtype=np.int32) * values.shape[1])
    inner = pa.ListArray.from_arrays(starts, pa.array(values.ravel()))
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *positions], dtype=np.int32)), inner)


def _summary(stack: str, file: Path, rows: int, found: dict[str, Any]) -> dict[str, Any]:
    origin = {name: found[name] for name in ("reference_id", "reference_dtype", "snapshot", "top_k")}
    return {"stack": stack, "rows": rows, "written": rows, "files": [str(file)], **origin}
