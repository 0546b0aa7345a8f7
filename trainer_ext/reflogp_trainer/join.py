"""Joins reference log-probs into a tokenised `datasets.Dataset`, by key.

Knows datasets and what to tell a person about missing rows. The arithmetic is reflogp_store.joins'. Called by the trainers,
and by anyone who prepares a dataset for another trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from reflogp_store import Snapshot, join_logps
from reflogp_store.joins import completion_columns
from reflogp_trainer.errors import MissingLogpsError, UnusableLogpsError
from reflogp_trainer.source import ReferenceSource

logger = logging.getLogger(__name__)

_BATCH_ROWS = 8192
_NAMED_ROWS = 10
#: Columns that a dataset brought along and the store's differ by more than this, in nats a row: worth a warning.
_BROUGHT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class JoinRecord:
    """What was joined, from where and how; enough to join the same columns again.

    Attributes:
        rows: rows with values, which is every row: a miss is an error.
        coverage: rows with values over rows, 1.0 for a join that succeeded.
    """

    store: str
    reference_id: str
    reference_dtype: str
    snapshot: int
    rows: int
    coverage: float
    max_length: int | None
    truncation_mode: str
    ld_alpha: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def join_reference_logps(
    dataset: Dataset,
    source: ReferenceSource,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    ld_alpha: float | None = None,
) -> Dataset:
    """`dataset` with ref_chosen_logps and ref_rejected_logps (KTO: ref_logps, ref_KL_logps) from a store.

    Args:
        dataset: tokenised rows: prompt_ids with chosen_ids and rejected_ids, or with completion_ids.
        source: where the values are.
        max_length, truncation_mode, ld_alpha: as in the trainer's config; the values are the sums that TRL's own
            precomputation would give under them.

    Returns:
        The dataset with float32 columns, in nats, summed over each completion. Columns of those names that it brought along
        are replaced.

    Raises:
        MissingLogpsError: rows that were never scored; names them and the command that scores them.
        UnusableLogpsError: stored values are damaged, NaN or infinite.
    """
    return join_with_record(dataset, source, source.snapshot(), max_length, truncation_mode, ld_alpha)[0]


def join_with_record(
    dataset: Dataset,
    source: ReferenceSource,
    snapshot: Snapshot,
    max_length: int | None,
    truncation_mode: str,
    ld_alpha: float | None,
    missing_rows_to: Path | None = None,
) -> tuple[Dataset, JoinRecord]:
    """As `join_reference_logps`, from a given snapshot, with the record of what was done.

    Args:
        missing_rows_to: folder where the token ids of missing rows are written, so that the command in the error scores
            just them.
    """
    columns = completion_columns(dataset.column_names)
    join = join_logps(
        _tables(dataset, ["prompt_ids", *columns]),
        snapshot,
        max_length=max_length,
        truncation_mode=truncation_mode,
        ld_alpha=ld_alpha,
    )
    missing = np.flatnonzero(join.missing)
    if len(missing):
        raise _missing(dataset, list(columns), missing, source, snapshot, max_length, truncation_mode, missing_rows_to)
    unusable = np.flatnonzero(join.unusable)
    if len(unusable):
        raise UnusableLogpsError(
            f"{len(unusable)} of {len(dataset)} rows have stored reference log-probs that are damaged or not finite (rows "
            f"{_some(unusable)}); run `reflogp store verify {source.store.uri}`",
            [int(row) for row in unusable],
        )
    for name, values in join.logps.items():
        if name in dataset.column_names:
            _warn_of_brought(name, dataset, values)
            dataset = dataset.remove_columns(name)
        dataset = dataset.add_column(name, values)
    record = JoinRecord(
        store=source.store.uri,
        reference_id=snapshot.reference_id,
        reference_dtype=source.scored_dtype(),
        snapshot=snapshot.number,
        rows=len(dataset),
        coverage=1.0,
        max_length=max_length,
        truncation_mode=truncation_mode,
        ld_alpha=ld_alpha,
    )
    return dataset, record


def _tables(dataset: Dataset, columns: list[str]) -> Iterator[pa.Table]:
    view = dataset.select_columns(columns).with_format("arrow")
    for start in range(0, max(1, len(dataset)), _BATCH_ROWS):
        yield view[start : start + _BATCH_ROWS]


def _missing(
    dataset: Dataset,
    columns: list[str],
    missing: npt.NDArray[np.int64],
    source: ReferenceSource,
    snapshot: Snapshot,
    max_length: int | None,
    truncation_mode: str,
    folder: Path | None,
) -> MissingLogpsError:
    data = "DATA"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "reflogp-missing.parquet"
        pq.write_table(pa.table(dataset.select_columns(["prompt_ids", *columns]).select(missing).with_format("arrow")[:]), file)
        data = str(file)
    command = source.score_command(data, max_length, truncation_mode)
    return MissingLogpsError(
        f"{len(missing)} of {len(dataset)} rows have no reference log-probs in snapshot {snapshot.number} of reference "
        f"{snapshot.reference_id} (rows {_some(missing)}). Score them: {command}",
        [int(row) for row in missing],
        command,
    )


def _some(rows: npt.NDArray[np.int64]) -> str:
    return ", ".join(str(row) for row in rows[:_NAMED_ROWS]) + (", …" if len(rows) > _NAMED_ROWS else "")


def _warn_of_brought(name: str, dataset: Dataset, values: npt.NDArray[np.float32]) -> None:
    brought = np.asarray(dataset.with_format("numpy")[name], np.float64)
    worst = float(np.max(np.abs(brought - values), initial=0.0))
    if not worst <= _BROUGHT_TOLERANCE:
        logger.warning(
            "the dataset brought its own %s, which differs from the store's by up to %.4g nats; the store's is used",
            name,
            worst,
        )
