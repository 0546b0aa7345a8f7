"""A join that the processes of a distributed run make together: one process of each node looks up, all map what it found.

Knows who looks up and what must agree. The lookup itself is join's. Called by the cached trainers; one process alone takes the
same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from datasets import Dataset

from reflogp_store import UsageError
from reflogp_store.joins import Asked, Join
from reflogp_trainer.errors import MissingLogpsError
from reflogp_trainer.join import answer_rows, ask_dataset, require
from reflogp_trainer.layouts import Layout
from reflogp_trainer.ranks import Rank, gather, of_my_node, together, together_for_long
from reflogp_trainer.shared_columns import Columns, load_columns, save_columns
from reflogp_trainer.source import ReferenceSource
from reflogp_trainer.values import Settings, Where


@dataclass(frozen=True)
class Found:
    """What a join found.

    Attributes:
        where: where, after what the service scored.
        asked: what this process' rows ask.
        columns: column -> float32 (n,), in nats; NaN for `missing`.
        missing: rows without values; only on_miss="compute" lets any pass.
        problem: what they would be told about with on_miss="error".
        scored: rows that the service scored now.
    """

    where: Where
    asked: Asked
    columns: Columns
    missing: npt.NDArray[np.int64]
    problem: MissingLogpsError | None
    scored: int


def open_everywhere(source: ReferenceSource) -> Where:
    """Which reference and snapshot the first process sees; all read that one, whatever is committed meanwhile."""
    seen = together("opening the reference", lambda: source.open().where if Rank.here().rank == 0 else None)
    where = gather(seen)[0]
    assert where is not None
    return where


def join_everywhere(
    dataset: Dataset,
    name: str,
    layout: Layout,
    source: ReferenceSource,
    where: Where,
    settings: Settings,
    output_dir: Path,
    read: Callable[[Join], Columns],
) -> Found:
    """Look up a dataset's rows, which every process holds.

    Args:
        name: of the dataset, for errors.
        output_dir: where missing rows are written.
        read: a join's sums as the trainer's loss reads them.

    Raises:
        as `join_reference_logps`, on every process: RankFailedError where another one's words are told.
    """
    asked = together(f"reading {name}", lambda: ask_dataset(dataset, layout, settings))
    _require_equal(asked, name)

    def look_up() -> _Sent | None:
        if Rank.here().local_rank:
            return None
        values, join, scored = answer_rows(dataset, layout, asked, source, source.open(where.snapshot), settings)
        problem = None
        try:
            require(dataset, layout, join, source, values, settings, output_dir)
        except MissingLogpsError as error:
            if source.on_miss != "compute":
                raise
            problem = (str(error), error.rows, error.command)
        columns = {layout.name(column): logps for column, logps in read(join).items()}
        file = save_columns(columns) if Rank.here().count > 1 else None
        return _Sent(values.where, None if file else columns, file, problem, scored)

    sent = of_my_node(gather(together_for_long(f"looking up {name}", look_up)))
    assert sent is not None
    columns = together(f"reading the columns of {name}", lambda: load_columns(sent.file) if sent.file else sent.columns)
    problem = MissingLogpsError(*sent.problem) if sent.problem else None
    missing = np.array(problem.rows if problem else [], np.int64)
    return Found(sent.where, asked, columns or {}, missing, problem, sent.scored)


@dataclass(frozen=True)
class _Sent:
    """What a node's first process tells the others."""

    where: Where
    columns: Columns | None
    file: Path | None
    problem: tuple[str, list[int], str] | None
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
