"""Run ms-swift's DPO or KTO training on stored reference log-probs, in a process that ms-swift's command started.

Only the functions that load the reference model and choose the trainer are replaced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from swift.cli.utils import try_use_single_device_mode

try_use_single_device_mode()  # called before torch detects the GPUs, as in `swift.cli.rlhf`

import torch  # noqa: E402
from swift.pipelines import rlhf_main  # noqa: E402
from swift.pipelines.train.rlhf import SwiftRLHF  # noqa: E402
from swift.rlhf_trainers import DPOTrainer, KTOTrainer  # noqa: E402
from swift.trainers import TrainerFactory  # noqa: E402
from swift.utils import safe_snapshot_download  # noqa: E402

from reflogp.store import UsageError  # noqa: E402
from reflogp.trainer.batch import BatchReferenceMixin, Row, refuse_media  # noqa: E402
from reflogp.trainer.options import Options, read_options  # noqa: E402

#: Dict from each restricted ms-swift setting to the maximum value that reflogp supports. 0 means that the setting must be off.
_NOT_SUPPORTED = {"packing": 0, "padding_free": 0, "sequence_parallel_size": 1, "reference_free": 0, "use_ray": 0}


def encoded_rows(dataset: Any) -> Iterator[Row]:
    """Return the rows of an ms-swift dataset, which encodes each row when the row is read.

    A row has one sequence in the columns that begin with `chosen_`, and another in the columns that begin with `rejected_`. For
    KTO, the `chosen_` sequence is the row's own prompt and completion, whatever the row's label. The `rejected_` sequence is
    the row's prompt with the completion of another row, and is used for the KL term.
    """
    refuse_media(getattr(dataset, "dataset", None), ("images", "videos", "audios"))  # of a LazyLLMDataset
    for number in range(len(dataset)):
        row = dataset[number]
        sides = [side for side in ("chosen", "rejected") if f"{side}_input_ids" in row]
        yield [(row[f"{side}_input_ids"], row[f"{side}_labels"]) for side in sides]


class _Stored(BatchReferenceMixin):
    """The code that the DPO and KTO trainers share. `folder` is that of the model that ms-swift would load as its reference."""

    def __init__(
        self, model: Any = None, ref_model: Any = None, *args: Any, options: Options, folder: str | None, **kwargs: Any
    ) -> None:
        super().__init__(model, None, *args, **kwargs)
        self.use_stored_reference(options, folder, encoded_rows)

    def _sums(self, batch: dict[str, Any], prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch[f"{prefix}input_ids"]
        mask = batch.get(f"{prefix}attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        sums: tuple[torch.Tensor, torch.Tensor] = self.ref_model.sums(ids, mask, batch[f"{prefix}labels"])
        return sums


class StoredDPOTrainer(_Stored, DPOTrainer):
    """ms-swift's DPO trainer, with reference log-probs from a store or a service."""

    def compute_ref_log_probs(self, batch: dict[str, Any]) -> Any:
        """Return the sums of the stored log-probs of a batch's completions, as two float32 tensors of shape (pairs,): one for
        the chosen completions, and one for the rejected completions."""
        (sums, tokens), own = self._sums(batch, ""), super().compute_ref_log_probs
        self.compare_first_batch(self.model, lambda: torch.cat(own(batch)), sums, tokens)
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
            chosen, rejected, _, _, kl = self.forward(model, batch)[:5]
            return torch.cat([chosen, rejected, *([kl] if self.calculate_KL else [])])

        self.compare_first_batch(model, policy, torch.cat(sums), torch.cat(tokens))
        return super().get_batch_loss_metrics(model, {**batch, **given})


def _reference_of(args: Any, options: Options) -> str | None:
    """Return the folder of the model that ms-swift would load as the reference, or None if reflogp's options name it."""
    if options.model:
        return None
    if args.ref_adapters:
        raise UsageError("with ref_adapters, the reference is not ref_model alone: name it with --reflogp.model")
    same_revision = args.ref_model_revision in (None, getattr(args, "model_revision", None))
    if args.ref_model in (None, args.model) and same_revision:
        return str(args.model_dir)
    name = args.ref_model or args.model
    hub = {"download_model": True, "use_hf": args.use_hf, "hub_token": args.hub_token}
    return str(safe_snapshot_download(model_id_or_path=name, revision=args.ref_model_revision, **hub))


def _trainer_of(args: Any) -> type:
    """Return the trainer class for ms-swift's arguments. Raises UsageError if they cannot be used with stored values."""
    trainer = {"dpo": StoredDPOTrainer, "kto": StoredKTOTrainer}.get(str(getattr(args, "rlhf_type", None)))
    if trainer is None:
        raise UsageError("stored reference log-probs are for --rlhf_type dpo and kto: use ms-swift's own command")
    for name, most in _NOT_SUPPORTED.items():
        value = getattr(args, name, None)
        if value and value > most:
            raise UsageError(f"{name}={value} is not supported with stored reference log-probs: set it to {most or 'false'}")
    return trainer


def main() -> None:
    """Run ms-swift's pipeline with the options of the command that started this process."""
    options, sys.argv[1:] = read_options("reflogp.trainer.swift_process", sys.argv[1:], "")
    prepare = SwiftRLHF._prepare_single_model

    def prepare_policy(pipeline: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        if key == "ref":
            _trainer_of(pipeline.args)
            return None
        return prepare(pipeline, key, *args, **kwargs)

    def trainer(args: Any) -> Callable[..., Any]:
        return functools.partial(_trainer_of(args), options=options, folder=_reference_of(args, options))

    with (
        mock.patch.object(SwiftRLHF, "_prepare_single_model", prepare_policy),
        mock.patch.object(TrainerFactory, "get_trainer_cls", trainer),
    ):
        rlhf_main()


if __name__ == "__main__":
    main()
