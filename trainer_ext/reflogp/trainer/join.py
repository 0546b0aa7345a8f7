"""Join reference log-probs into a tokenized dataset, by key.

The module reflogp.store.joins looks up keys and computes sums. This module adds the sums to datasets as columns, and reports
rows without values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset
from tqdm.auto import tqdm

from reflogp.client import Job
from reflogp.store.files import write_atomically
from reflogp.store.joins import KTO_COLUMNS, PAIR_COLUMNS, Join, ask
from reflogp.store.windows import TrainerSettings
from reflogp.trainer.errors import MissingLogpsError, UnusableLogpsError
from reflogp.trainer.reference import Reference, ServiceValues, Values, Where

logger = logging.getLogger(__name__)

KL_IDS = "KL_completion_ids"
REFERENCE_COLUMNS = frozenset({*PAIR_COLUMNS.values(), *KTO_COLUMNS.values()})
_TOKEN_COLUMNS = ("prompt_ids", *PAIR_COLUMNS, *KTO_COLUMNS)
_BATCH_ROWS = 8192
_NAMED_ROWS = 10
#: Number of rows per lookup when the dataset is a stream.
_STREAM_ROWS = 256
AnyDataset = TypeVar("AnyDataset", Dataset, IterableDataset)


@dataclass(frozen=True)
class JoinRecord:
    """A record of a join. It contains the source and the settings that are needed to join the same columns again.

    Attributes:
        where: the source, reference and snapshot of the values.
        settings: the trainer's settings that the sums depend on.
        rows: number of rows, or None for a stream.
        scored: number of rows that a service scored during this join.
        computed: number of rows whose values TRL's trainer computed during this join.
    """

    where: Where
    settings: TrainerSettings = field(default_factory=TrainerSettings)
    rows: int | None = None
    scored: int = 0
    computed: int = 0

    def as_dict(self) -> dict[str, Any]:
        counts = {"rows": self.rows, "scored": self.scored, "computed": self.computed}
        return {**asdict(self.where), **counts, **asdict(self.settings)}


@dataclass(frozen=True)
class Misses:
    """The rows of one dataset that have no values: their indices, and their token ids for `reflogp score`."""

    dataset: str
    rows: npt.NDArray[np.int64]
    of: int  # number of the dataset's rows or, for a stream, of the rows read so far
    tokens: pa.Table | None  # None for rows with images, of which token ids are not enough
    only_kl: bool = False  # the rows have values for their own completions, but not for those of KTO's KL term


def join_reference_logps(
    dataset: AnyDataset,
    reference: Reference | str,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    ld_alpha: float | None = None,
) -> AnyDataset:
    """Return `dataset` with the columns ref_chosen_logps and ref_rejected_logps added (for KTO: ref_logps and ref_KL_logps).

    Args:
        dataset: tokenized rows. Pairs have the columns prompt_ids, chosen_ids and rejected_ids. Rows for KTO have prompt_ids,
            completion_ids and optionally KL_completion_ids. A stream (IterableDataset) is joined as it is read.
        reference: where the values are stored, with the name of the reference model.
        max_length: `max_length` of the trainer's config, or None for no limit. The joined values are the sums that TRL would
            precompute with the same `max_length`, `truncation_mode` and `ld_alpha`.
        truncation_mode: `truncation_mode` of the trainer's config.
        ld_alpha: `ld_alpha` of the trainer's config, or None to give all tokens the same weight.

    Returns:
        The dataset with float32 columns of log-probs in nats, summed over each completion. If the dataset is a stream, errors
        about its rows are raised while the stream is read.

    Raises:
        MissingLogpsError: some rows have no stored values; the error names these rows and the command that scores them.
        UnusableLogpsError: values are damaged, NaN or infinite.
        ServiceError: the source is a service that is unreachable, or that failed to score the missing rows.
        UsageError: columns are missing, or the settings are invalid.

    Examples:
        >>> from datasets import Dataset
        >>> from reflogp.scoring import score
        >>> from reflogp.trainer import Reference
        >>> from reflogp.trainer.join import join_reference_logps
        >>> rows = Dataset.from_list([{"prompt_ids": [3, 6], "chosen_ids": [7, 2], "rejected_ids": [8]}])
        >>> summary = score("./sft-model", rows, "./logps", dtype="bfloat16")
        >>> join_reference_logps(rows, Reference("./logps", model="./sft-model"), max_length=1024).column_names
        ['prompt_ids', 'chosen_ids', 'rejected_ids', 'ref_chosen_logps', 'ref_rejected_logps']
    """
    source = Reference.of(reference, "join_reference_logps")
    settings = TrainerSettings(max_length, truncation_mode, ld_alpha)
    values = source.open()
    if isinstance(dataset, IterableDataset):
        return join_stream(dataset, source, values, settings, "the dataset", Path.cwd())
    values, join, _ = look_up(dataset, source, values, settings, "the dataset")
    if join.missing.any():
        raise missing_error([misses_of(dataset, "the dataset", join)], values, settings, Path.cwd())
    return with_columns(dataset, join.logps)


def look_up(
    dataset: Dataset, source: Reference, values: Values, settings: TrainerSettings, name: str
) -> tuple[Values, Join, int]:
    """Look up every row of a tokenized dataset, and have the service score the missing rows if `source` says so. Return the
    Values that were read (of a newer snapshot if the service scored rows), the Join, and the number of scored rows.

    Raises UnusableLogpsError if stored values are damaged or not finite.
    """
    view = _token_columns(dataset)
    tables = (view[start : start + _BATCH_ROWS] for start in range(0, max(1, len(dataset)), _BATCH_ROWS))
    asked = ask(tables, max_length=settings.max_length, truncation_mode=settings.truncation_mode)
    join, scored = values.answer(asked, settings), 0
    if join.missing.any() and source.on_miss == "score" and isinstance(values, ServiceValues):
        missing = np.flatnonzero(join.missing)
        scored = len(missing)
        logger.warning(
            "%d of %d rows of %s have no reference log-probs yet; %s scores them", scored, len(dataset), name, source.location
        )
        with tqdm(total=scored, desc="Reference log-probs", unit="row") as bar:

            def show(job: Job) -> None:
                bar.update(job.progress.rows - bar.n)

            values = values.score(token_table(dataset, missing), settings, show)
        join = values.answer(asked, settings)
    if join.unusable.any():
        rows = np.flatnonzero(join.unusable)
        raise UnusableLogpsError(
            f"{len(rows)} of {len(dataset)} rows of {name} have reference log-probs that are damaged or not finite (rows "
            f"{some_rows(rows)}) in {values.where.store}; run `reflogp store verify` on the store from which these values come",
            rows.tolist(),
        )
    return values, join, scored


def misses_of(dataset: Dataset, name: str, join: Join, with_tokens: bool = True) -> Misses:
    rows = np.flatnonzero(join.missing)
    own = next(iter(join.logps.values()))  # NaN for rows whose own completion has no value
    only_kl = KL_IDS in dataset.column_names and bool(np.isfinite(own[rows]).all())
    return Misses(name, rows, len(dataset), token_table(dataset, rows) if with_tokens else None, only_kl)


def token_table(dataset: Dataset, rows: npt.NDArray[np.int64]) -> pa.Table:
    return _token_columns(dataset).select(rows)[:]


def missing_error(misses: Sequence[Misses], values: Values, settings: TrainerSettings, folder: Path) -> MissingLogpsError:
    """Return a single error about the missing rows of all datasets, and write the rows' token ids to a file in `folder`, for
    the command that scores them."""
    file = Path("DATA")
    if tables := [part.tokens for part in misses if part.tokens is not None]:
        file = folder / "reflogp-missing.parquet"
        with write_atomically(file) as partial:
            pq.write_table(pa.concat_tables(tables, promote_options="permissive"), partial)
    where = values.where
    place = f"snapshot {where.snapshot} of {where.store}" if where.snapshot else where.store
    rows = " and ".join(
        f"{len(part.rows)} of {part.of} rows of {part.dataset} (rows {some_rows(part.rows)})" for part in misses
    )
    reference = f"reference {where.reference_id} in {where.reference_dtype}"
    message = f"{rows} have no reference log-probs in {place} ({reference})"
    message += f": {values.note}. " if values.note else ". "
    if where.snapshot and all(len(part.rows) == part.of and not part.only_kl for part in misses):
        message += (
            "None of the rows was found. If they were scored before, first check that the tokenizer and the chat template are "
            "still the same. "
        )
    command = values.command(str(file), settings)
    message += (
        f"Score them: {command}"
        if command
        else "Create the file again with `reflogp join`, from a store that has values for these rows"
    )
    if any(part.only_kl for part in misses):
        message += (
            ". KTO's KL term pairs each prompt with another row's completion. The pairs depend on the batch size and the row "
            "order, so a first run always lacks values for these pairs"
        )
    return MissingLogpsError(message, {part.dataset: part.rows.tolist() for part in misses}, command)


def with_columns(dataset: Dataset, columns: dict[str, npt.NDArray[np.float32]]) -> Dataset:
    """Add reference columns, each float32 of shape (rows,), to a dataset. Existing columns with the same names are replaced."""
    if brought := [name for name in columns if name in dataset.column_names]:
        logger.warning("the dataset's own %s are replaced by the reference's", " and ".join(brought))
        dataset = dataset.remove_columns(brought)
    for name, values in columns.items():
        dataset = dataset.add_column(name, values)
    return dataset


def join_stream(
    dataset: IterableDataset, source: Reference, values: Values, settings: TrainerSettings, name: str, folder: Path
) -> IterableDataset:
    """Return a stream that adds reference columns as its rows are read. `values` are opened before, because the deltalake
    library cannot open a table in the forked worker processes of a data loader."""

    def join(batch: dict[str, list[Any]], rows: list[int]) -> dict[str, Any]:
        nonlocal values
        part = Dataset.from_dict({column: batch[column] for column in _TOKEN_COLUMNS if column in batch})
        values, found, _ = look_up(part, source, values, settings, name)
        if found.missing.any():
            misses = misses_of(part, name, found)
            misses = replace(misses, rows=misses.rows + rows[0], of=rows[-1] + 1)
            raise missing_error([misses], values, settings, folder)
        return {column: logps.tolist() for column, logps in found.logps.items()}

    return dataset.map(join, with_indices=True, batched=True, batch_size=_STREAM_ROWS)


def reference_columns(names: Iterable[str]) -> list[str]:
    return [name for name in names if name in REFERENCE_COLUMNS]


def some_rows(rows: npt.NDArray[np.int64]) -> str:
    return ", ".join(str(row) for row in rows[:_NAMED_ROWS]) + (", …" if len(rows) > _NAMED_ROWS else "")


def _token_columns(dataset: Dataset) -> Dataset:
    return dataset.select_columns([name for name in _TOKEN_COLUMNS if name in dataset.column_names]).with_format("arrow")
