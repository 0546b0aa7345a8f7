"""`reflogp join`: write a dataset's rows with reference log-prob columns."""

from __future__ import annotations

from typing import Annotated

import typer

from reflogp.cli import options
from reflogp.cli.console import EXIT_MISSES, err, missing_extra, out, print_dropped, print_json, progress_bar, quiet_libraries
from reflogp.cli.reference import find_reference
from reflogp.store import Store
from reflogp.store.commands import naming_command, score_command


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
        float | None, typer.Option(min=0.0, max=1.0, help="LD-DPO's weight of the longer completion's tail.")
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
        from reflogp.scoring.data.choose_tokenizer import chosen_tokenizer
        from reflogp.scoring.data.read import RowSource
        from reflogp.scoring.joining import join_dataset
    except ImportError as error:
        raise missing_extra("service", error) from error
    quiet_libraries()
    source = RowSource(data, split)
    command = score_command(
        model,
        data,
        store,
        dtype,
        lm_head_dtype=lm_head_dtype,
        max_length=max_length,
        truncation_mode=truncation_mode,
        split=split,
        revision=revision,
        tokenizer=tokenizer,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
    opened = Store(store)
    with naming_command(command):
        folder, reference = find_reference(opened, model, dtype, lm_head_dtype, revision)
        at = opened.table_of(reference).snapshot(snapshot)
    with progress_bar("joining") as bar:
        summary = join_dataset(
            source,
            folder,
            opened.uri,
            reference,
            at,
            output,
            max_length=max_length,
            truncation_mode=truncation_mode,
            ld_alpha=ld_alpha,
            tokenizer=chosen_tokenizer(folder, tokenizer, chat_template, trust_remote_code),
            watcher=bar,
        )
    print_dropped(summary.dropped_rows)
    if summary.missing and at.damaged:
        err.print(f"first repair the store: {at.repair_command()}")
    if summary.missing:
        named = ", ".join(map(str, summary.missing_row_numbers[:10])) + (" …" if summary.missing > 10 else "")
        err.print(f"{summary.missing} rows are not in snapshot {summary.snapshot} and were left out: {named}", style="yellow")
        err.print(f"score them: {command}", markup=False)
    if as_json:
        print_json(summary.as_dict())
    else:
        where = f"written to {output}" if summary.written else f"have values, so {output} was not written"
        out.print(f"{summary.written:,} of {summary.rows:,} rows {where} (snapshot {summary.snapshot})")
    if summary.missing or summary.bad_rows:
        raise typer.Exit(EXIT_MISSES)
