"""`reflogp export`: write joined values in the formats of training stacks that read them instead of running another model.

axolotl-kd: a dataset of the type axolotl.integrations.kd.chat_template (src/axolotl/integrations/kd/chat_template.py): Parquet
rows with the lists `logprobs` and `target_token_ids`, which describe the last tokens of the chat.

distillkit: the files of DistillKit's capture (distillkit/sample_logits_vllm.py). In data_0.parquet, `input_ids` has a row's
token ids, and the j-th entries of `compressed_logprobs` and `bytepacked_indices` describe the token j + 1.
distillkit/compression/config.py describes the compression; of its settings, these files use the ones that lose nothing: all
log-probs are float16, as they are stored, and each id takes the bits that the largest id needs, the first bit of an id first.

open-instruct: the format is defined in allenai/open-instruct, by TensorCache in open_instruct/model_utils.py and by
build_reference_logprobs_cache in dpo_utils.py. It is a .pt file with the float32 tensors "chosen_logps" and "rejected_logps",
one value per pair in row order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from reflogp.cli import options
from reflogp.cli.console import EXIT_MISSES, err, needs, print_result
from reflogp.store import UsageError
from reflogp.store.files import write_atomically
from reflogp.store.joins import INPUT_IDS_COLUMN, PAIR_COLUMNS, ROW_COLUMN, tokens_column
from reflogp.store.texts import counted

_IDS, _TOP_LOGPS = "ref_top_ids", "ref_top_logps"
#: Rows in memory at a time, and positions whose ids are taken apart into bits at a time: 4 * k * bits bytes a position.
_ROWS_AT_ONCE, _POSITIONS_AT_ONCE = 64, 4096
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
#: The value that open-instruct's compute_reference_cache_hash returns: the first 16 hex digits of a sha256.
_HASH = re.compile(r"[0-9a-f]{16}")
#: Maximum number of rows that a message names, and that the output of --json lists.
_NAMED_ROWS, _LISTED_ROWS = 10, 100


def export(
    joined: Annotated[Path, typer.Argument(help="File written by `reflogp join` or `reflogp jobs result`.", metavar="JOINED")],
    stack: Annotated[
        Literal["axolotl-kd", "distillkit", "open-instruct"],
        typer.Option("--as", help="The training stack that will read the output."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="axolotl-kd: Parquet file to write. distillkit: folder to write. open-instruct: its cache folder, "
            "$REFERENCE_LOGPROBS_CACHE_PATH.",
        ),
    ],
    cache_hash: Annotated[
        str | None,
        typer.Option(
            "--hash",
            help="open-instruct: the hash in the name of the training run's cache file. To find it, run open-instruct's "
            "dpo.py with --cache_dataset_only: it logs 'Reference logprobs cache path: …/<hash>.pt' and stops soon after.",
        ),
    ] = None,
    loss_type: Annotated[
        Literal["dpo", "dpo_norm", "wpo"] | None,
        typer.Option(
            help="open-instruct: the training run's --loss_type. dpo and wpo use each completion's log-prob sum; dpo_norm uses "
            "the mean over its tokens."
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Write joined rows in a format that another training stack reads instead of running a reference model or a teacher.

    axolotl-kd: joined conversations with the most probable tokens of each position (`reflogp join --top-k`).

    distillkit: the same of conversations and texts, as DistillKit's own capture writes them: data_0.parquet, and the settings
    of its compression, which the training run must repeat, in compression_config.yaml.

    open-instruct: each value belongs to an exact sequence of tokens, but open-instruct does not check whether a row's value was
    computed for its tokens. Therefore, let open-instruct tokenize the pairs, and score and join a dataset of these token ids
    (prompt_ids, chosen_ids, rejected_ids), with its rows in the order of open-instruct's dataset.

    Rows without values are left out and counted, and the exit code is then 3. open-instruct finds values by row number, so if
    some rows have none, nothing is written for it, and these rows are listed.

    Example: reflogp export joined.parquet --as axolotl-kd -o kd.parquet

    Example: reflogp export joined.parquet --as distillkit -o ./kd

    Example: reflogp export joined.parquet --as open-instruct -o ./caches --hash 3f0c9d2b81a4e567 --loss-type dpo_norm
    """
    for_open_instruct = [cache_hash is not None, loss_type is not None]
    if stack != "open-instruct" and any(for_open_instruct):
        raise UsageError("--hash and --loss-type are options of --as open-instruct")
    if stack == "open-instruct" and not all(for_open_instruct):
        raise UsageError("--as open-instruct needs --hash and --loss-type")
    opened, found = _open(joined)
    written: int = opened.metadata.num_rows
    refused: list[int] = []
    if stack == "axolotl-kd":
        file = _write_axolotl(opened, found, joined, output)
    elif stack == "distillkit":
        file = _write_distillkit(opened, found, joined, output)
    else:
        file, refused = _write_open_instruct(opened, found, joined, output / f"{cache_hash}.pt", loss_type == "dpo_norm")
        written = 0 if refused else found["rows"]
    missing = len(refused) or found["rows"] - written
    result = {"stack": stack, "rows": found["rows"], "written": written, "missing": missing}
    if refused:
        err.print(
            f"reflogp: {missing} of {found['rows']} rows have no values in {joined}: {_named(refused)}. open-instruct finds "
            "values by row number, so every row needs them: run `reflogp score` and `reflogp join` for these rows too, or "
            "remove them from the dataset and join it again",
            style="red",
        )
        print_result({**result, "missing_row_numbers": refused[:_LISTED_ROWS]}, as_json)
    else:
        if missing:
            err.print(f"left out {missing:,} of {counted(found['rows'], 'row')}, which have no values", style="yellow")
        result |= {name: found[name] for name in ("reference_id", "reference_dtype", "snapshot", "top_k") if name in found}
        print_result({**result, "files": [str(file)]}, as_json, f"{counted(written, 'row')} written for {stack}: {file}")
    if missing:
        raise typer.Exit(EXIT_MISSES)


def _open(joined: Path) -> tuple[pq.ParquetFile, dict[str, Any]]:
    """Return a joined file or a job's result, and what it says about its settings, its values and the dataset's rows."""
    try:
        opened = pq.ParquetFile(joined)
        metadata = opened.metadata.metadata
        return opened, json.loads(metadata[b"reflogp.coverage"]) | json.loads(metadata[b"reflogp"])
    except (pa.ArrowException, OSError, TypeError, KeyError, ValueError) as error:
        raise UsageError(f"{joined} cannot be read as output of `reflogp join` or `reflogp jobs result`: {error!r}") from error


def _write_axolotl(opened: pq.ParquetFile, found: dict[str, Any], joined: Path, output: Path) -> Path:
    if output.suffix != ".parquet":
        raise UsageError(f"the output {output} is written as a Parquet file, so its name must end in .parquet")
    names = opened.schema_arrow.names
    kept = [name for name in ("messages", "conversations", "tools") if name in names]
    if not {"messages", "conversations"} & set(kept) or _IDS not in names:
        raise UsageError(f"{joined} has no conversations with most probable tokens: score and join `messages` with --top-k")
    if found["max_length"] is not None and found["truncation_mode"] == "keep_start":
        raise UsageError(
            f"{joined} was joined with max_length {found['max_length']}, but axolotl aligns the values with the end of each "
            "chat: run `reflogp join` again without --max-length"
        )
    renamed = [*kept, "logprobs", "target_token_ids"]
    _write(output, (table.select([*kept, _TOP_LOGPS, _IDS]).rename_columns(renamed) for table in _tables(opened)))
    return output


def _write_distillkit(opened: pq.ParquetFile, found: dict[str, Any], joined: Path, output: Path) -> Path:
    if not {INPUT_IDS_COLUMN, _IDS} <= set(opened.schema_arrow.names):
        raise UsageError(
            f"{joined} has no whole sequences with most probable tokens: score and join rows with `messages` or `text`, both "
            "with --top-k"
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
            raise UsageError(
                f"{joined}: row {row} has a prompt without values, but DistillKit reads whole sequences: score and join rows "
                "with `messages` or `text`"
            )
        largest_id = max(largest_id, _values(table, _IDS).max(initial=0))
    bits = max(1, int(largest_id).bit_length())
    _write(output / "data_0.parquet", (_compressed(table, found["top_k"], bits) for table in _tables(opened)))
    (output / "compression_config.yaml").write_text(_CONFIG.format(d=1 << bits, k=found["top_k"]))
    return output / "data_0.parquet"


def _write_open_instruct(
    opened: pq.ParquetFile, found: dict[str, Any], joined: Path, output: Path, means: bool
) -> tuple[Path, list[int]]:
    """Write the file, unless some rows have no values. Return the file and these rows."""
    with needs("service"):
        import torch
    if not _HASH.fullmatch(output.stem):
        raise UsageError(
            f"--hash {output.stem}: open-instruct's hashes have 16 digits (0-9 and a-f); copy the hash from its log"
        )
    names, pairs = opened.schema_arrow.names, list(PAIR_COLUMNS.values())
    row_column = ROW_COLUMN if ROW_COLUMN in names else "row"  # its name in a job's result
    needed = [row_column, *pairs, *map(tokens_column, pairs)]
    if not set(needed) <= set(names):
        raise UsageError(f"{joined} has no sums of preference pairs, which open-instruct reads: score and join such pairs")
    if found["ld_alpha"] is not None:
        raise UsageError(
            f"{joined} was joined with ld_alpha {found['ld_alpha']}, but exports need sums in which every token has the "
            "weight 1; run `reflogp join` or `reflogp submit` again without --ld-alpha"
        )
    if found["max_length"] is not None and found["truncation_mode"] != "keep_start":
        raise UsageError(
            f"{joined} was joined with truncation_mode {found['truncation_mode']}, but open-instruct keeps the start of each "
            "sequence; run `reflogp join` or `reflogp submit` again with --truncation-mode keep_start"
        )
    table = opened.read(needed).drop_null()  # in a job's result, rows without values are null
    rows = table[row_column].to_numpy()
    if not (np.diff(rows) > 0).all():
        raise UsageError(f"the rows of {joined} are not in dataset order, or some are repeated; run `reflogp join` again")
    if missing := np.setdiff1d(np.arange(found["rows"]), rows).tolist():
        return output, missing
    tensors = {}
    for name in pairs:
        tokens = table[tokens_column(name)].to_numpy() if means else np.ones(len(rows))
        with np.errstate(divide="ignore", invalid="ignore"):
            values = table[name].to_numpy().astype(np.float64) / tokens
        if bad := np.flatnonzero(~np.isfinite(values)).tolist():
            why = " (a mean needs a completion with at least one token)" if means else ""
            raise UsageError(
                f"{joined} has values that are not finite{why}: {_named(bad)}; remove these rows, and join the dataset again"
            )
        tensors[name.removeprefix("ref_")] = torch.tensor(values, dtype=torch.float32)
    with write_atomically(output) as partial, partial.open("wb") as file:
        torch.save(tensors, file)
    return output, []


def _named(rows: list[int]) -> str:
    more = f" and {len(rows) - _NAMED_ROWS} more" if len(rows) > _NAMED_ROWS else ""
    return f"{'row' if len(rows) == 1 else 'rows'} {', '.join(map(str, rows[:_NAMED_ROWS]))}{more}"


def _tables(opened: pq.ParquetFile) -> Iterator[pa.Table]:
    return map(pa.table, opened.iter_batches(_ROWS_AT_ONCE))


def _write(file: Path, tables: Iterator[pa.Table]) -> None:
    writer = None
    with write_atomically(file) as partial, partial.open("wb") as opened:
        for table in tables:
            writer = writer or pq.ParquetWriter(opened, table.schema, compression="zstd")
            writer.write_table(table)
        if writer is not None:
            writer.close()


def _compressed(table: pa.Table, k: int, bits: int) -> pa.Table:
    positions, ids = _lengths(table, _IDS), _values(table, _IDS).reshape(-1, k)
    logps = _values(table, _TOP_LOGPS).astype("<f2").reshape(-1, k)
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
