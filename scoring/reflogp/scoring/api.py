"""Provide the commands `score`, `join` and `report` as Python functions, which also accept datasets in memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from tqdm.auto import tqdm
from transformers import AutoConfig, PreTrainedTokenizerBase

from reflogp.scoring.data.objects import kind_of, open_dataset
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.tokenize import TokenizedDataset, chosen_processor, chosen_tokenizer
from reflogp.scoring.engines import EngineChoice, PassEngine
from reflogp.scoring.errors import NotScoredError
from reflogp.scoring.joining import JoinedWindow, JoinSummary, TopTokens, joined_windows, with_columns
from reflogp.scoring.reports.build import write_report
from reflogp.scoring.reports.collect import ReportSummary
from reflogp.scoring.runs.callbacks import BadRows, progress_bar
from reflogp.scoring.runs.pipeline import EngineScheduler
from reflogp.scoring.runs.score import score_dataset
from reflogp.scoring.runs.summary import ScoreSummary
from reflogp.scoring.versus import Versus, find_versus
from reflogp.scoring.vision import VisionProcessor
from reflogp.store import Reference, ReflogpError, Snapshot, Store, UsageError, resolve_model
from reflogp.store.commands import ScoreArguments, naming_command
from reflogp.store.digests import Progress
from reflogp.store.store import choose_reference
from reflogp.store.texts import counted
from reflogp.store.windows import TrainerSettings, check_truncation

#: Maximum number of rows that a message lists.
_NAMED_ROWS = 10


def score(
    model: str,
    dataset: Any,
    store: str | os.PathLike[str] | Store,
    *,
    dtype: str = "auto",
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    engine: EngineChoice | None = None,
    top_k: int = 0,
    progress: bool | None = None,
) -> Any:
    """Score a dataset's sequences, except those whose log-probs are already in the store.

    Rows that cannot be used are skipped. Unless `progress` is False, the reasons for the first ten skipped rows are printed.
    Computed values are committed to the store at least every 30 seconds. After an interruption, the same call continues from
    the last commit.

    Args:
        model: the reference model: a folder with config.json and safetensors weights, a PEFT adapter's folder, or a hub id.
        dataset: preference pairs, KTO rows or rows of token ids, as a path, a hub name (the train split is read), a
            `datasets.Dataset`, `IterableDataset` or `DatasetDict`, a pandas or Polars data frame, a `pyarrow.Table`, or a list
            of dicts.
        store: the store for the values: a folder, s3://…, gs://…, az://…, or an open Store.
        dtype: dtype in which the model computes: "float32", "bfloat16", "float16", "bfloat16-autocast" or "float16-autocast".
            The dtype is part of the reference id. "auto" uses the dtype in which this model's stored values were computed. If
            the store has no values of this model, "auto" means bfloat16, or float32 without a GPU.
        max_length: maximum number of tokens in prompt and completion together, as in the trainer's config; None for no limit.
        truncation_mode: "keep_start" or "keep_end", as in the trainer's config.
        tokenizer: the trainer's tokenizer, if it differs from the model's: a tokenizer object, a folder or a hub id. Pass an
            object if the tokenizer runs custom code.
        engine: the engine and its settings; None for torch on a GPU, or on the CPU if there is no GPU.
        top_k: number of most probable tokens to store for each completion position, at most 256, for distillation.
        progress: True shows a progress bar, False hides it; None shows it in terminals and notebooks only.

    Returns:
        A ScoreSummary; for a DatasetDict, a dict from each split's name to its ScoreSummary.

    Raises:
        UsageError: the model, the dataset or a setting cannot be used, or `dtype` is "auto" and the store has values of the
            model in more than one dtype.
        TokenizerError: the tokenizer cannot be loaded, or lacks an EOS token or a chat template that the rows need.
        EngineError: the model cannot be loaded, or a forward pass failed. Values computed before the failure are committed.
        StoreError: the store cannot be read or written, or the model's weights are missing, truncated or pickled, or change
            while they are being read.

    Examples:
        >>> from reflogp.scoring import score
        >>> rows = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}]
        >>> score("./sft-model", rows, "./logps")
        ScoreSummary(
            1 row, 2 sequences: 0 hits, 2 scored
            ... tokens in ... s: ... tokens/s...
            reference ..., snapshot ... of .../logps (... s)
        )
    """
    choice = engine or EngineChoice()
    choice = replace(choice, top_k=top_k or choice.top_k)
    opened = _opened(store)
    settings = TrainerSettings(max_length, truncation_mode)
    arguments = _arguments(model, "DATA", opened, dtype, settings, tokenizer, choice.trust_remote_code)
    folder, reference, reason = find_reference(opened, arguments, choice.default_dtype())
    choice.require_dtype(reference.dtype)
    if progress is not False:
        _say(reason)

    engines = ExitStack()

    @cache
    def engine_of_all_splits() -> PassEngine:
        return engines.enter_context(closing(choice.make(folder, reference)))

    def score_rows(rows: Any, split: str) -> ScoreSummary:
        source = open_dataset(rows)
        with (
            closing(EngineScheduler(engine_of_all_splits, closes_engine=False)) as scheduler,
            progress_bar(f"scoring {split}".strip(), progress) as bar,
        ):
            summary = score_dataset(
                tokenized(source, folder, arguments, tokenizer),
                opened.values_table(reference, choice.top_k),
                scheduler,
                settings=settings,
                watcher=bar,
            )
        source.check_unchanged()
        return summary

    with engines:
        return _of_each_split(dataset, score_rows)


def join(
    model: str,
    dataset: Any,
    store: str | os.PathLike[str] | Store,
    *,
    dtype: str = "auto",
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    ld_alpha: float | None = None,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    snapshot: int | None = None,
    on_miss: Literal["error", "drop"] = "error",
    versus: str | None = None,
    top_k: int = 0,
) -> Any:
    """Add the stored reference log-probs of each row to a dataset. No model is loaded.

    The new columns are the same as those of `reflogp join`. ref_chosen_logps and ref_rejected_logps (for KTO, ref_logps)
    contain the sum of each completion's log-probs (float32, in nats). ref_chosen_tokens and ref_rejected_tokens (for KTO,
    ref_tokens) contain the number of log-probs in each sum (int64). chosen_key and rejected_key (for KTO, completion_key)
    contain the key of each sequence (16 bytes). ref_row contains the row number in `dataset`, starting at 0 (int64). With
    truncation_mode "keep_start", rows whose prompt alone fills max_length are left out, because TRL also drops them.

    If a second model is passed as `versus`, its sums are in versus_chosen_logps and versus_rejected_logps (for KTO,
    versus_logps). log_ratio_chosen and log_ratio_rejected (for KTO, log_ratio) contain the sums of `model` minus those of
    `versus`. implicit_reward_margin is log_ratio_chosen minus log_ratio_rejected: the margin of DPO's implicit rewards with
    beta 1, where `model` is the policy and `versus` its reference. These columns are float32, in nats.

    Args:
        model: the reference model that was passed to `score`.
        dataset: see `score`.
        store: see `score`.
        dtype: dtype in which the values were computed. "auto" uses the dtype in which this model's stored values were computed.
            If the store has values of this model in more than one dtype, "auto" raises UsageError.
        max_length: the trainer's max_length; see `score`.
        truncation_mode: the trainer's truncation_mode; see `score`.
        ld_alpha: LD-DPO's weight for tokens beyond the length of the pair's shorter completion; None to give all tokens the
            same weight.
        tokenizer: the tokenizer that was passed to `score`; None if none was passed.
        snapshot: number of the snapshot to read; None for the latest snapshot.
        on_miss: "error" raises an error if a row has no values or cannot be used; "drop" leaves such rows out.
        versus: a second model whose values are in the store, for the same tokens; `dtype` applies to both models.
        top_k: number of most probable tokens of each position to add, in the columns ref_chosen_top_ids, ref_chosen_top_logps,
            and the same of rejected (for KTO and whole sequences, ref_top_ids and ref_top_logps).

    Returns:
        A dataset of the same type as `dataset`, with the new columns; for a path or a hub name, a `datasets.Dataset`. If
        `dataset` is a stream (IterableDataset), its rows are joined while the result is read, so errors about rows are raised
        only then. Read a joined stream in a single process: with a DataLoader, set num_workers to 0 or 1.

    Raises:
        NotScoredError: `on_miss` is "error", and some rows have no values or cannot be used. The message lists up to ten of
            them.
        StoreNotFoundError, ReferenceNotFoundError: the store does not exist, or has no values of this model in this dtype.
        SnapshotNotFoundError: there is no snapshot with the number `snapshot`, or it can no longer be read.
        UsageError: `versus` has the same weights as `model`, or both `snapshot` and `top_k` are given.
        UsageError, TokenizerError, StoreError: see `score`.

    Examples:
        >>> from reflogp.scoring import join
        >>> joined = join("./sft-model", "pairs.jsonl", "./logps")
        >>> joined.num_rows
        32
        >>> [name for name in joined.column_names if name.endswith("_logps")]
        ['ref_chosen_logps', 'ref_rejected_logps']
    """
    if on_miss not in ("error", "drop"):
        raise UsageError(f"unknown on_miss {on_miss!r}: use 'error' or 'drop'")
    check_truncation(max_length, truncation_mode)
    opened = _opened(store)
    settings = TrainerSettings(max_length, truncation_mode, ld_alpha)
    arguments = _arguments(model, "DATA", opened, dtype, settings, tokenizer)
    command = arguments.command() + (f" --top-k {top_k}" if top_k else "")
    with naming_command(command):
        folder, reference, reason = find_reference(opened, arguments)
        at = opened[reference].snapshot(snapshot)
    _say(reason)
    second, reason = open_versus(opened, versus, arguments, at, tokenizer)
    _say(reason)
    top = TopTokens.find(opened, reference, top_k, snapshot)
    loaded = _tokenizer(folder, arguments, tokenizer)()
    find_vision = cache(_vision(folder, arguments, tokenizer))

    def windows(source: RowSource, is_stream: bool) -> Iterator[JoinedWindow]:
        summary = JoinSummary(reference_id=at.reference_id, snapshot=at.number, store=opened.uri)
        bad = BadRows()
        rows = TokenizedDataset(source, lambda: loaded, load_vision=find_vision)
        for window in joined_windows(rows, at, summary, settings, bad, second, top):
            if on_miss == "error" and is_stream:
                _require_values(summary, bad, command, second, loaded)
            yield window
        if on_miss == "error":
            _require_values(summary, bad, command, second, loaded)
        source.check_unchanged()

    return _of_each_split(dataset, lambda rows, _: with_columns(rows, open_dataset(rows), windows))


def report(
    model: str,
    dataset: Any,
    store: str | os.PathLike[str] | Store,
    output: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    progress: bool | None = None,
    versus: str | None = None,
) -> ReportSummary:
    """Write a report about a scored dataset: an HTML page. No model is loaded.

    Args:
        model: the reference model that was passed to `score`.
        dataset: see `score`.
        store: see `score`.
        output: folder for the report; an earlier report in it is replaced.
        dtype: see `join`.
        max_length: the trainer's max_length; see `score`.
        truncation_mode: the trainer's truncation_mode; see `score`.
        tokenizer: the tokenizer that was passed to `score`; None if none was passed.
        progress: see `score`.
        versus: a second model, with which the report compares `model`; see `join`.

    Returns:
        A ReportSummary, whose `findings` are the sentences at the top of the HTML page.

    Raises:
        UsageError: the model, the dataset or a setting cannot be used, or the output folder has an index.html that is not
            a report.
        TokenizerError, StoreError: see `score`.
        StoreNotFoundError, ReferenceNotFoundError: the store does not exist, or has no values of this model in this dtype.

    Examples:
        >>> from reflogp.scoring import report
        >>> report("./sft-model", "pairs.jsonl", "./logps", "./report")
        ReportSummary(
            32 of 32 examples with values, accuracy ...%
            ...
            report/index.html, written in ... s
        )
    """
    if kind_of(dataset) in ("datasets.DatasetDict", "datasets.IterableDatasetDict"):
        raise UsageError(f"a report covers a single dataset; pass one of the DatasetDict's splits: {', '.join(dataset)}")
    opened = _opened(store)
    source = open_dataset(dataset)
    settings = TrainerSettings(max_length, truncation_mode)
    arguments = _arguments(model, source.name, opened, dtype, settings, tokenizer)
    command = arguments.command()
    with naming_command(command):
        folder, reference, reason = find_reference(opened, arguments)
        at = opened[reference].snapshot(None)
    second, second_reason = open_versus(opened, versus, arguments, at, tokenizer)
    if progress is not False:
        _say(reason)
        _say(second_reason)
    rows = tokenized(source, folder, arguments, tokenizer)
    with progress_bar("reading", progress) as bar:
        return write_report(rows, at, os.fspath(output), settings, score=command, model=model, watcher=bar, versus=second)


def find_reference(
    store: Store, arguments: ScoreArguments, otherwise: str | None = None, progress: Progress | None = None
) -> tuple[str, Reference, str]:
    """Return (the model's local folder, its reference, the reason for its dtype); see `choose_reference`."""
    folder = resolve_model(arguments.model, arguments.revision)
    reference, reason = choose_reference(
        store,
        arguments.model,
        arguments.dtype,
        otherwise=otherwise,
        lm_head_dtype=arguments.lm_head_dtype,
        revision=arguments.revision,
        progress=progress,
    )
    return str(folder), reference, reason


def tokenized(
    source: RowSource, folder: str, arguments: ScoreArguments, tokenizer: str | PreTrainedTokenizerBase | None = None
) -> TokenizedDataset:
    """Return the rows as a dataset of token ids, tokenized when it is iterated over. A tokenizer object is used as it is."""
    load, load_vision = _tokenizer(folder, arguments, tokenizer), _vision(folder, arguments, tokenizer)
    return TokenizedDataset(source, load, arguments.form, load_vision=load_vision)  # type: ignore[arg-type]


def open_versus(
    store: Store,
    model: str | None,
    arguments: ScoreArguments,
    first: Snapshot,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
) -> tuple[Versus | None, str]:
    """Return the second model, if there is one, and the reason for its dtype, or "" if it was given."""
    if model is None:
        return None, ""
    found, reason = find_versus(
        store, model, arguments, first.reference, lambda folder: _tokenizer(folder, arguments, tokenizer)(), progress
    )
    return found, f"{model}: {reason}" if reason else ""


def _require_values(
    summary: JoinSummary,
    bad: BadRows,
    command: str,
    versus: Versus | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    if summary.bad_rows:
        named = "; ".join(f"row {row}: {problem}" for row, problem in bad.first_bad)
        raise NotScoredError(
            f"{counted(summary.bad_rows, 'row')} cannot be used ({named}); to leave out such rows, use on_miss='drop'", summary
        )
    if summary.missing:
        named = ", ".join(map(str, summary.missing_row_numbers[:_NAMED_ROWS]))
        named += ", …" if summary.missing > _NAMED_ROWS else ""
        raise NotScoredError(
            f"snapshot {summary.snapshot} has no values for {counted(summary.missing, 'row')} (0-based row numbers: "
            f"{named}). Score the dataset with reflogp.scoring.score, or with `{command}`, or leave out such rows with "
            "on_miss='drop'",
            summary,
        )
    if summary.versus_missing and versus:
        said, helps = versus.explain(summary.versus_missing, tokenizer)
        raise NotScoredError(f"{said}. Score them with `{helps}`" if helps else said, summary)


def _say(reason: str) -> None:
    if reason:  # empty if the caller specified the dtype
        tqdm.write(reason, file=sys.stderr)


def _opened(store: str | os.PathLike[str] | Store) -> Store:
    return store if isinstance(store, Store) else Store(store)


def _arguments(
    model: str,
    data: str,
    store: Store,
    dtype: str,
    settings: TrainerSettings,
    tokenizer: str | PreTrainedTokenizerBase | None,
    trust_remote_code: bool = False,
) -> ScoreArguments:
    named = tokenizer if isinstance(tokenizer, str) else None
    return ScoreArguments(model, data, store.uri, dtype, settings, tokenizer=named, trust_remote_code=trust_remote_code)


def _tokenizer(
    folder: str, arguments: ScoreArguments, tokenizer: str | PreTrainedTokenizerBase | None
) -> Callable[[], PreTrainedTokenizerBase]:
    """Return a function that returns the tokenizer; for a processor, which TRL takes too, the processor's tokenizer."""
    if tokenizer is None or isinstance(tokenizer, str):
        chosen = arguments.tokenizer, arguments.chat_template, arguments.trust_remote_code
        return lambda: chosen_tokenizer(folder, *chosen)
    inner = getattr(tokenizer, "tokenizer", None)
    if inner is None:
        return lambda: tokenizer
    if inner.chat_template is None and tokenizer.chat_template is not None:
        inner = copy(inner)
        inner.chat_template = tokenizer.chat_template
    return lambda: inner


def _vision(
    folder: str, arguments: ScoreArguments, tokenizer: str | PreTrainedTokenizerBase | None
) -> Callable[[], VisionProcessor | None]:
    """Return a function that returns the model's VisionProcessor, or None for a model that accepts only text."""
    if getattr(tokenizer, "image_processor", None) is None:
        chosen = arguments.tokenizer, arguments.chat_template, arguments.trust_remote_code
        return lambda: chosen_processor(folder, *chosen)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=arguments.trust_remote_code)
    return lambda: VisionProcessor.of(tokenizer, config)


def _of_each_split(dataset: Any, function: Callable[[Any, str], Any]) -> Any:
    """Call a function for a dataset, or for each split of a DatasetDict; an error then names the split."""
    if kind_of(dataset) not in ("datasets.DatasetDict", "datasets.IterableDatasetDict"):
        return function(dataset, "")
    done = {}
    for name, split in dataset.items():
        try:
            done[name] = function(split, name)
        except ReflogpError as error:
            error.args = (f"split {name}: {error}", *error.args[1:])
            raise
    if any(isinstance(result, ScoreSummary) for result in done.values()):
        return done
    return type(dataset)(done)
