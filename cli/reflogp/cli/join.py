"""`reflogp join`: write a dataset's rows with added columns for reference log-probs."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from reflogp.cli import options
from reflogp.cli.console import (
    EXIT_MISSES,
    err,
    missing_extra,
    out,
    print_dropped,
    print_json,
    print_notes,
    progress_bar,
    quiet_libraries,
)
from reflogp.cli.options import takes_score_arguments
from reflogp.cli.scored import open_scored
from reflogp.store.commands import ScoreArguments
from reflogp.store.texts import counted


@takes_score_arguments
def join(
    arguments: ScoreArguments,
    output: Annotated[str, typer.Option("--output", "-o", help="Parquet file to write. Its name must end in .parquet.")],
    ld_alpha: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="LD-DPO's weight for tokens beyond the length of the pair's shorter completion. Default: all tokens have the "
            "same weight.",
        ),
    ] = None,
    snapshot: options.SnapshotNumber = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a dataset's rows as Parquet, with the added columns ref_chosen_logps and ref_rejected_logps (KTO: ref_logps).

    This command does not load the model. It reads the values from the store, and tokenizes the dataset with the tokenizer in
    the model's folder or, if given, with --tokenizer. Rows that have no values or cannot be used are reported and
    skipped, and the exit code is then 3.

    Example: reflogp join ./sft-model pairs.jsonl --store ./logps -o pairs-with-ref.parquet --max-length 1024
    """
    try:
        from reflogp.scoring.joining import join_dataset
    except ImportError as error:
        raise missing_extra("service", error) from error
    quiet_libraries()
    dataset, at = open_scored(arguments, snapshot)
    with progress_bar("joining") as bar:
        summary = join_dataset(dataset, at, output, replace(arguments.settings, ld_alpha=ld_alpha), bar)
    print_dropped(summary.dropped_rows)
    print_notes(summary.notes)
    if summary.missing:
        named = ", ".join(map(str, summary.missing_row_numbers[:10])) + (" …" if summary.missing > 10 else "")
        skipped = counted(summary.missing, "row")
        err.print(
            f"skipped {skipped} without values in snapshot {summary.snapshot} (0-based row numbers: {named})",
            style="yellow",
        )
        err.print(f"score them: {arguments.command()}", markup=False)
    if as_json:
        print_json(summary.as_dict())
    else:
        where = f"written to {output}" if summary.written else f"could be joined, so {output} was not written"
        out.print(f"{summary.written:,} of {summary.rows:,} rows {where} (snapshot {summary.snapshot})")
    if summary.missing or summary.bad_rows:
        raise typer.Exit(EXIT_MISSES)
