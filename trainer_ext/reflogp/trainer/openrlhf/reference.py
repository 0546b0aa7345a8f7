"""CachedReference: what stands where OpenRLHF's DPOTrainer takes its reference model.

Knows how that trainer calls a model (openrlhf/trainer/dpo_trainer.py, concatenated_forward) and answers with stored values. Has
no weights and never ran a forward. Made by `CachedReferenceDPOTrainer`, or by a script of one's own.
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
    """Reference log-probs for `DPOTrainer(ref_model=…)` of OpenRLHF, from a store or a service.

    Every row of the datasets is looked up here, so that nothing can be missing once training runs. A row of a batch is then
    found by its tokens; its values are those of its last tokens, its completion's, and the trainer's own mask sums them. So
    packing, ring attention, shuffling and evaluation need nothing special.

    Args:
        source: where the values are. Files of `reflogp join` hold sums and cannot serve OpenRLHF.
        datasets: name -> RewardDataset, all that the trainer will see: {"train": …, "eval": …}.
        output_dir: where the sequences of rows without values are written, as reflogp-missing.parquet.
        run_command: have what is missing in a local store scored by `reflogp score`, run here as a process of its own.

    Raises:
        MissingLogpsError: rows that were never scored; names them and the command that scores them.
        UnusableLogpsError: values are damaged, NaN or infinite.
        UsageError: a source that cannot serve OpenRLHF.
        RankFailedError: another process of a distributed run has raised one of these.

    Attributes:
        joins: dataset name -> what was joined from where.
        model: None, where OpenRLHF looks for the model that its strategy would wrap.

    Example:
        reference = CachedReference(source, {"train": train_dataset, "eval": eval_dataset}, output_dir="run")
        trainer = DPOTrainer(model=model, ref_model=reference, …)
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
        """False: `strategy.prepare` then hands it back as it is, and wraps nothing."""
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
        """The reference's log-probs of a padded batch.

        Args:
            input_ids: chosen rows, then rejected ones, (2B, L).
            attention_mask: 1 where there is a token, (2B, L).

        Returns:
            log-probs, float32 (2B, L - 1) on the input's device: at t, in nats, that of token t + 1; 0 before a row's
            completion and in its padding, which the trainer masks. And an output without an aux_loss.

        Raises MissingLogpsError for a row that was in none of the datasets.
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
            f"{source.location} holds sums of TRL's sequences, and OpenRLHF needs values of single tokens: give the store"
        )
    if source.on_miss == "compute":
        raise UsageError("on_miss='compute' is for TRL's trainers; with OpenRLHF use 'error' or 'score'")
    if run_command and (source.is_service or source.described is None):
        raise UsageError("to score what is missing here, give a store and model=; a service scores with on_miss='score'")
    if run_command and source.snapshot is not None:
        raise UsageError(f"what is scored now will not be in snapshot {source.snapshot}: leave the snapshot out")
