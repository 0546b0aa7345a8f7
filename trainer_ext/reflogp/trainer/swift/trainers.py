"""Train with ms-swift's DPO and KTO trainers, using stored reference log-probs, and audit the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from swift.rlhf_trainers import DPOTrainer, KTOTrainer

from reflogp.store import UsageError
from reflogp.trainer.batches.in_trainer import BatchReferenceMixin, StoredReference
from reflogp.trainer.batches.sequences import TokenIds, labelled

#: Names of the tensors in an encoded row of text, without the prefix `chosen_` or `rejected_`.
_OF_TEXT = frozenset({"input_ids", "labels", "loss_scale", "attention_mask", "token_type_ids", "position_ids"})
#: Columns of unencoded rows that contain media instead of text.
_MEDIA = ("images", "videos", "audios")


class EncodedRows:
    """A TokenDataset that reads an ms-swift dataset, which encodes each row when the row is read.

    A row has one sequence in the columns that begin with `chosen_`, and another in the columns that begin with `rejected_`. For
    KTO, the `chosen_` sequence is the row's own prompt and completion, whatever the row's label. The `rejected_` sequence is
    the row's prompt with the completion of another row, and is used for the KL term.

    Raises UsageError for rows with images, videos or audio, in the constructor or while the rows are read.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        raw: Any = getattr(dataset, "dataset", None)  # a LazyLLMDataset has this attribute
        for column in set(_MEDIA) & set(getattr(raw, "column_names", None) or ()):
            if any(_has(value) for value in raw[column]):
                raise UsageError(
                    f"the dataset has {column}, but with ms-swift, stored values are supported only for text: train without "
                    "stored values, with ms-swift's own command `swift rlhf`"
                )

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[list[tuple[TokenIds, int]]]:
        for number in range(len(self)):
            row = self._dataset[number]
            others = [name for name in row if _without_side(name) not in _OF_TEXT and _is_tensor(row[name])]
            if others:
                raise UsageError(
                    f"row {number} has {others[0]}, but with ms-swift, stored values are supported only for text: train "
                    "without stored values, with ms-swift's own command `swift rlhf`"
                )
            sides = [side for side in ("chosen", "rejected") if f"{side}_input_ids" in row]
            yield [labelled(row[f"{side}_input_ids"], row[f"{side}_labels"]) for side in sides]


def _without_side(name: str) -> str:
    return name.removeprefix("chosen_").removeprefix("rejected_")


def _has(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, list) and any(isinstance(v, torch.Tensor) for v in value))


class _Stored(BatchReferenceMixin):
    """A mixin with the code that the DPO and KTO trainers share.

    Args:
        stored: reflogp's settings for the run, including where the values are stored.
    """

    def __init__(self, model: Any = None, ref_model: Any = None, *args: Any, stored: StoredReference, **kwargs: Any) -> None:
        super().__init__(model, None, *args, **kwargs)
        self.use_stored_reference(stored, EncodedRows)

    def _sums(self, batch: dict[str, Any], prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch[f"{prefix}input_ids"]
        mask = batch.get(f"{prefix}attention_mask")
        sums: tuple[torch.Tensor, torch.Tensor] = self.ref_model.sums(
            ids, torch.ones_like(ids) if mask is None else mask, batch[f"{prefix}labels"]
        )
        return sums


class StoredDPOTrainer(_Stored, DPOTrainer):
    """ms-swift's DPO trainer, with reference log-probs from a store or a service."""

    def compute_ref_log_probs(self, batch: dict[str, Any]) -> Any:
        """Return the sums of the stored log-probs of a batch's completions, as two float32 tensors of shape (pairs,): one for
        the chosen completions, and one for the rejected completions."""
        sums, tokens = self._sums(batch, "")

        def policy() -> torch.Tensor:
            with self.policy_as_reference(self.model):
                return torch.cat(super(StoredDPOTrainer, self).compute_ref_log_probs(batch))

        self.compare_first_batch(policy, sums, tokens)
        return sums.chunk(2)


class StoredKTOTrainer(_Stored, KTOTrainer):
    """ms-swift's KTO trainer, with reference log-probs from a store or a service."""

    def get_batch_loss_metrics(self, model: Any, batch: dict[str, Any]) -> Any:
        """Add the sums of the stored log-probs to the batch, under the names that TRL reads, and compute the loss."""
        label = torch.tensor(batch["label"])
        own, own_tokens = self._sums(batch, "completion_")
        given, sums, tokens = {"reference_logps": own}, [own[label], own[~label]], [own_tokens[label], own_tokens[~label]]
        if self.calculate_KL:
            given["reference_KL_logps"], kl_tokens = self._sums(batch, "KL_completion_")
            sums.append(given["reference_KL_logps"])
            tokens.append(kl_tokens)

        def policy() -> torch.Tensor:
            with self.policy_as_reference(model):
                chosen, rejected, _, _, kl = self.forward(model, batch)[:5]
            return torch.cat([chosen, rejected, *([kl] if self.calculate_KL else [])])

        self.compare_first_batch(policy, torch.cat(sums), torch.cat(tokens))
        return super().get_batch_loss_metrics(model, {**batch, **given})
