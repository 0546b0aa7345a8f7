"""`reflogp join`: write a dataset's rows with reference log-prob columns."""

from __future__ import annotations

from typing import Annotated

import typer

from reflogp.cli import options
from reflogp.cli.console import EXIT_MISSES, err, missing_extra, out, print_json, progress_bar, quiet_libraries
from reflogp.cli.scored import open_scored, print_left_out
from reflogp.store.commands import ScoreArguments
from reflogp.store.windows import TrainerSettings


def join(
    model: options.Model,
    data: options.Data,
    store: options.Store,
    output: Annotated[str, typer.Option("--output", "-o", help="Parquet file to write.")],
    dtype: options.StoreDtype = "auto",
    lm_head_dtype: options.LmHeadDtype = None,
    max_length: options.MaxLength = None,
    truncation_mode: options.TruncationMode = "keep_start",
    ld_alpha: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="LD-DPO's weight of tokens beyond the pair's shorter completion.")
    ] = None,
    snapshot: options.SnapshotNumber = None,
    split: options.Split = "train",
    revision: options.Revision = None,
    tokenizer: options.Tokenizer = None,
    chat_template: options.ChatTemplate = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> None:
    """Write a dataset's rows with ref_chosen_logps and ref_rejected_logps (KTO: ref_logps) as Parquet.

    Loads no model: tokens come from the model folder's tokenizer, values from the store. Rows without values are named and left
    out; the exit code is then 3.

    Example: reflogp join ./sft-model pairs.jsonl --store ./logps -o pairs-with-ref.parquet --max-length 1024
    """
    try:
        from reflogp.scoring.joining import join_dataset
    except ImportError as error:
        raise missing_extra("service", error) from error
    quiet_libraries()
    arguments = ScoreArguments(
        model,
        data,
        store,
        dtype,
        TrainerSettings(max_length, truncation_mode, ld_alpha),
        lm_head_dtype=lm_head_dtype,
        revision=revision,
        split=split,
        tokenizer=tokenizer,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
    dataset, at = open_scored(arguments, snapshot)
    with progress_bar("joining") as bar:
        summary = join_dataset(dataset, at, output, arguments.settings, bar)
    print_left_out(summary, at)
    if summary.missing:
        named = ", ".join(map(str, summary.missing_row_numbers[:10])) + (" …" if summary.missing > 10 else "")
        err.print(f"{summary.missing} rows are not in snapshot {summary.snapshot} and were left out: {named}", style="yellow")
        err.print(f"score them: {arguments.command()}", markup=False)
    if as_json:
        print_json(summary.as_dict())
    else:
        where = f"written to {output}" if summary.written else f"have values, so {output} was not written"
        out.print(f"{summary.written:,} of {summary.rows:,} rows {where} (snapshot {summary.snapshot})")
    if summary.missing or summary.bad_rows:
        raise typer.Exit(EXIT_MISSES)
