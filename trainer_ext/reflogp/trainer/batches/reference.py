"""An object in place of a framework's reference model, which gives the stored values of padded batches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from reflogp.store import UsageError
from reflogp.store.texts import counted, short_repr
from reflogp.trainer.batches.lookup import look_up_rows
from reflogp.trainer.batches.sequences import IGNORED, TokenDataset
from reflogp.trainer.construction import ReferenceDuringTraining
from reflogp.trainer.errors import MissingLogpsError
from reflogp.trainer.source import ReferenceSource
from reflogp.trainer.values import Where


class BatchReference(ReferenceDuringTraining):
    """Reference log-probs of padded batches, from a store or a service.

    The constructor looks up every row of the datasets, so that no value can be missing during training. In a batch, each row is
    found by its tokens, so shuffling, packing and evaluation need no special handling.

    Args:
        source: where the values are. Files of `reflogp join` hold sums of whole completions and cannot be used.
        datasets: name -> tokenised dataset, all that the trainer will see: {"train": …, "eval": …}.
        output_dir: folder to which the sequences of rows without values are written, as reflogp-missing.parquet.
        run_command: True to score sequences that a local store lacks, by running `reflogp score` here in a separate process.

    Raises:
        MissingLogpsError: some rows were never scored; the error names them and the command that scores them.
        UnusableLogpsError: values are damaged, NaN or infinite.
        UsageError: a source that cannot be used.
        RankFailedError: another process of a distributed run has raised one of these.

    Attributes:
        joins: dataset name -> what was looked up and from where.
        where: where the values come from.

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
        """Return the log-probs of a batch's completions.

        Args:
            input_ids: token ids, padded on either side, (B, L).
            attention_mask: 0 where a token is padding, (B, L).

        Returns:
            log-probs in nats, float32 (B, L - 1), on the device of `input_ids`: entry t is that of token t + 1; 0 before a
            row's completion and in its padding.

        Raises MissingLogpsError for a row that is in none of the datasets.
        """
        log_probs = np.zeros((input_ids.shape[0], input_ids.shape[1] - 1), np.float32)
        for row, (ids, mask) in enumerate(zip(input_ids.cpu().numpy(), attention_mask.cpu().numpy(), strict=True)):
            places = np.flatnonzero(mask)
            values = self._values.of(ids[places].astype(np.uint32))
            if values is None:
                raise MissingLogpsError(
                    f"row {row} of a batch ({len(places)} tokens, {ids[places[:8]].tolist()}, …) is in none of the datasets "
                    f"whose values were looked up ({', '.join(self.joins)}): name every dataset that the trainer sees",
                    [row],
                    "",
                )
            log_probs[row, places[len(places) - len(values) :] - 1] = values
        return torch.from_numpy(log_probs).to(input_ids.device)

    def sums(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of each row's log-probs, and the number of tokens in the sum.

        Args:
            input_ids, attention_mask: see `token_logps`, (B, L).
            labels: -100 for tokens that are not in the sum, (B, L). A row's first token is never in it.

        Returns:
            sums in nats, float32 (B,), and numbers of tokens, int64 (B,), on the device of `input_ids`.

        Raises UsageError for labels at padding, whose log-probs no store has.
        """
        if bool(((labels != IGNORED) & (attention_mask == 0)).any()):
            raise UsageError("padding has labels other than -100, so the loss counts its log-probs, which no store has")
        counts = (labels[:, 1:] != IGNORED) & (attention_mask[:, :-1] != 0)  # with padding before it, a first token has a place
        values = self.token_logps(input_ids, attention_mask).double()
        return (values * counts).sum(1).float(), counts.sum(1)


def check_source(source: ReferenceSource, run_command: bool) -> None:
    """Raise UsageError for a source that cannot give values by tokens, before anything is loaded."""
    if source.is_file:
        raise UsageError(
            f"{source.location} holds one sum for each completion, but a value for each token is needed here: give the store"
        )
    if source.on_miss == "compute":
        raise UsageError("on_miss='compute' is for TRL's trainers; here use 'error' or 'score'")
    if run_command and (source.is_service or source.described is None):
        raise UsageError("to score missing rows in this run, give a store and model=; for a service use on_miss='score'")
    if run_command and source.snapshot is not None:
        raise UsageError(f"newly scored values will not be in snapshot {source.snapshot}: leave the snapshot out")
