"""Define an object that replaces a framework's reference model and returns the stored log-probs of padded batches.

The values of all rows are looked up before training, once per node. Sequences without values stop the run, unless the settings
(on_miss="score" or run_command) request that these sequences are scored first.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from datasets import Dataset

from reflogp.store import ReferenceNotFoundError, StoreNotFoundError, UsageError
from reflogp.store.joins import Asked, ask
from reflogp.store.texts import counted, short_repr
from reflogp.store.windows import TrainerSettings
from reflogp.trainer.batches.sequences import IGNORED, RowValues, Sequences, TokenDataset, save_row_values, sequences_of
from reflogp.trainer.construction import ReferenceDuringTraining
from reflogp.trainer.errors import MissingLogpsError, ReferenceLogpsError, UnusableLogpsError
from reflogp.trainer.join import NONE_FOUND, JoinRecord, answer_rows, some_rows
from reflogp.trainer.layouts import layout_of
from reflogp.trainer.ranks import Rank, gather, of_my_node, on_all_ranks, on_all_ranks_for_long
from reflogp.trainer.source import ReferenceSource
from reflogp.trainer.values import Values, Where, command_to_score

T = TypeVar("T")

#: Maximum number of sequences per lookup. This limit bounds memory use, because the values of a lookup exist in memory twice.
_AT_ONCE = 65_536
_SEQUENCES = "completion_ids"
#: Exit code of `reflogp score` if it skipped rows; MissingLogpsError then names these rows.
_ROWS_LEFT_OUT = 3
#: Environment variables that a launcher sets for its processes, and that the scoring command must not inherit.
_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class BatchReference(ReferenceDuringTraining):
    """An object that supplies the reference log-probs of padded batches, from a store or a service.

    The constructor looks up every row of the datasets, so that no value can be missing during training. During training, the
    tokens of each row in a batch identify the row's values, so shuffling and evaluation need no special handling. Each row of a
    batch must contain exactly one sequence of a dataset, plus padding. Rows that combine several sequences are not supported.

    Args:
        source: where the values are stored. Files from `reflogp join` cannot be used, because they contain only sums over whole
            completions.
        datasets: every tokenized dataset that the trainer will use, by name: {"train": …, "eval": …}.
        output_dir: folder in which to write sequences without values, as reflogp-missing.parquet.
        run_command: whether to score sequences that the store lacks, by running `reflogp score` on this machine in a separate
            process.

    Raises:
        MissingLogpsError: some rows have no stored values; the error names these rows and the command that scores them.
        UnusableLogpsError: values are damaged, NaN or infinite.
        UsageError: the source cannot be used.
        ReferenceLogpsError: `run_command` is True, but the scoring command failed.
        RankFailedError: another process of a distributed run raised one of these errors.

    Attributes:
        joins: dict from each dataset's name to a JoinRecord, which says where the dataset's values come from.
        where: the source, reference and snapshot of the values.

    Examples:
        >>> from datasets import Dataset
        >>> from reflogp.trainer import ReferenceSource
        >>> from reflogp.trainer.batches import BatchReference, LabelledColumns
        >>> rows = Dataset.from_list([{"input_ids": [1, 5, 9, 7, 2], "labels": [-100, -100, -100, 7, 2]}])
        >>> source = ReferenceSource("./logps", model="./sft-model")
        >>> reference = BatchReference(source, {"train": LabelledColumns(rows, [("input_ids", "labels")])}, "run")
    """

    def __init__(
        self,
        source: ReferenceSource,
        datasets: Mapping[str, TokenDataset],
        output_dir: str | os.PathLike[str],
        run_command: bool = False,
    ) -> None:
        check_source(source, run_command)
        self._values, self.joins = look_up_rows(datasets, source, Path(output_dir), run_command)
        self.where: Where = next(iter(self.joins.values())).where

    def __repr__(self) -> str:
        named = ", ".join(f"{name} {counted(record.rows or 0, 'row')}" for name, record in self.joins.items())
        where = self.where
        at = f"snapshot {where.snapshot} of {where.store}"
        return short_repr("BatchReference", f"reference {where.reference_id} in {where.reference_dtype}, {at}", named)

    def token_logps(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the stored log-probs of a batch's completions.

        Args:
            input_ids: token ids, padded on either side, shape (B, L).
            attention_mask: 0 at padding and 1 at all other tokens, shape (B, L).

        Returns:
            log-probs in nats, float32 of shape (B, L - 1), on the device of `input_ids`. Entry t of a row is the log-prob of
            the row's token t + 1; entries before the row's completion and at padding are 0.

        Raises MissingLogpsError if a row is not in any of the datasets whose values were looked up.
        """
        log_probs = np.zeros((input_ids.shape[0], input_ids.shape[1] - 1), np.float32)
        for row, (ids, mask) in enumerate(zip(input_ids.cpu().numpy(), attention_mask.cpu().numpy(), strict=True)):
            places = np.flatnonzero(mask)
            values = self._values.of(ids[places].astype(np.uint32))
            if values is None:
                raise MissingLogpsError(
                    f"row {row} of a batch ({len(places)} tokens, beginning with {ids[places[:8]].tolist()}) is not in "
                    f"any of the datasets whose values were looked up ({', '.join(self.joins)}): pass "
                    f"{type(self).__name__} every dataset that the trainer uses",
                    [row],
                    "",
                )
            log_probs[row, places[len(places) - len(values) :] - 1] = values
        return torch.from_numpy(log_probs).to(input_ids.device)

    def sums(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of each row's stored log-probs, and the number of tokens in each sum.

        Args:
            input_ids, attention_mask: a padded batch, as for `token_logps`, shape (B, L).
            labels: -100 at tokens whose log-probs are not added to the sum, shape (B, L). The label of a row's first token is
                ignored, because this token has no log-prob.

        Returns:
            sums in nats (float32) and token counts (int64), each of shape (B,), on the device of `input_ids`.

        Raises UsageError if padding has labels other than -100, because no store has log-probs of padding.
        """
        if bool(((labels != IGNORED) & (attention_mask == 0)).any()):
            raise UsageError(
                "padding has labels other than -100, so the loss would need log-probs of padding, which no store has; label "
                "padding with -100"
            )
        # A row's first token has no log-prob. In a left-padded row, it is not in column 0, so the mask must exclude it.
        counts = (labels[:, 1:] != IGNORED) & (attention_mask[:, :-1] != 0)
        values = self.token_logps(input_ids, attention_mask).double()
        return (values * counts).sum(1).float(), counts.sum(1)


def check_source(source: ReferenceSource, run_command: bool) -> None:
    """Raise UsageError if a source has no per-token values, or if rows without values cannot be scored in the requested way.
    This check reads no datasets or values."""
    if source.is_file:
        raise UsageError(
            f"{source.location} contains one sum per completion, but a value per token is needed: use a store or a service"
        )
    if source.on_miss == "compute":
        raise UsageError("on_miss='compute' works only with TRL's trainers: use 'error' or 'score'")
    if run_command and (source.is_service or source.described is None):
        raise UsageError(
            "missing rows can be scored on this machine only if the values come from a store and model= is given; for a "
            "service, use on_miss='score'"
        )
    if run_command and source.snapshot is not None:
        raise UsageError(f"snapshot {source.snapshot} cannot contain newly scored values: omit the snapshot")


@dataclass(frozen=True)
class Answered:
    """The result of looking up all sequences. Only the run's first process looks them up; all processes receive the result.

    Attributes:
        where: the source, reference and snapshot of the values.
        scored: dict from each dataset's name to the number of its rows that were scored because they had no values. Datasets in
            which every row already had values are omitted.
    """

    where: Where
    scored: dict[str, int]


def look_up_rows(
    datasets: Mapping[str, TokenDataset], source: ReferenceSource, output_dir: Path, run_command: bool
) -> tuple[RowValues, dict[str, JoinRecord]]:
    """Return the values for all rows of the given datasets; every process gets the same values.

    The first process on each node reads the datasets. The first process of the run finds the sequences without stored values,
    and has these sequences scored if `source` or `run_command` requests it, while the other processes wait. Then the first
    process on each node writes the values to a file, which all processes on the node map into memory. All nodes use the same
    snapshot.

    Args:
        datasets: the datasets by name.
        source: where the values are stored.
        output_dir: folder in which to write sequences without values, as reflogp-missing.parquet.
        run_command: whether to score sequences without values on this machine, by running `reflogp score` in a separate
            process.

    Returns:
        A tuple of the values and a dict from each dataset's name to the JoinRecord of its lookup.

    Raises:
        MissingLogpsError: some rows have no stored values; the error names these rows and the command that scores them.
        UnusableLogpsError: values are damaged, NaN or infinite.
        ReferenceLogpsError: `run_command` is True, but the scoring command failed.
        RankFailedError: another process raised one of these errors.
    """
    rank = Rank.here()
    walks = rank.local_rank == 0
    sequences = on_all_ranks_for_long("reading the datasets", lambda: sequences_of(datasets) if walks else None)

    def answer() -> Answered | None:
        return _answered(_given(sequences), source, output_dir, run_command) if rank.rank == 0 else None

    answered = _given(gather(on_all_ranks_for_long("looking up the reference log-probs", answer))[0])

    def read() -> Path | None:
        return _saved(_given(sequences), source.open(answered.where.snapshot)) if walks else None

    file = _given(of_my_node(gather(on_all_ranks_for_long("reading the reference log-probs", read))))
    values = on_all_ranks("mapping the reference log-probs into memory", lambda: RowValues(file))
    joins = {
        name: JoinRecord(answered.where, TrainerSettings(), rows=len(dataset), scored=answered.scored.get(name, 0))
        for name, dataset in datasets.items()
    }
    return values, joins


def _answered(sequences: Sequences, source: ReferenceSource, output_dir: Path, run_command: bool) -> Answered:
    asked = ask(sequences.table)
    values, never_scored = _opened(source)
    missing = at_first = _missing_of(values, asked)
    if missing.any() and values is not None and source.on_miss == "score":
        rows = Dataset(sequences.table)
        values, join, _ = answer_rows(rows, layout_of(rows.column_names), asked, source, values, TrainerSettings())
        missing = join.missing
    elif missing.any() and run_command:
        _run(_written(sequences, missing, source, values, output_dir))
        values, never_scored = source.open(), ""
        missing = _missing_of(values, asked)
    if missing.any() or values is None:
        command = _written(sequences, missing, source, values, output_dir)
        hint = ". "
        if never_scored:
            hint = f" ({never_scored}). "
        elif np.array_equal(missing, _needed(asked)):
            hint = f". {NONE_FOUND}"
        raise _missing_error(sequences.rows(missing), sequences, source, hint, command)
    return Answered(values.where, {name: len(rows) for name, rows in sequences.rows(at_first).items()})


def _opened(source: ReferenceSource) -> tuple[Values | None, str]:
    """Open the source, and return its values and an empty string. If the store does not exist or has no values for the source's
    reference, return None and a message that says so."""
    try:
        return source.open(), ""
    except (ReferenceNotFoundError, StoreNotFoundError) as error:
        if source.is_service or source.described is None:
            raise
        return None, str(error.__cause__ or error)  # unlike `error`, the cause suggests no command for the whole dataset


def _missing_of(values: Values | None, asked: Asked) -> npt.NDArray[np.bool_]:
    return _needed(asked) if values is None else values.answer(asked, TrainerSettings()).missing


def _needed(asked: Asked) -> npt.NDArray[np.bool_]:
    """Return a mask of the sequences that need values: those with at least one completion token."""
    return asked.needed[_SEQUENCES] > 0


def _written(
    sequences: Sequences, missing: npt.NDArray[np.bool_], source: ReferenceSource, values: Values | None, output_dir: Path
) -> str:
    """Write the missing sequences to a file, and return the `reflogp` command that scores these sequences."""
    output_dir.mkdir(parents=True, exist_ok=True)
    file = output_dir / "reflogp-missing.parquet"
    pq.write_table(sequences.table.filter(pa.array(missing)), file)
    if values is not None:
        return values.command(source.model, str(file), TrainerSettings())
    assert source.described is not None
    return command_to_score(str(source.model), source.described, str(file), source.location, TrainerSettings())


def _run(command: str) -> None:
    """Run a `reflogp` command with this Python interpreter, in a process that is not part of this distributed run."""
    words = [sys.executable, "-c", "from reflogp.cli import main; main()", *shlex.split(command)[1:]]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    status = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
    if status not in (0, _ROWS_LEFT_OUT):
        raise ReferenceLogpsError(f"`{command}` failed with exit status {status}; see its output above")


def _missing_error(
    rows: dict[str, npt.NDArray[np.int64]], sequences: Sequences, source: ReferenceSource, hint: str, command: str
) -> MissingLogpsError:
    first = next(iter(rows.values()), np.empty(0, np.int64))
    named = _named(rows, sequences)
    return MissingLogpsError(
        f"{named} have no reference log-probs in {source.location}{hint}Score them: {command}",
        [int(row) for row in first],
        command,
    )


def _named(rows: dict[str, npt.NDArray[np.int64]], sequences: Sequences) -> str:
    return " and ".join(
        f"{len(some)} of {len(sequences.of[name])} rows of {name} (rows {some_rows(some)})" for name, some in rows.items()
    )


def _saved(sequences: Sequences, values: Values) -> Path:
    """Write the values of all sequences to a file that this node's processes map into memory, and return the file's path."""
    asked = ask(sequences.table)
    keys, needed = asked.keys[_SEQUENCES], asked.needed[_SEQUENCES]
    parts = [values.token_lists(keys[start : start + _AT_ONCE]) for start in range(0, len(keys), _AT_ONCE)]
    lengths = np.concatenate([pc.list_value_length(part).fill_null(0).to_numpy() for part in parts]).astype(np.int64)
    flat = np.concatenate([part.flatten().to_numpy(zero_copy_only=False) for part in parts])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    unusable = lengths != needed
    unusable[np.searchsorted(offsets, np.flatnonzero(~np.isfinite(flat)), "right") - 1] = True
    if unusable.any():
        rows = sequences.rows(unusable)
        raise UnusableLogpsError(
            f"{_named(rows, sequences)} have reference log-probs that are damaged or not finite in {values.where.store}; run "
            "`reflogp store verify` on the store from which these values come",
            [int(row) for row in next(iter(rows.values()))],
        )
    lists = pa.LargeListArray.from_arrays(offsets, pa.array(flat, pa.float32()))
    return save_row_values(sequences.row_keys, lists)


def _given(value: T | None) -> T:
    assert value is not None
    return value
