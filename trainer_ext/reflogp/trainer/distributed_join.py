"""A join that the processes of a distributed run make together: one process of each node looks up, all map what it found.

Knows who looks up and what must agree. The lookup itself is join's. Called by the cached trainers; one process alone takes the
same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from datasets import Dataset

from reflogp.store import ReferenceNotFoundError, StoreNotFoundError, UsageError
from reflogp.store.joins import Asked, Join
from reflogp.trainer.join import Misses, answer_rows, ask_dataset, misses_of, missing_error, require_usable, write_tokens
from reflogp.trainer.layouts import Layout
from reflogp.trainer.ranks import Rank, gather, of_my_node, on_all_ranks, on_all_ranks_for_long
from reflogp.trainer.shared_columns import Columns, load_columns, save_columns
from reflogp.trainer.source import ReferenceSource
from reflogp.trainer.values import Settings, Where


@dataclass(frozen=True)
class Found:
    """What a join found.

    Attributes:
        where: where, after what the service scored.
        asked: what this process' rows ask.
        columns: column -> float32 (n,), in nats; NaN for `missing`.
        misses: rows without values; None where there are none.
        scored: rows that the service scored now.
    """

    where: Where
    asked: Asked
    columns: Columns
    misses: Misses | None
    scored: int


@dataclass(frozen=True)
class NothingScored:
    """A store that is not there, or that has nothing of the reference: every row is missing.

    Attributes:
        error: what a store's reader is told.
    """

    error: ReferenceNotFoundError | StoreNotFoundError


def open_everywhere(source: ReferenceSource) -> Where | NothingScored:
    """Which reference and snapshot the first process sees; all read that one, whatever is committed meanwhile."""

    def look() -> Where | NothingScored | None:
        if Rank.here().rank:
            return None
        try:
            return source.open().where
        except (ReferenceNotFoundError, StoreNotFoundError) as error:
            if not source.is_local or source.described is None:
                raise
            return NothingScored(error)

    where = gather(on_all_ranks("opening the reference", look))[0]
    assert where is not None
    return where


def all_missing(dataset: Dataset, name: str, layout: Layout, settings: Settings) -> Misses | None:
    """What is missing of a dataset where nothing was scored yet; None for one without completions."""
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
    settings: Settings,
    output_dir: Path,
    dtype: str | None,
) -> None:
    """Name all missing rows of all datasets on every process, and the one command that scores them.

    Args:
        output_dir: where their token ids are written.
        dtype: what to score in where nothing was scored yet; None for the source's.

    Raises:
        MissingLogpsError, or the store's own error where there is none; RankFailedError on processes that looked nothing up.
    """

    def tell() -> None:
        if Rank.here().local_rank:
            return
        file = write_tokens(misses, output_dir)
        if isinstance(where, NothingScored):
            raise source.nothing_scored(where.error, file, settings, dtype)
        raise missing_error(misses, where, source.open(where.snapshot).command(source.model, file, settings))

    on_all_ranks(f"looking up {', '.join(part.dataset for part in misses)}", tell)


def join_everywhere(
    dataset: Dataset,
    name: str,
    layout: Layout,
    source: ReferenceSource,
    where: Where,
    settings: Settings,
    read: Callable[[Join], Columns],
) -> Found:
    """Look up a dataset's rows, which every process holds.

    Args:
        name: of the dataset, for errors.
        read: a join's sums as the trainer's loss reads them.

    Raises:
        as `join_reference_logps`, on every process: RankFailedError where another one's words are told.
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
    """What a node's first process tells the others."""

    where: Where
    columns: Columns | None
    file: Path | None
    misses: Misses | None
    scored: int


def _require_equal(asked: Asked, name: str) -> None:
    digests = gather((asked.digest(), len(asked.dropped)))
    others = [number for number, digest in enumerate(digests) if digest != digests[0]]
    if others:
        counts = ", ".join(f"process {number} has {rows:,}" for number, (_, rows) in enumerate(digests))
        raise UsageError(
            f"the processes of this run have different rows in {name} (process {others[0]} is not as process 0; {counts}): "
            "give every process the same dataset in the same order"
        )
