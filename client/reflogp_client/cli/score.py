"""`reflogp score`: score what a store lacks of a dataset."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from reflogp_client.cli import options
from reflogp_client.cli.console import EXIT_MISSES, needs, out, print_json, progress_bar, quiet_libraries
from reflogp_store import LogprobStore, Reference, UsageError, describe_reference, resolve_model


def score(
    model: options.Model,
    data: options.Data,
    store: options.Store,
    dtype: options.Dtype = "bfloat16",
    lm_head_dtype: options.LmHeadDtype = None,
    max_length: options.MaxLength = None,
    truncation_mode: options.TruncationMode = "keep_start",
    form: Annotated[
        str | None,
        typer.Option("--format", help="preference, kto or tokens. Default: found from the columns. kto on pairs unpairs them."),
    ] = None,
    split: options.Split = "train",
    engine: Annotated[Literal["torch"], typer.Option(help="What computes.")] = "torch",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    token_budget: Annotated[
        str, typer.Option(help="Tokens of one batch, or auto. Halved when memory runs out.", metavar="N|auto")
    ] = "auto",
    commit_sequences: Annotated[
        int, typer.Option(min=1, help="Commit at least this often; every 30 seconds in any case.")
    ] = 4096,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> None:
    """Score a dataset's sequences with a reference model and keep the log-probs.

    Scores only what the store lacks: a second run scores nothing, an interrupted one goes on where it stopped, and rows
    that share a sequence share its value. A row that cannot be used is named and left out; the exit code is then 3.

    Example: reflogp score ./sft-model pairs.jsonl.gz --store ./logps --dtype bfloat16 --max-length 2048
    """
    try:
        from reflogp_service.data.read import RowSource
        from reflogp_service.data.shape import FORMATS
        from reflogp_service.data.tokenize import load_tokenizer
        from reflogp_service.data.tokenized import TokenizedDataset
        from reflogp_service.scoring import Engine, score_dataset
    except ImportError as error:
        raise needs("service", error) from error
    quiet_libraries()
    if form is not None and form not in FORMATS:
        raise UsageError(f"--format {form}: use one of {', '.join(FORMATS)}")
    budget = _token_budget(token_budget)
    source = RowSource(data, split)
    folder, reference = find_reference(model, dtype, lm_head_dtype, revision)

    def make_engine() -> Engine:  # torch is imported only when something is missing
        from reflogp_service.engine import TorchEngine

        return TorchEngine(
            folder,
            reference.dtype,
            device,
            budget,
            lm_head_dtype=reference.lm_head_dtype,
            trust_remote_code=trust_remote_code,
        )

    with progress_bar("scoring") as bar:
        summary = score_dataset(
            TokenizedDataset(source, lambda: load_tokenizer(folder, trust_remote_code), form),  # type: ignore[arg-type]
            LogprobStore(store),
            reference,
            make_engine,
            max_length=max_length,
            truncation_mode=truncation_mode,
            watcher=bar,
            commit_sequences=commit_sequences,
        )
    _print(summary, as_json)
    if summary.bad_rows:
        raise typer.Exit(EXIT_MISSES)


def find_reference(model: str, dtype: str, lm_head_dtype: str | None, revision: str | None) -> tuple[str, Reference]:
    """(local folder, reference) of a model, hashing its weights under a progress bar unless they are known."""
    folder = resolve_model(model, revision)
    with progress_bar("hashing weights (bytes)") as bar:
        reference = describe_reference(model, dtype, lm_head_dtype=lm_head_dtype, revision=revision, progress=bar.hashed)
    return str(folder), reference


def _token_budget(text: str) -> Any:
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--token-budget {text}: use a whole number above 0, or auto")
    return int(text)


def _print(summary: Any, as_json: bool) -> None:
    if as_json:
        print_json(summary.as_dict())
        return
    out.print(
        f"{summary.rows:,} rows, {summary.sequences:,} sequences: {summary.hits:,} hits, {summary.scored:,} scored"
        + (f", {summary.duplicates:,} duplicates" if summary.duplicates else "")
        + (f", {summary.failed:,} failed" if summary.failed else "")
        + (f"; {summary.dropped_rows:,} rows dropped (prompt fills max_length)" if summary.dropped_rows else "")
    )
    if summary.scored:
        out.print(
            f"{summary.tokens:,} tokens in {summary.scoring_seconds:.1f} s: {summary.tokens_per_second:,.0f} tokens/s, "
            f"{100 * (summary.model_flops_utilization or 0):.0f}% of the device's matrix product rate"
        )
    out.print(f"reference {summary.reference_id}, snapshot {summary.snapshot} of {summary.store} ({summary.seconds:.1f} s)")
