"""Provide an object that OpenRLHF's DPOTrainer calls as its reference model, and that returns stored values.

The object can be called with the arguments that the trainer passes to its models (openrlhf/trainer/dpo_trainer.py,
concatenated_forward). The object has no weights and runs no forward pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from reflogp.store import UsageError
from reflogp.trainer.batches import BatchReference
from reflogp.trainer.batches.sequences import TokenIds
from reflogp.trainer.source import ReferenceSource


class RewardRows:
    """A TokenDataset that reads OpenRLHF's RewardDataset exactly as OpenRLHF's data loader does.

    A row of a RewardDataset (openrlhf/datasets/reward_dataset.py) contains the tokens of the chosen and of the rejected
    sequence, each truncated and ending with EOS. It also contains the number of prompt tokens, which OpenRLHF counts by
    tokenizing the prompt alone.

    Raises UsageError if the dataset was created without is_dpo=True.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        if not getattr(dataset, "is_dpo", False):
            raise UsageError(f"the {name} dataset has no prompt lengths: create the RewardDataset with is_dpo=True")
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[list[tuple[TokenIds, int]]]:
        for row in range(len(self)):
            chosen, chosen_mask, rejected, rejected_mask, prompt_length = self._dataset[row]
            sides = ((chosen, chosen_mask), (rejected, rejected_mask))
            yield [(ids[mask.bool()].numpy().astype(np.uint32), int(prompt_length)) for ids, mask in sides]


class CachedReference(BatchReference):
    """Reference log-probs for OpenRLHF's `DPOTrainer(ref_model=…)`, from a store or a service.

    A call returns one log-prob for each token of the completions in a batch; OpenRLHF's trainer masks and sums these
    log-probs. docs/openrlhf.md shows how to use this class in a training script.

    Args:
        source, output_dir, run_command: see BatchReference.
        datasets: every RewardDataset that the trainer will use, by name: {"train": …, "eval": …}.

    Raises the errors of BatchReference.

    Attributes:
        joins: dict from the name of each dataset to a record of how and where its values were looked up.
        model: always None, because there is no model for OpenRLHF to prepare.
    """

    model = None

    def __init__(
        self,
        source: ReferenceSource,
        datasets: Mapping[str, Any],
        output_dir: str | os.PathLike[str],
        run_command: bool = False,
    ) -> None:
        rows = {name: RewardRows(dataset, name) for name, dataset in datasets.items()}
        super().__init__(source, rows, output_dir, run_command)

    def eval(self) -> CachedReference:
        return self

    @torch.no_grad()
    def __call__(  # type: ignore[override]  # OpenRLHF calls this object as a model
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        return_output: bool = True,
        return_logprobs: bool = True,
        ring_attn_group: Any = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the reference's log-probs for a padded batch.

        Args:
            input_ids: token ids of the chosen rows, followed by those of the rejected rows, shape (2B, L).
            attention_mask: 0 at padding and 1 at all other tokens, shape (2B, L).
            return_output, return_logprobs, ring_attn_group: ignored; accepted because OpenRLHF passes them.

        Returns:
            a tuple of the log-probs that `token_logps` returns, of shape (2B, L - 1), and an empty dict. The dict takes the
            place of a model's output, in which OpenRLHF looks for aux_loss.
        """
        return self.token_logps(input_ids, attention_mask), {}
