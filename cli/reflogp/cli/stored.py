"""`reflogp join` and `reflogp report`: what is made of a dataset and its stored values, without the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from reflogp.cli import options
from reflogp.cli.console import EXIT_MISSES, err, needs, print_notes, print_result, progress_bar
from reflogp.cli.options import takes_score_arguments
from reflogp.cli.score import HASHING, find_reference
from reflogp.scoring.machine import quiet_libraries
from reflogp.store import Snapshot, Store
from reflogp.store.commands import ScoreArguments, naming_command
from reflogp.store.texts import counted
from reflogp.store.windows import PROMPT_FILLS

if TYPE_CHECKING:
    from reflogp.scoring.data.tokenize import TokenizedDataset
    from reflogp.scoring.versus import Versus


@takes_score_arguments
def join(
    arguments: ScoreArguments,
    output: Annotated[str, typer.Option("--output", "-o", help="Parquet file to write. Its name must end in .parquet.")],
    ld_alpha: options.LdAlpha = None,
    versus: options.Versus = None,
    top_k: Annotated[
        int,
        typer.Option(
            min=0, max=256, help="Also add the K most probable tokens of each position (`score --top-k`).", metavar="K"
        ),
    ] = 0,
    snapshot: options.SnapshotNumber = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a dataset's rows as Parquet, with the added columns ref_chosen_logps and ref_rejected_logps (KTO: ref_logps).

    This command does not load the model. It reads the values from the store, and tokenizes the dataset with the tokenizer in
    the model's folder or, if given, with --tokenizer. Rows that have no values or cannot be used are reported and
    skipped, and the exit code is then 3.

    With --versus, the values of a second model are added too (versus_chosen_logps, versus_rejected_logps), and the values of
    MODEL minus those of the second model (log_ratio_chosen, log_ratio_rejected, and their difference, implicit_reward_margin).

    Example: reflogp join ./sft-model pairs.jsonl --store ./logps -o pairs-with-ref.parquet --max-length 1024
    """
    with needs("service"):
        from reflogp.scoring.joining import TopTokens, join_dataset
    quiet_libraries()
    _, dataset, at = open_scored(arguments, snapshot)
    second = _open_versus(versus, arguments, at)
    top = TopTokens.find(Store(arguments.store), at.reference, top_k, snapshot)
    with progress_bar("joining") as bar:
        summary = join_dataset(dataset, at, output, replace(arguments.settings, ld_alpha=ld_alpha), bar, second, top)
    _print_dropped(summary.dropped_rows)
    print_notes(summary.notes)
    if summary.missing:
        named = ", ".join(map(str, summary.missing_row_numbers[:10])) + (" …" if summary.missing > 10 else "")
        missing = counted(summary.missing, "row")
        err.print(
            f"skipped {missing} without values in snapshot {summary.snapshot} (0-based row numbers: {named})", style="yellow"
        )
        err.print(f"score them: {arguments.command()}{f' --top-k {top_k}' if top_k else ''}")
    _print_versus_missing(summary.versus_missing, second, dataset)
    where = f"written to {output}" if summary.written else f"could be joined, so {output} was not written"
    line = f"{summary.written:,} of {summary.rows:,} rows {where} (snapshot {summary.snapshot})"
    print_result(summary.as_dict(), as_json, line)
    if summary.missing or summary.versus_missing or summary.bad_rows:
        raise typer.Exit(EXIT_MISSES)


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
    versus: options.Versus = None,
    snapshot: options.SnapshotNumber = None,
    as_json: options.AsJson = False,
) -> None:
    """Write an HTML report that shows whether a scored dataset and its reference are suitable for training.

    The page shows log-probs, margins, the reference's accuracy, outliers, and duplicates. The tokens of outliers and duplicates
    are colored by log-prob. For several values of max_length, the page shows the percentage of rows that would be cut or
    dropped, and the percentage of completion tokens that would be lost. The page also lists rows without values (at most 100).

    With --versus, the page compares MODEL with a second model: the margins of the implicit rewards of DPO, where MODEL is the
    policy and the second model its reference, and the pairs with the lowest margins.

    This command does not load the model. It reads the values from the store, and tokenizes the dataset. The tokenizer is the
    one in the model's folder, unless --tokenizer is given. The exit code is 3 if some rows have no values or cannot be used.

    Example: reflogp report ./sft-model pairs.jsonl --store ./logps -o ./report --max-length 1024
    """
    with needs("service"):
        from reflogp.scoring.reports.build import write_report
    quiet_libraries()
    command = arguments.command()
    _, dataset, at = open_scored(arguments, snapshot)
    second = _open_versus(versus, arguments, at)
    with progress_bar("reading") as bar:
        summary = write_report(
            dataset, at, output, arguments.settings, score=command, model=arguments.model, watcher=bar, versus=second
        )
    _print_dropped(summary.dropped_rows)
    if summary.missing:
        err.print(
            f"snapshot {summary.snapshot} has no values for {counted(summary.missing, 'row')}; to add the values: {command}",
        )
    _print_versus_missing(summary.versus_missing, second, dataset)
    print_result(
        summary.as_dict(),
        as_json,
        *(f"{finding['kind']}: {finding['text']}" for finding in summary.findings if finding["kind"] in ("fix", "check")),
        f"report written to {summary.output} ({counted(summary.with_values, 'example')} with values, "
        f"from {counted(summary.rows, 'row')}; snapshot {summary.snapshot})",
    )
    if summary.missing or summary.versus_missing or summary.bad_rows:
        raise typer.Exit(EXIT_MISSES)


def open_scored(arguments: ScoreArguments, number: int | None) -> tuple[str, TokenizedDataset, Snapshot]:
    """Return (the model's folder, the dataset, the snapshot in which its values are looked up). The model is not loaded.

    The message of StoreNotFoundError and ReferenceNotFoundError contains the command that scores the dataset.
    """
    from reflogp.scoring.api import tokenized
    from reflogp.scoring.data.read import RowSource

    rows = RowSource(arguments.data, arguments.split)
    opened = Store(arguments.store)
    with naming_command(arguments.command()):
        folder, reference = find_reference(opened, arguments)
        snapshot = opened[reference].snapshot(number)
    return folder, tokenized(rows, folder, arguments), snapshot


def _open_versus(model: str | None, arguments: ScoreArguments, first: Snapshot) -> Versus | None:
    """Open the second model of --versus, and print why its dtype was chosen if it is "auto"."""
    from reflogp.scoring.api import open_versus

    if model is None:
        return None
    with progress_bar(HASHING) as bar:
        versus, reason = open_versus(Store(arguments.store), model, arguments, first, progress=bar.hashed)
    if reason:
        err.print(reason)
    return versus


def _print_versus_missing(rows: int, versus: Versus | None, dataset: TokenizedDataset) -> None:
    if rows and versus:
        said, command = versus.explain(rows, dataset.tokenizer)
        err.print(said, style="yellow")
        if command:
            err.print(f"score them: {command}")


def _print_dropped(rows: int) -> None:
    if rows:
        err.print(f"dropped {counted(rows, 'row')}, as TRL does, because {PROMPT_FILLS}", style="yellow")
