"""Train with LLaMA-Factory's DPO and KTO trainers, using stored reference log-probs, and audit the run.

The trainers override `compute_reference_log_probs`, which LLaMA-Factory calls for every batch (trainer.py in
llamafactory/train/dpo and kto).
"""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc
import torch
from llamafactory.train.dpo.trainer import CustomDPOTrainer
from llamafactory.train.kto.trainer import CustomKTOTrainer

from reflogp.store import UsageError
from reflogp.trainer.batches import LabelledColumns
from reflogp.trainer.batches.in_trainer import BatchReferenceMixin, StoredReference
from reflogp.trainer.batches.sequences import IGNORED

_MEDIA = ("images", "videos", "audios")
_ROWS_AT_ONCE = 1024
#: Losses for which LLaMA-Factory divides the policy's and the reference's log-probs by the number of tokens.
_MEANS = ("ipo",)


class _Stored(BatchReferenceMixin):
    """A mixin with the code that the DPO and KTO trainers share.

    Args:
        stored: reflogp's settings for the run, including where the values are stored.
    """

    def __init__(self, *args: Any, ref_model: Any = None, stored: StoredReference, **kwargs: Any) -> None:
        if getattr(kwargs.get("data_collator"), "label_pad_token_id", IGNORED) != IGNORED:
            raise UsageError(
                "with ignore_pad_token_for_loss=false, the loss needs log-probs of padding tokens, which no store has; set "
                "ignore_pad_token_for_loss to true"
            )
        super().__init__(*args, ref_model=None, **kwargs)
        for name, dataset in self._datasets().items():
            _refuse_media(dataset, name)
        self.use_stored_reference(stored, lambda dataset: LabelledColumns(dataset, self._sequence_columns))

    _sequence_columns: tuple[tuple[str, str], ...]


class StoredDPOTrainer(_Stored, CustomDPOTrainer):
    """LLaMA-Factory's DPO trainer, with reference log-probs from a store or a service."""

    _sequence_columns = (("chosen_input_ids", "chosen_labels"), ("rejected_input_ids", "rejected_labels"))

    def compute_reference_log_probs(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        """Return the sum of each row's stored log-probs, as two float32 tensors of shape (pairs,): one for the chosen rows, one
        for the rejected rows. For the IPO loss, return means over tokens instead of sums."""
        sums, tokens = self.ref_model.sums(batch["input_ids"], batch["attention_mask"], batch["labels"])
        scale = tokens.clamp(min=1) if self.loss_type in _MEANS else torch.ones_like(tokens)

        def policy() -> torch.Tensor:
            with self.policy_as_reference(model):
                found = super(StoredDPOTrainer, self).compute_reference_log_probs(model, batch)
            return torch.cat(found) * scale

        self.compare_first_batch(policy, sums, tokens)
        return (sums / scale).chunk(2)


class StoredKTOTrainer(_Stored, CustomKTOTrainer):
    """LLaMA-Factory's KTO trainer, with reference log-probs from a store or a service."""

    _sequence_columns = (("input_ids", "labels"), ("kl_input_ids", "kl_labels"))

    def compute_reference_log_probs(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        """Return the sum of each row's stored log-probs, as three float32 tensors: one each for the desirable rows, the
        undesirable rows and the KL rows."""
        own, kl = (
            self.ref_model.sums(*(batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "labels")))
            for prefix in ("", "kl_")
        )
        (sums, tokens), (kl_sums, kl_tokens) = own, kl
        tags = batch["kto_tags"]
        parts = (sums[tags], sums[~tags], kl_sums)

        def policy() -> torch.Tensor:
            with self.policy_as_reference(model):
                return torch.cat(super(StoredKTOTrainer, self).compute_reference_log_probs(model, batch))

        self.compare_first_batch(policy, torch.cat(parts), torch.cat([tokens[tags], tokens[~tags], kl_tokens]))
        return parts


def _refuse_media(dataset: Any, name: str) -> None:
    """Raise UsageError if a dataset has images, videos or audio, because stored values for the text alone would be wrong."""
    columns = [column for column in _MEDIA if column in (dataset.column_names or ())]
    if not columns or not hasattr(dataset, "__len__"):
        return
    for table in dataset.select_columns(columns).with_format("arrow").iter(_ROWS_AT_ONCE):
        for column in columns:
            values = table[column]
            if (
                values.null_count < len(values)
                and pc.any(pc.fill_null(pc.greater(pc.list_value_length(values), 0), False)).as_py()
            ):
                raise UsageError(
                    f"the {name} dataset has {column}, but with LLaMA-Factory, stored values are supported only for text: "
                    "to train without stored values, start this run with llamafactory-cli"
                )
