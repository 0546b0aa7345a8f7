"""An object that OpenRLHF's DPOTrainer calls as its reference model, and that returns stored values.

It accepts the calls that this trainer makes to models (openrlhf/trainer/dpo_trainer.py, concatenated_forward). It has no
weights and runs no forward pass.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reflogp.store import UsageError
from reflogp.trainer.errors import MissingLogpsError
from reflogp.trainer.join import JoinRecord
from reflogp.trainer.openrlhf.lookup import look_up_rows
from reflogp.trainer.source import ReferenceSource


class CachedReference:
    """Reference log-probs for OpenRLHF's `DPOTrainer(ref_model=…)`, from a store or a service.

    The constructor looks up every row of the datasets, so that no value can be missing during training. In a batch, each row is
    found by its tokens. Its values belong to its last tokens, the completion's, and the trainer's own mask sums them. So
    packing, ring attention, shuffling and evaluation need no special handling. docs/openrlhf.md shows a training script.

    Args:
        source: where the values are. Files of `reflogp join` hold sums and cannot serve OpenRLHF.
        datasets: name -> RewardDataset, all that the trainer will see: {"train": …, "eval": …}.
        output_dir: folder to which the sequences of rows without values are written, as reflogp-missing.parquet.
        run_command: True to score sequences that a local store lacks, by running `reflogp score` here in a separate process.

    Raises:
        MissingLogpsError: some rows were never scored; the error names them and the command that scores them.
        UnusableLogpsError: values are damaged, NaN or infinite.
        UsageError: a source that cannot serve OpenRLHF.
        RankFailedError: another process of a distributed run has raised one of these.

    Attributes:
        joins: dataset name -> what was joined and from where.
        model: None; OpenRLHF looks here for the model that its strategy would wrap.
    """

    model = None

    def __init__(
        self,
        source: ReferenceSource,
        datasets: Mapping[str, Any],
        output_dir: str | os.PathLike[str],
        run_command: bool = False,
    ) -> None:
        check_source(source, run_command)
        self._values, self.joins = look_up_rows(datasets, source, Path(output_dir), run_command)

    joins: dict[str, JoinRecord]

    def __bool__(self) -> bool:
        """Return False, so that `strategy.prepare` returns this object unchanged and wraps nothing."""
        return False

    def eval(self) -> CachedReference:
        return self

    @torch.no_grad()
    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        return_output: bool = True,
        return_logprobs: bool = True,
        ring_attn_group: Any = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the reference's log-probs of a padded batch.

        Args:
            input_ids: chosen rows, then rejected ones, (2B, L).
            attention_mask: 1 where there is a token, (2B, L).
            return_output, return_logprobs, ring_attn_group: ignored; part of OpenRLHF's call.

        Returns:
            log-probs, float32 (2B, L - 1), in nats, on the input's device: entry t is that of token t + 1; 0 before a row's
            completion and in its padding, which the trainer masks. And an empty output, which has no aux_loss.

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
        return torch.from_numpy(log_probs).to(input_ids.device), {}


def check_source(source: ReferenceSource, run_command: bool) -> None:
    """Raise UsageError for a source that cannot serve OpenRLHF, before anything is loaded."""
    if source.is_file:
        raise UsageError(
            f"{source.location} holds one sum for each completion, and OpenRLHF needs a value for each token: give the store"
        )
    if source.on_miss == "compute":
        raise UsageError("on_miss='compute' is for TRL's trainers; with OpenRLHF use 'error' or 'score'")
    if run_command and (source.is_service or source.described is None):
        raise UsageError("to score missing rows in this run, give a store and model=; for a service use on_miss='score'")
    if run_command and source.snapshot is not None:
        raise UsageError(f"what is scored now will not be in snapshot {source.snapshot}: leave the snapshot out")
