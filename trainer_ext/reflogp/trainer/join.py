"""Join reference log-probs into a tokenized dataset, by key.

The module reflogp.store.joins looks up keys and computes sums. This module adds the sums to datasets as columns, and reports
rows without values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset
from tqdm.auto import tqdm

from reflogp.client import Job
from reflogp.store import UsageError
from reflogp.store.files import write_atomically
from reflogp.store.joins import Asked, Join, ask
from reflogp.store.texts import counted, short_repr
from reflogp.store.windows import TrainerSettings, check_truncation
from reflogp.trainer.errors import BroughtColumnsError, MissingLogpsError, UnusableLogpsError
from reflogp.trainer.layouts import KL_IDS, REFERENCE_COLUMNS, Columns, Layout, layout_of
from reflogp.trainer.source import ReferenceSource
from reflogp.trainer.tolerances import tolerance
from reflogp.trainer.values import ServiceValues, Values, Where
from reflogp.trainer.vision import refuse_media, refuse_row

logger = logging.getLogger(__name__)

_BATCH_ROWS = 8192
_NAMED_ROWS = 10
#: Text that is added to a message about missing rows if their dataset has sequences for KTO's KL term.
_OF_KL = (
    ". KTO's KL term pairs each prompt with another row's completion. The pairs depend on the batch size and the row order, so "
    "a first run always lacks values for these pairs"
)
#: Number of rows per lookup when the dataset is a stream.
_STREAM_ROWS = 256
#: Name that is used in messages for a dataset without a name.
THE_DATASET = "the dataset"
AnyDataset = TypeVar("AnyDataset", Dataset, IterableDataset)


@dataclass(frozen=True)
class Misses:
    """The rows of one dataset that have no values.

    Attributes:
        dataset: name of the dataset.
        rows: indices of the rows without values, int64 of shape (n,).
        of: number of rows in the dataset or, for a stream, number of rows read so far.
        has_kl: whether the dataset has sequences for KTO's KL term.
        own_found: whether at least one row of the dataset has values for its own completion (rather than for the completion of
            its KL pair).
        tokens: token ids of the missing rows, or None on processes that did not look up the rows.
        why: reason why on_miss="compute" could not compute the values, or an empty string.
        has_images: whether the rows contain images.
    """

    dataset: str
    rows: npt.NDArray[np.int64]
    of: int
    has_kl: bool
    own_found: bool
    tokens: pa.Table | None = None
    why: str = ""
    has_images: bool = False

    def __str__(self) -> str:
        where = self.dataset if self.dataset in ("train", "eval", THE_DATASET) else f"eval_dataset[{self.dataset!r}]"
        return f"{len(self.rows)} of {self.of} rows of {where} (rows {some_rows(self.rows)})"


@dataclass(frozen=True)
class JoinRecord:
    """A record of a join. It contains the source and the settings that are needed to join the same columns again.

    Attributes:
        where: the source, reference and snapshot of the values.
        settings: the trainer's settings that the sums depend on.
        rows: number of rows, or None for a stream.
        coverage: fraction of the rows that have values. It is 1.0 after every join, because a row without values raises an
            error.
        scored: number of rows that a service, or a `reflogp score` command that the run started, scored during this join.
        computed: number of rows whose values the trainer's own model computed during this join.
        brought: names of reference columns that were already in the dataset and were verified against the joined values.
    """

    where: Where
    settings: TrainerSettings
    rows: int | None = None
    coverage: float = 1.0
    scored: int = 0
    computed: int = 0
    brought: tuple[str, ...] = ()

    def __repr__(self) -> str:
        where, settings = self.where, self.settings
        made = {"scored": self.scored, "computed": self.computed}
        return short_repr(
            "JoinRecord",
            ("a stream" if self.rows is None else f"{counted(self.rows, 'row')}, {100 * self.coverage:g}% with values")
            + "".join(f", {count:,} {name} in this join" for name, count in made.items() if count),
            f"reference {where.reference_id} in {where.reference_dtype}, snapshot {where.snapshot} of {where.store}",
            ", ".join(f"{name} {value}" for name, value in asdict(settings).items() if value is not None),
        )

    def as_dict(self) -> dict[str, Any]:
        counts = {name: value for name, value in asdict(self).items() if name not in ("where", "settings")}
        return {**asdict(self.where), **counts, **asdict(self.settings)}


def join_reference_logps(
    dataset: AnyDataset,
    source: ReferenceSource,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    ld_alpha: float | None = None,
) -> AnyDataset:
    """Return `dataset` with the columns ref_chosen_logps and ref_rejected_logps added (for KTO: ref_logps and ref_KL_logps).

    Args:
        dataset: tokenized rows. Pairs have the columns prompt_ids, chosen_ids and rejected_ids. Rows for KTO have prompt_ids,
            completion_ids and optionally KL_completion_ids. A stream (IterableDataset) is joined as it is read.
        source: where the values are stored.
        max_length: `max_length` of the trainer's config, or None for no limit. The joined values are the sums that TRL would
            precompute with the same `max_length`, `truncation_mode` and `ld_alpha`.
        truncation_mode: `truncation_mode` of the trainer's config.
        ld_alpha: `ld_alpha` of the trainer's config, or None to give all tokens the same weight.

    Returns:
        The dataset with float32 columns of log-probs in nats, summed over each completion.

        If the dataset is a stream, errors about its rows are raised while the stream is read.

    Raises:
        MissingLogpsError: some rows have no stored values; the error names these rows and the command that scores them.
        ReferenceNotFoundError, StoreNotFoundError: the source has no values of the reference at all.
        UnusableLogpsError: values are damaged, NaN or infinite.
        BroughtColumnsError: the dataset already has a reference column, but its values differ from the reference's.
        ServiceError: the source is a service that is unreachable, or that failed to score the missing rows.
        UsageError: rows have images, video or audio; columns are missing; the settings are invalid; or on_miss is "compute",
            which needs a trainer's model.

    Examples:
        >>> from datasets import Dataset
        >>> from reflogp.scoring import score
        >>> from reflogp.trainer import ReferenceSource, join_reference_logps
        >>> rows = Dataset.from_list([{"prompt_ids": [3, 6], "chosen_ids": [7, 2], "rejected_ids": [8]}])
        >>> summary = score("./sft-model", rows, "./logps", dtype="bfloat16")
        >>> source = ReferenceSource("./logps", model="./sft-model", dtype="bfloat16")
        >>> join_reference_logps(rows, source, max_length=1024).column_names
        ['prompt_ids', 'chosen_ids', 'rejected_ids', 'ref_chosen_logps', 'ref_rejected_logps']
    """
    if source.on_miss == "compute":
        raise UsageError("on_miss='compute' needs a trainer's model, which this function does not have: use 'error' or 'score'")
    settings = TrainerSettings(max_length, truncation_mode, ld_alpha)
    check_truncation(max_length, truncation_mode)
    refuse_media(dataset, "given", raw=False)
    values = source.open()
    if isinstance(dataset, IterableDataset):
        return join_stream(dataset, source, values, settings)
    layout = layout_of(dataset.column_names)
    asked = ask_dataset(dataset, layout, settings)
    values, join, _ = answer_rows(dataset, layout, asked, source, values, settings)
    if misses := misses_of(dataset, THE_DATASET, layout, join):
        raise missing_error([misses], values.where, values.command(source.model, "DATA", settings))
    require_usable(len(dataset), THE_DATASET, join, values)
    columns = {layout.name(column): logps for column, logps in join.logps.items()}
    return with_columns(dataset, columns, list(join.tokens.values()), values.where.reference_dtype)[0]


def ask_dataset(dataset: Dataset, layout: Layout, settings: TrainerSettings) -> Asked:
    """Return the keys to look up for a dataset's rows, and the number of values that each completion needs."""
    cut = TrainerSettings() if layout.cut else settings
    return ask(_tables(dataset, layout), max_length=cut.max_length, truncation_mode=cut.truncation_mode)


def answer_rows(
    dataset: Dataset, layout: Layout, asked: Asked, source: ReferenceSource, values: Values, settings: TrainerSettings
) -> tuple[Values, Join, int]:
    """Look up every row, and have the service score the missing rows if the source has on_miss="score".

    Returns:
        A tuple of the Values that were read (those of a newer snapshot if the service scored rows), the Join, and the number of
        rows that were sent to the service.
    """
    join = values.answer(asked, settings)
    missing = np.flatnonzero(join.missing)
    if not len(missing) or source.on_miss != "score" or not isinstance(values, ServiceValues):
        return values, join, 0
    logger.warning(
        "%d of %d rows have no reference log-probs yet; the service %s will score them",
        len(missing),
        len(dataset),
        values.where.store,
    )
    with tqdm(total=len(missing), desc="Reference log-probs", unit="row") as bar:

        def show(job: Job) -> None:
            bar.update(job.progress.rows - bar.n)

        values = values.score(_rows(dataset, layout, missing), settings, show, source.score_timeout)
    return values, values.answer(asked, settings), len(missing)


def misses_of(dataset: Dataset, name: str, layout: Layout, join: Join) -> Misses | None:
    """Return the rows of a dataset for which a join found no values, or None if every row has values."""
    missing = np.flatnonzero(join.missing)
    if not len(missing):
        return None
    own = next(iter(join.logps.values()))  # NaN for rows whose own completion has no value
    return Misses(
        name,
        missing,
        len(dataset),
        KL_IDS in dataset.column_names,
        bool(np.isfinite(own).any()),
        _rows(dataset, layout, missing),
    )


def write_tokens(misses: Sequence[Misses], folder: Path) -> str:
    """Write the token ids of all missing rows to one file that `reflogp score` can read, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "reflogp-missing.parquet"
    tables = [part.tokens for part in misses if part.tokens is not None]
    with write_atomically(file) as partial:
        pq.write_table(pa.concat_tables(tables, promote_options="permissive"), partial)
    return str(file)


def missing_error(misses: Sequence[Misses], where: Where, command: str) -> MissingLogpsError:
    """Return a single error that names the missing rows of all datasets and the command that scores these rows."""
    place = f"in snapshot {where.snapshot} of reference {where.reference_id} in {where.store}"
    words = f"{' and '.join(map(str, misses))} have no reference log-probs {place}. "
    if why := "; ".join(dict.fromkeys(part.why for part in misses if part.why)):
        words += f"on_miss='compute' cannot compute the values: {why}. "
    has_kl = any(part.has_kl for part in misses)
    if not has_kl and all(len(part.rows) == part.of for part in misses):
        words += NONE_FOUND
    words += (
        f"Score them: {command}"
        if command
        else "Create the file again with `reflogp join`, from a store that has values for these rows"
    )
    if has_kl:
        words += _OF_KL
    if has_kl and not any(part.own_found for part in misses):
        words += ". The rows' own completions have no values yet either"
    return MissingLogpsError(
        words,
        [int(row) for row in misses[0].rows],
        command,
        {part.dataset: [int(row) for row in part.rows] for part in misses},
    )


def require_usable(rows: int, name: str, join: Join, values: Values, first: int = 0) -> None:
    """Raise UnusableLogpsError if the values for some rows are damaged or not finite.

    Args:
        rows: number of rows in the dataset or, for a stream, number of rows read so far.
        first: index in the dataset or stream of the join's first row.
    """
    unusable = np.flatnonzero(join.unusable) + first
    if len(unusable):
        raise UnusableLogpsError(
            f"{len(unusable)} of {rows} rows of {name} have reference log-probs that are damaged or not finite (rows "
            f"{some_rows(unusable)}) in {values.where.store}; run `reflogp store verify` on the store from which these values "
            "come",
            [int(row) for row in unusable],
        )


def with_columns(
    dataset: Dataset, columns: Columns, tokens: Sequence[npt.NDArray[np.int64]], dtype: str, first: int = 0
) -> tuple[Dataset, tuple[str, ...]]:
    """Add reference columns to a dataset, and replace existing columns with the same names. Return the new dataset and the
    names of the replaced columns.

    Args:
        columns: dict from each reference column's name to its values in nats, float32 of shape (n,).
        tokens: one array for each entry of `columns`, in the same order: the number of tokens in each row's sum, int64 of shape
            (n,).
        dtype: dtype in which the reference log-probs were computed; existing columns may differ by the rounding error of this
            dtype.
        first: row number of the dataset's first row, for error messages.

    Raises BroughtColumnsError if the values of an existing column differ from the reference's.
    """
    brought = []
    for (name, values), count in zip(columns.items(), tokens, strict=True):
        if name in dataset.column_names:
            _verify_brought(name, np.asarray(dataset.with_format("numpy")[name][:], np.float64), values, count, dtype, first)
            dataset = dataset.remove_columns(name)
            brought.append(name)
        dataset = dataset.add_column(name, values)
    return dataset, tuple(brought)


def join_stream(
    dataset: IterableDataset,
    source: ReferenceSource,
    values: Values,
    settings: TrainerSettings,
    trainer: Any = None,
    name: str = THE_DATASET,
) -> IterableDataset:
    """Return a stream that adds reference columns as its rows are read, in batches of a few hundred rows.

    Args:
        values: the values to join, as returned by `ReferenceSource.open`. They are opened before the stream is read, because
            the deltalake library cannot open a table in the forked worker processes of a data loader.
        trainer: the trainer that reads the reference columns, or None to use the column names of the newest TRL.
        name: the dataset's name, for error messages.
    """
    return dataset.map(_StreamJoin(source, values, settings, trainer, name), batched=True, batch_size=_STREAM_ROWS)


class _StreamJoin:
    """A callable that adds reference columns to one batch of a stream. It runs in the process that reads the stream, which may
    be a data loader's worker."""

    def __init__(self, source: ReferenceSource, values: Values, settings: TrainerSettings, trainer: Any, name: str) -> None:
        self._source, self._values, self._settings, self._name = source, values, settings, name
        self._names = layout_of(["prompt_ids", "completion_ids"], trainer).names
        self._rows = 0

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, Any]:
        for number, row in enumerate(zip(*batch.values(), strict=True), self._rows):
            refuse_row(dict(zip(batch, row, strict=True)), "given", number)
        used = {name: column for name, column in batch.items() if name.endswith("_ids") or name in REFERENCE_COLUMNS}
        dataset = Dataset.from_dict(used)
        layout = replace(layout_of(dataset.column_names), names=self._names)
        asked = ask_dataset(dataset, layout, self._settings)
        self._values, join, _ = answer_rows(dataset, layout, asked, self._source, self._values, self._settings)
        first, self._rows = self._rows, self._rows + len(dataset)
        if misses := misses_of(dataset, self._name, layout, join):
            misses = replace(misses, rows=misses.rows + first, of=self._rows)
            command = self._values.command(self._source.model, "DATA", self._settings)
            raise missing_error([misses], self._values.where, command)
        require_usable(self._rows, self._name, join, self._values, first)
        columns = {layout.name(column): logps for column, logps in join.logps.items()}
        with_columns(dataset, columns, list(join.tokens.values()), self._values.where.reference_dtype, first)
        return {name: logps.tolist() for name, logps in columns.items()}


def _tables(dataset: Dataset, layout: Layout) -> Iterator[pa.Table]:
    view = dataset.select_columns(layout.columns).with_format("arrow")
    for start in range(0, max(1, len(dataset)), _BATCH_ROWS):
        yield layout.canonical(view[start : start + _BATCH_ROWS])


def _rows(dataset: Dataset, layout: Layout, rows: npt.NDArray[np.int64]) -> pa.Table:
    """Return the token ids of the given rows, under the column names that the scorer expects."""
    return layout.canonical(dataset.select_columns(layout.columns).select(rows).with_format("arrow")[:])


#: Text that is added to a message if every row is missing. In this case, the rows' tokens probably differ from the tokens that
#: were scored, and scoring the rows would hide the cause.
NONE_FOUND = (
    "None of the rows was found. If they were scored before, first check that the tokenizer and the chat template are "
    "still the same. "
)


def some_rows(rows: npt.NDArray[np.int64]) -> str:
    """Return the first few row numbers as text for a message."""
    return ", ".join(str(row) for row in rows[:_NAMED_ROWS]) + (", …" if len(rows) > _NAMED_ROWS else "")


def _verify_brought(
    name: str,
    brought: npt.NDArray[np.float64],
    values: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.int64],
    dtype: str,
    first: int,
) -> None:
    apart = np.abs(brought - values)
    different = np.flatnonzero(~(apart <= tolerance(dtype, is_moe=False) * np.sqrt(np.maximum(tokens, 1))))
    if len(different):
        rows = different + first
        raise BroughtColumnsError(
            f"the dataset already has {name}, but {len(different)} of its {len(values)} values differ from the reference's "
            f"(rows {some_rows(rows)}, by up to {np.nanmax(apart[different], initial=0.0):.4g} nats). Remove the column "
            f"(dataset.remove_columns({name!r})) to train on the reference's values",
            [int(row) for row in rows],
        )
