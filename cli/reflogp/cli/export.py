"""`reflogp export`: write joined values in the file formats of training stacks, which run no other model where they have them.

axolotl-kd, distillkit: see teacher_exports.py.

open-instruct: the format is defined in allenai/open-instruct, by TensorCache in open_instruct/model_utils.py and by
build_reference_logprobs_cache in dpo_utils.py. It is a .pt file with the float32 tensors "chosen_logps" and "rejected_logps",
one value per pair in row order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from reflogp.cli import options, teacher_exports
from reflogp.cli.console import EXIT_MISSES, err, needs, print_json, print_result
from reflogp.store import UsageError
from reflogp.store.files import write_atomically
from reflogp.store.joins import KTO_COLUMNS, PAIR_COLUMNS, ROW_COLUMN, tokens_column
from reflogp.store.texts import counted

#: The value that compute_reference_cache_hash in dpo_utils.py returns: the first 16 hex digits of a sha256.
_HASH = re.compile(r"[0-9a-f]{16}")
_SETTINGS = ("ld_alpha", "max_length", "truncation_mode", "reference_id", "reference_dtype", "snapshot")
_LOGPS = tuple(PAIR_COLUMNS.values())
_TOKENS = tuple(map(tokens_column, _LOGPS))
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
    (prompt_ids, chosen_ids, rejected_ids), with its rows in the order of open-instruct's dataset. If some rows have no values,
    this command lists these rows, writes nothing, and exits with code 3.

    Example: reflogp export joined.parquet --as axolotl-kd -o kd.parquet

    Example: reflogp export joined.parquet --as distillkit -o ./kd

    Example: reflogp export joined.parquet --as open-instruct -o ./caches --hash 3f0c9d2b81a4e567 --loss-type dpo_norm
    """
    if stack != "open-instruct":
        if cache_hash is not None or loss_type is not None:
            raise UsageError("--hash and --loss-type are options of --as open-instruct")
        result = teacher_exports.WRITERS[stack](joined, output)
        print_result(result, as_json, f"{counted(result['written'], 'row')} written for {stack}: {output}")
        return
    if cache_hash is None or loss_type is None:
        raise UsageError("--as open-instruct needs --hash and --loss-type")
    with needs("service"):
        import torch
    if not _HASH.fullmatch(cache_hash):
        raise UsageError(
            f"--hash {cache_hash}: open-instruct's hashes have 16 digits (0-9 and a-f); copy the hash from open-instruct's log"
        )
    table, settings, expected = _read(joined)
    if reasons := _rows_without_values(table, expected):
        err.print(
            f"reflogp: {len(reasons)} of {expected} rows have no values in {joined}: {_named(reasons)}. An export needs values "
            "for every row of the dataset: score these rows or remove them from the dataset, then join the dataset again",
            style="red",
        )
        if as_json:
            missing = {"missing": len(reasons), "missing_row_numbers": sorted(reasons)[:_LISTED_ROWS]}
            print_json({"stack": stack, "rows": expected, "written": 0, **missing})
        raise typer.Exit(EXIT_MISSES)
    tensors = {
        name.removeprefix("ref_"): torch.tensor(_values(joined, table, name, loss_type == "dpo_norm")) for name in _LOGPS
    }
    file = output / f"{cache_hash}.pt"
    with write_atomically(file) as partial, partial.open("wb") as out_file:
        torch.save(tensors, out_file)
    origin = {name: settings[name] for name in ("reference_id", "reference_dtype", "snapshot")}
    result = {"stack": stack, "rows": expected, "written": expected, "missing": 0, "files": [str(file)], **origin}
    print_result(result, as_json, f"{counted(expected, 'pair')} written for {stack}: {file}")


def _read(file: Path) -> tuple[pa.Table, dict[str, Any], int]:
    """Return (row numbers, values and errors of a joined file or job's result, its settings, the dataset's number of rows).

    Raises UsageError if the file is not one of these, or if open-instruct's values would differ from the file's.
    """
    try:
        opened = pq.ParquetFile(file)
        names, metadata = opened.schema_arrow.names, opened.metadata.metadata
        found = json.loads(metadata[b"reflogp"])
        settings = {name: found[name] for name in _SETTINGS}
        expected = json.loads(metadata[b"reflogp.coverage"])["rows"]
        if KTO_COLUMNS["completion_ids"] in names and _LOGPS[0] not in names:
            raise UsageError(f"{file} has KTO rows, but exports need preference pairs; join a dataset of preference pairs")
        row_column = ROW_COLUMN if ROW_COLUMN in names else "row"  # its name in a job's result, which also has errors
        needed = [row_column, *_LOGPS, *_TOKENS, *(["error"] if row_column == "row" else [])]
        table = opened.read(needed).select(needed)
        table = table.rename_columns([ROW_COLUMN, *table.column_names[1:]])
    except (pa.ArrowException, OSError, TypeError, KeyError, ValueError) as error:
        raise UsageError(f"{file} cannot be read as output of `reflogp join` or `reflogp jobs result`: {error!r}") from error
    if settings["ld_alpha"] is not None:
        raise UsageError(
            f"{file} was joined with ld_alpha {settings['ld_alpha']}, but exports need sums in which every token has the "
            "weight 1; run `reflogp join` or `reflogp submit` again without --ld-alpha"
        )
    if settings["max_length"] is not None and settings["truncation_mode"] != "keep_start":
        raise UsageError(
            f"{file} was joined with truncation_mode {settings['truncation_mode']}, but open-instruct keeps the start of each "
            "sequence; run `reflogp join` or `reflogp submit` again with --truncation-mode keep_start"
        )
    if not (np.diff(table[ROW_COLUMN].to_numpy()) > 0).all():
        raise UsageError(f"the rows of {file} are not in dataset order, or some are repeated; run `reflogp join` again")
    return table, settings, expected


def _rows_without_values(table: pa.Table, expected: int) -> dict[int, str]:
    """Return the numbers of rows without values, each with its reason or "".

    In a job's result, the values of such rows are null; in a joined file, such rows are missing.
    """
    rows = table[ROW_COLUMN].to_numpy()
    null = np.logical_or.reduce([table[name].is_null().to_numpy() for name in (*_LOGPS, *_TOKENS)])
    reasons = {int(row): "" for row in np.setdiff1d(np.arange(expected), rows[~null])}
    if "error" in table.column_names:
        reasons |= {int(rows[at]): table["error"][at].as_py() or "" for at in np.flatnonzero(null)}
    return reasons


def _values(file: Path, table: pa.Table, name: str, means: bool) -> npt.NDArray[np.float32]:
    values = table[name].to_numpy().astype(np.float64)
    if means:
        with np.errstate(divide="ignore", invalid="ignore"):
            values = values / table[tokens_column(name)].to_numpy()
    if bad := dict.fromkeys(np.flatnonzero(~np.isfinite(values)).tolist(), ""):
        needs = " (a mean needs a completion with at least one token)" if means else ""
        raise UsageError(
            f"{file} has values that are not finite{needs}: {_named(bad)}; remove these rows, and join the dataset again"
        )
    exported: npt.NDArray[np.float32] = values.astype(np.float32)
    return exported


def _named(rows: dict[int, str]) -> str:
    """Return a phrase such as "rows 4 (too long), 5, 9": the first rows, each with its reason if it is known."""
    numbers = sorted(rows)
    named = ", ".join(f"{row} ({rows[row]})" if rows[row] else str(row) for row in numbers[:_NAMED_ROWS])
    more = f" and {len(numbers) - _NAMED_ROWS} more" if len(numbers) > _NAMED_ROWS else ""
    return f"{'row' if len(numbers) == 1 else 'rows'} {named}{more}"
