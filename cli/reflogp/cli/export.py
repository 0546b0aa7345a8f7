"""`reflogp export`: write joined values in the file formats that other training stacks read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reflogp.cli import options
from reflogp.cli.console import EXIT_MISSES, err, missing_extra, out, print_json
from reflogp.cli.exports import (
    JoinedPairs,
    LossType,
    read_pairs,
    write_fairseq2,
    write_megatron_bridge,
    write_open_instruct,
)
from reflogp.client.errors import RowsWithoutValuesError
from reflogp.store import UsageError
from reflogp.store.texts import counted

Stack = Literal["open-instruct", "megatron-bridge", "fairseq2"]

#: Dict from each stack to the options that it requires. Options that only other stacks require are rejected.
_NEEDS = {"open-instruct": ("--hash", "--loss-type"), "megatron-bridge": ("--metadata",), "fairseq2": ()}
#: Maximum number of rows without values that the output of --json lists, as in `reflogp join`.
_LISTED_ROWS = 100


def export(
    joined: Annotated[Path, typer.Argument(help="File written by `reflogp join` or `reflogp jobs result`.", metavar="JOINED")],
    stack: Annotated[Stack, typer.Option("--as", help="The training stack that will read the output.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Output path. open-instruct: its cache folder, $REFERENCE_LOGPROBS_CACHE_PATH; megatron-bridge: the folder "
            "that dataset.ref_artifact in its config names; fairseq2: a .jsonl file.",
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
        LossType | None,
        typer.Option(
            help="open-instruct: the training run's --loss_type. dpo and wpo use each completion's log-prob sum; "
            "dpo_norm uses the mean over its tokens."
        ),
    ] = None,
    metadata: Annotated[
        Path | None,
        typer.Option(
            help="megatron-bridge: JSON file with the fields of the object that Megatron-Bridge's "
            "expected_scoring_metadata(config) returns. This command copies these fields to scoring_metadata.json in the "
            "output folder. The training run compares that file with its own config."
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Write joined pairs in a format that another training stack reads instead of running a reference model.

    Each value belongs to an exact sequence of tokens, but these stacks do not check whether a row's values were computed for
    its tokens. Therefore, tokenize the pairs with the stack itself, and write a dataset of these token ids (prompt_ids,
    chosen_ids, rejected_ids), with its rows in the order of the stack's training dataset. For fairseq2, the dataset also needs
    the columns src, tgt_chosen and tgt_rejected. Then score and join this dataset. Every row needs values. If some rows have no
    values, this command lists these rows, writes nothing, and exits with code 3.

    Example: reflogp export joined.parquet --as open-instruct -o ./caches --hash 3f0c9d2b81a4e567 --loss-type dpo_norm

    Example: reflogp export joined.parquet --as megatron-bridge -o ./ref-logprobs --metadata expected.json

    Example: reflogp export joined.parquet --as fairseq2 -o ./pairs/train.jsonl
    """
    _check_options(stack, {"--hash": cache_hash, "--loss-type": loss_type, "--metadata": metadata})
    try:
        pairs = read_pairs(joined)
        files = _write(stack, pairs, output, cache_hash, loss_type, metadata)
    except RowsWithoutValuesError as error:
        err.print(f"reflogp: {error}", style="red")
        if as_json:
            missing = {"missing": len(error.reasons), "missing_row_numbers": list(error.reasons)[:_LISTED_ROWS]}
            print_json({"stack": stack, "rows": error.rows, "written": 0, **missing, "files": []})
        raise typer.Exit(EXIT_MISSES) from error
    except ImportError as error:
        raise missing_extra("service", error) from error
    if as_json:
        values = {name: getattr(pairs, name) for name in ("reference_id", "reference_dtype", "snapshot")}
        counts = {"rows": len(pairs), "written": len(pairs), "missing": 0, "missing_row_numbers": []}
        print_json({"stack": stack, **counts, "files": [str(file) for file in files], **values})
    else:
        out.print(f"{counted(len(pairs), 'pair')} written for {stack}: {', '.join(map(str, files))}")


def _check_options(stack: Stack, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name in _NEEDS[stack] and value is None:
            raise UsageError(f"--as {stack} requires {name}; see `reflogp export --help`")
        if name not in _NEEDS[stack] and value is not None:
            raise UsageError(f"{name} does not apply to --as {stack}")


def _write(
    stack: Stack,
    pairs: JoinedPairs,
    output: Path,
    cache_hash: str | None,
    loss_type: LossType | None,
    metadata: Path | None,
) -> list[Path]:
    """Write a stack's files and return their paths.

    Call `_check_options` first: this function assumes that all options required by the stack were given."""
    match stack:
        case "open-instruct":
            assert cache_hash is not None and loss_type is not None
            return [write_open_instruct(pairs, output, cache_hash, loss_type)]
        case "megatron-bridge":
            assert metadata is not None
            return write_megatron_bridge(pairs, output, _read_object(metadata))
        case "fairseq2":
            return [write_fairseq2(pairs, output)]


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--metadata {file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"--metadata {file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"--metadata {file} does not contain a JSON object")
    return value
