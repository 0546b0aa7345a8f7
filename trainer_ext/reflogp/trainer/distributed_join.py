"""Join a dataset with its stored values on all processes of a distributed run.

One process on each node looks up the values, and all processes on the node map the result into memory. A run with a single
process uses the same code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from datasets import Dataset

from reflogp.store import Reference, ReferenceNotFoundError, StoreNotFoundError, UsageError
from reflogp.store.joins import Asked, Join
from reflogp.store.texts import counted
from reflogp.store.windows import TrainerSettings
from reflogp.trainer.join import Misses, answer_rows, ask_dataset, misses_of, missing_error, require_usable, write_tokens
from reflogp.trainer.layouts import Columns, Layout, load_columns, save_columns
from reflogp.trainer.ranks import Rank, gather, of_my_node, on_all_ranks, on_all_ranks_for_long
from reflogp.trainer.source import ReferenceSource
from reflogp.trainer.values import Where

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """The result of a join.

    Attributes:
        where: the source, reference and snapshot of the values. If the service scored rows during this join, the snapshot
            includes their values.
        asked: the keys that were looked up for the dataset's rows, and the number of values needed for each key.
        columns: dict from each reference column's name to its values in nats, float32 of shape (n,). Missing values are NaN.
        misses: rows without values, or None if every row has values.
        scored: number of rows that the service was asked to score during this join.
    """

    where: Where
    asked: Asked
    columns: Columns
    misses: Misses | None
    scored: int


@dataclass(frozen=True)
class NothingScored:
    """The result of `agree_on_snapshot` if the store does not exist or has no values for the reference. In this case, no row
    has values.

    Attributes:
        error: the error that was raised when the store was opened.
    """

    error: ReferenceNotFoundError | StoreNotFoundError


def agree_on_dtype(source: ReferenceSource, dtype: str) -> ReferenceSource:
    """Choose the reference's dtype on the first process, and return a source with this dtype on all processes.

    `ReferenceSource` describes which dtype is chosen. A source is returned unchanged if its dtype is not "auto", if it has a
    reference id, or if it has no model.

    Args:
        source: where the values are stored.
        dtype: dtype in which the policy computes.
    """
    if not source.chooses_dtype:
        return source

    def choose() -> Reference | None:
        return source.chosen_for(dtype) if Rank.here().rank == 0 else None

    chosen = gather(on_all_ranks("choosing the reference's dtype", choose))[0]
    assert chosen is not None
    wanted = chosen.dtype == dtype and chosen.lm_head_dtype == (source.lm_head_dtype or dtype)
    if not wanted and Rank.here().rank == 0:
        there = f"{source.location} has values of {source.model} only in this dtype, but the policy computes in {dtype}"
        logger.warning("using reference log-probs in %s: %s", chosen.dtypes(), there)
    return source.of(chosen)


def agree_on_snapshot(source: ReferenceSource) -> Where | NothingScored:
    """Open the source on the first process, and pass its reference and snapshot to all processes.

    All processes read this snapshot, even if newer snapshots are committed in the meantime.
    """

    def look() -> Where | NothingScored | None:
        if Rank.here().rank:
            return None
        try:
            return source.open().where
        except (ReferenceNotFoundError, StoreNotFoundError) as error:
            if not source.is_store or source.described is None:
                raise
            return NothingScored(error)

    where = gather(on_all_ranks("opening the reference", look))[0]
    assert where is not None
    return where


def all_missing(dataset: Dataset, name: str, layout: Layout, settings: TrainerSettings) -> Misses | None:
    """Return the Misses of a dataset for a store that has no values of the reference.

    All rows with a completion are missing, except those that TRL's length filter drops. Return None if no rows are missing.
    """
    asked = on_all_ranks(f"reading {name}", lambda: ask_dataset(dataset, layout, settings))
    needed = np.logical_or.reduce([lengths > 0 for lengths in asked.needed.values()])
    nothing = {reference: np.full(len(dataset), np.nan, np.float32) for reference in asked.columns.values()}
    none = np.zeros(len(dataset), bool)
    return misses_of(
        dataset, name, layout, Join(nothing, asked.keys, asked.needed, needed & ~asked.dropped, none, asked.dropped)
    )


def raise_missing(
    misses: Sequence[Misses],
    source: ReferenceSource,
    where: Where | NothingScored,
    settings: TrainerSettings,
    output_dir: Path,
    dtype: str | None,
) -> None:
    """Raise a single error about the missing rows of all datasets, with the command that scores these rows.

    Args:
        misses: the missing rows of each dataset.
        source: where the values were looked up.
        where: the snapshot in which the values were looked up, or NothingScored if there is none.
        settings: the trainer's settings that the sums depend on.
        output_dir: folder in which to write a file with the missing rows' token ids.
        dtype: dtype for the command in the error message, used only if nothing has been scored yet. If None, the command uses
            the source's dtype.

    Raises:
        MissingLogpsError: `where` is a snapshot; the error names the rows for which the snapshot has no values.
        ReferenceNotFoundError, StoreNotFoundError: `where` is NothingScored.
        RankFailedError: this process is not the first process of its node. Only the first process of each node raises one of
            the errors above.
    """

    def tell() -> None:
        if Rank.here().local_rank:
            return
        has_images = any(part.has_images for part in misses)  # a file of token ids cannot contain images
        file = "DATA" if has_images else write_tokens(misses, output_dir)
        if isinstance(where, NothingScored):
            raise source.nothing_scored(where.error, file, settings, dtype)
        raise missing_error(misses, where, source.open(where.snapshot).command(source.model, file, settings))

    on_all_ranks(f"looking up {', '.join(part.dataset for part in misses)}", tell)


def join_on_all_ranks(
    dataset: Dataset,
    name: str,
    layout: Layout,
    source: ReferenceSource,
    where: Where,
    settings: TrainerSettings,
    read: Callable[[Join], Columns],
) -> Found:
    """Look up the values for a dataset's rows. Every process must have the same rows in the same order.

    Args:
        dataset: the tokenized rows.
        name: the dataset's name, for error messages.
        layout: describes which columns contain token ids, and how to convert these columns.
        source: where the values are stored.
        where: the snapshot in which to look up the values.
        settings: the trainer's settings that the sums depend on.
        read: function that converts a join's sums into the columns that the trainer's loss reads.

    Raises:
        UnusableLogpsError: values are damaged, NaN or infinite.
        UsageError: the processes have different rows.
        RankFailedError: another process failed.
    """
    asked = on_all_ranks(f"reading {name}", lambda: ask_dataset(dataset, layout, settings))
    _require_equal(asked, name)

    own: Misses | None = None

    def look_up() -> _Sent | None:
        nonlocal own
        if Rank.here().local_rank:
            return None
        values, join, scored = answer_rows(dataset, layout, asked, source, source.open(where.snapshot), settings)
        own = misses_of(dataset, name, layout, join)
        require_usable(len(dataset), name, join, values)
        columns = {layout.name(column): logps for column, logps in read(join).items()}
        file = save_columns(columns) if Rank.here().count > 1 else None
        return _Sent(values.where, None if file else columns, file, own and replace(own, tokens=None), scored)

    sent = of_my_node(gather(on_all_ranks_for_long(f"looking up {name}", look_up)))
    assert sent is not None
    columns = on_all_ranks(f"reading the columns of {name}", lambda: load_columns(sent.file) if sent.file else sent.columns)
    return Found(sent.where, asked, columns or {}, own or sent.misses, sent.scored)


@dataclass(frozen=True)
class _Sent:
    """The result of a lookup, which a node's first process sends to the node's other processes."""

    where: Where
    columns: Columns | None
    file: Path | None
    misses: Misses | None
    scored: int


def _require_equal(asked: Asked, name: str) -> None:
    digests = gather((asked.digest(), len(asked.dropped)))
    others = [number for number, digest in enumerate(digests) if digest != digests[0]]
    if others:
        counts = ", ".join(f"process {number} has {counted(rows, 'row')}" for number, (_, rows) in enumerate(digests))
        raise UsageError(
            f"the processes of this run have different rows in {name} (process {others[0]} differs from process 0; {counts}): "
            "give every process the same dataset in the same order"
        )
