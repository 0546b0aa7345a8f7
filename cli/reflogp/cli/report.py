"""`reflogp report`: describe a scored dataset in an HTML page."""

from __future__ import annotations

from typing import Annotated

import typer

from reflogp.cli import options
from reflogp.cli.console import EXIT_MISSES, err, missing_extra, out, print_dropped, print_json, progress_bar, quiet_libraries
from reflogp.cli.reference import find_reference
from reflogp.store import Store, UsageError
from reflogp.store.commands import naming_command, score_command


def report(
    model: options.Model,
    data: options.Data,
    store: options.Store,
    output: Annotated[str, typer.Option("--output", "-o", help="Folder to write: a new one, or one of an earlier report.")],
    dtype: options.StoreDtype = "auto",
    lm_head_dtype: options.LmHeadDtype = None,
    max_length: options.MaxLength = None,
    truncation_mode: options.TruncationMode = "keep_start",
    form: options.Form = None,
    snapshot: options.SnapshotNumber = None,
    split: options.Split = "train",
    revision: options.Revision = None,
    tokenizer: options.Tokenizer = None,
    chat_template: options.ChatTemplate = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> None:
    """Check whether a scored dataset is sane for training with this reference: one HTML page, and its charts as PNG.

    It shows log-probs, margins, the reference's accuracy, outliers and duplicates with their tokens coloured by log-prob, what
    each max_length would cut, and which rows have no values. Loads no model: tokens come from the model folder's tokenizer,
    values from the store. The exit code is 3 if some rows have no values.

    Example: reflogp report ./sft-model pairs.jsonl --store ./logps -o ./report --max-length 1024
    """
    try:
        from reflogp.scoring.data.choose_tokenizer import chosen_tokenizer
        from reflogp.scoring.data.read import RowSource
        from reflogp.scoring.data.shape import FORMATS
        from reflogp.scoring.reports.build import write_report
    except ImportError as error:
        raise missing_extra("service", error) from error
    quiet_libraries()
    if form is not None and form not in FORMATS:
        raise UsageError(f"--format {form}: use one of {', '.join(FORMATS)}")
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
        form=form,
        tokenizer=tokenizer,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
    opened = Store(store)
    with naming_command(command):
        folder, reference = find_reference(opened, model, dtype, lm_head_dtype, revision)
        at = opened.table_of(reference).snapshot(snapshot)
    with progress_bar("reading") as bar:
        summary = write_report(
            source,
            folder,
            opened.uri,
            reference,
            at,
            output,
            score=command,
            model=model,
            form=form,  # type: ignore[arg-type]
            max_length=max_length,
            truncation_mode=truncation_mode,
            tokenizer=chosen_tokenizer(folder, tokenizer, chat_template, trust_remote_code),
            watcher=bar,
        )
    print_dropped(summary.dropped_rows)
    if summary.missing and at.damaged:
        err.print(f"first repair the store: {at.repair_command()}")
    if summary.missing:
        err.print(
            f"{summary.missing:,} rows have no values in snapshot {summary.snapshot}; score them: {command}",
        )
    if as_json:
        print_json(summary.as_dict())
    else:
        for finding in summary.findings:
            if finding["kind"] in ("mend", "look"):
                out.print(f"{finding['kind']}: {finding['text']}")
        out.print(
            f"{summary.output} ({summary.with_values:,} of {summary.rows:,} rows with values, snapshot {summary.snapshot})"
        )
    if summary.missing or summary.bad_rows:
        raise typer.Exit(EXIT_MISSES)
