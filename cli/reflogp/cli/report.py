"""`reflogp report`: write an HTML report about a scored dataset."""

from __future__ import annotations

from typing import Annotated

import typer

from reflogp.cli import options
from reflogp.cli.console import EXIT_MISSES, err, missing_extra, out, print_dropped, print_json, progress_bar, quiet_libraries
from reflogp.cli.options import takes_score_arguments
from reflogp.cli.scored import open_scored
from reflogp.store.commands import ScoreArguments
from reflogp.store.texts import counted


@takes_score_arguments
def report(
    arguments: ScoreArguments,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="Folder to write to: a new or empty folder, or the folder of an earlier report, which is then replaced.",
        ),
    ],
    snapshot: options.SnapshotNumber = None,
    as_json: options.AsJson = False,
) -> None:
    """Write an HTML report that shows whether a scored dataset and its reference are suitable for training.

    The page shows log-probs, margins, the reference's accuracy, outliers, and duplicates. The tokens of outliers and duplicates
    are colored by log-prob. For several values of max_length, the page shows the percentage of rows that would be cut or
    dropped, and the percentage of completion tokens that would be lost. The page also lists rows without values (at most 100).

    This command does not load the model. It reads the values from the store, and tokenizes the dataset. The tokenizer is the
    one in the model's folder, unless --tokenizer is given. The exit code is 3 if some rows have no values or cannot be used.

    Example: reflogp report ./sft-model pairs.jsonl --store ./logps -o ./report --max-length 1024
    """
    try:
        from reflogp.scoring.reports.build import write_report
    except ImportError as error:
        raise missing_extra("service", error) from error
    quiet_libraries()
    command = arguments.command()
    dataset, at = open_scored(arguments, snapshot)
    with progress_bar("reading") as bar:
        summary = write_report(dataset, at, output, arguments.settings, score=command, model=arguments.model, watcher=bar)
    print_dropped(summary.dropped_rows)
    if summary.missing:
        err.print(
            f"snapshot {summary.snapshot} has no values for {counted(summary.missing, 'row')}; to add the values: {command}",
        )
    if as_json:
        print_json(summary.as_dict())
    else:
        for finding in summary.findings:
            if finding["kind"] in ("fix", "check"):
                out.print(f"{finding['kind']}: {finding['text']}")
        out.print(
            f"report written to {summary.output} ({counted(summary.with_values, 'example')} with values, "
            f"from {counted(summary.rows, 'row')}; snapshot {summary.snapshot})"
        )
    if summary.missing or summary.bad_rows:
        raise typer.Exit(EXIT_MISSES)
