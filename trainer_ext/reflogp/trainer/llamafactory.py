"""Run LLaMA-Factory's DPO or KTO training with the same settings but without a reference model.

    llamafactory-cli train dpo.yaml                                              becomes
    python -m reflogp.trainer.llamafactory --reflogp.store ./logps train dpo.yaml

LLaMA-Factory's own launcher runs, which starts torchrun in the same cases as `llamafactory-cli`. Replaced are the function that
creates the reference model, and the trainers, whose `compute_reference_log_probs` LLaMA-Factory calls for every batch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import llamafactory.launcher
import llamafactory.train.dpo.workflow
import llamafactory.train.kto.workflow
import llamafactory.train.tuner
import torch
from llamafactory.extras.misc import is_env_enabled, use_modelscope, use_openmind
from llamafactory.train.dpo.trainer import CustomDPOTrainer
from llamafactory.train.kto.trainer import CustomKTOTrainer

from reflogp.store import UsageError, resolve_model
from reflogp.trainer.batch import BatchReferenceMixin, Row, labelled_rows, refuse_media
from reflogp.trainer.options import Options, give_to_processes, read_options, warn_if_untested

#: Losses for which LLaMA-Factory divides the policy's and the reference's log-probs by the number of tokens.
_MEANS = ("ipo",)


class _Stored(BatchReferenceMixin):
    """The code that the DPO and KTO trainers share. `reference` is the model that LLaMA-Factory would load."""

    _sequence_columns: tuple[tuple[str, str], ...]

    def __init__(self, *args: Any, options: Options, reference: str, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "ref_model": None})
        self.use_stored_reference(options, reference, self._rows_of)

    def _rows_of(self, dataset: Any) -> Iterator[Row]:
        refuse_media(dataset, ("images", "videos", "audios"))
        return labelled_rows(dataset, self._sequence_columns)


class StoredDPOTrainer(_Stored, CustomDPOTrainer):
    """LLaMA-Factory's DPO trainer, with reference log-probs from a store or a service."""

    _sequence_columns = (("chosen_input_ids", "chosen_labels"), ("rejected_input_ids", "rejected_labels"))

    def compute_reference_log_probs(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        """Return the sum of each row's stored log-probs, as two float32 tensors of shape (pairs,): one for the chosen rows, one
        for the rejected rows. For the IPO loss, return means over tokens instead of sums."""
        sums, tokens = self.ref_model.sums(batch["input_ids"], batch["attention_mask"], batch["labels"])
        scale = tokens.clamp(min=1) if self.loss_type in _MEANS else torch.ones_like(tokens)
        own = super().compute_reference_log_probs
        self.compare_first_batch(model, lambda: torch.cat(own(model, batch)) * scale, sums, tokens)
        return (sums / scale).chunk(2)


class StoredKTOTrainer(_Stored, CustomKTOTrainer):
    """LLaMA-Factory's KTO trainer, with reference log-probs from a store or a service."""

    _sequence_columns = (("input_ids", "labels"), ("kl_input_ids", "kl_labels"))

    def compute_reference_log_probs(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        """Return the sum of each row's stored log-probs, as three float32 tensors: one each for the desirable rows, the
        undesirable rows and the KL rows."""
        (sums, tokens), (kl_sums, kl_tokens) = (
            self.ref_model.sums(*(batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "labels")))
            for prefix in ("", "kl_")
        )
        tags = batch["kto_tags"]
        parts, own = (sums[tags], sums[~tags], kl_sums), super().compute_reference_log_probs
        counts = torch.cat([tokens[tags], tokens[~tags], kl_tokens])
        self.compare_first_batch(model, lambda: torch.cat(own(model, batch)), torch.cat(parts), counts)
        return parts


def _reference_of(model_args: Any, finetuning_args: Any, options: Options) -> str:
    """Return the model that LLaMA-Factory would load as the reference."""
    if finetuning_args.ref_model_adapters and not options.model:
        raise UsageError("with ref_model_adapters, the reference is not ref_model alone: name it with --reflogp.model")
    model = str(finetuning_args.ref_model or model_args.model_name_or_path)
    revision = getattr(model_args, "model_revision", None)
    if not Path(model).is_dir() and not options.model:
        if use_modelscope() or use_openmind():
            raise UsageError(f"{model} comes from another hub: pass the downloaded folder as --reflogp.model")
        if revision not in (None, "main"):
            return str(resolve_model(model, revision))
    return model


@contextmanager
def _stored_values(options: Options) -> Iterator[None]:
    """Within the block, LLaMA-Factory creates no reference model, and trainers that read stored values."""
    reference: str | None = None

    def create_ref_model(model_args: Any, finetuning_args: Any, **kwargs: Any) -> None:
        nonlocal reference
        reference = _reference_of(model_args, finetuning_args, options)

    def creates(trainer_class: Callable[..., Any]) -> Callable[..., Any]:
        def create(*args: Any, **kwargs: Any) -> Any:
            return refuse() if reference is None else trainer_class(*args, options=options, reference=reference, **kwargs)

        return create

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError("this run uses no stored values, because it needs none: start it with llamafactory-cli")

    train = llamafactory.train
    with ExitStack() as patches:
        for owner, name, replacement in (
            (train.dpo.workflow, "create_ref_model", create_ref_model),
            (train.kto.workflow, "create_ref_model", create_ref_model),
            (train.dpo.trainer, "CustomDPOTrainer", creates(StoredDPOTrainer)),
            (train.kto.workflow, "CustomKTOTrainer", creates(StoredKTOTrainer)),
            # The launcher passes its __file__ to torchrun, whose processes then run this module.
            (llamafactory.launcher, "__file__", __file__),
            *((train.tuner, f"run_{stage}", refuse) for stage in ("pt", "sft", "rm", "ppo")),
        ):
            patches.enter_context(mock.patch.object(owner, name, replacement))
        yield


def main() -> None:
    """Read reflogp's options from the command line, and run LLaMA-Factory's launcher with the other arguments."""
    command = "python -m reflogp.trainer.llamafactory"
    others = "Other arguments are those of llamafactory-cli: train FILE.yaml [NAME=VALUE …]"
    options, sys.argv[1:] = read_options(command, sys.argv[1:], others)
    warn_if_untested("llamafactory", "0.9.5")
    for setting in ("USE_V1", "USE_RAY", "USE_MCA"):
        if is_env_enabled(setting):
            raise UsageError(f"{setting} starts training without reflogp's changes: unset it")
    is_process = "RANK" in os.environ and sys.argv[1:2] != ["train"]  # torchrun starts the processes without the word `train`
    if not is_process and sys.argv[1:2] != ["train"]:
        raise UsageError("add `train FILE.yaml` after the options, as for llamafactory-cli")
    give_to_processes(options)
    with _stored_values(options):
        if is_process:
            llamafactory.train.tuner.run_exp()
        else:
            llamafactory.launcher.launch()


if __name__ == "__main__":
    main()
