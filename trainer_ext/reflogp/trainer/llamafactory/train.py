"""Run LLaMA-Factory's DPO or KTO training with the same settings but without a reference model.

    llamafactory-cli train dpo.yaml                                                     becomes
    python -m reflogp.trainer.llamafactory.train --reflogp.store ./logps train dpo.yaml

This module runs LLaMA-Factory's own launcher, which starts torchrun in the same cases as with `llamafactory-cli`. It replaces
the functions of LLaMA-Factory that create the reference model and the trainers. UsageError is raised if the settings select
another training stage, Ray or Megatron.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import llamafactory.launcher
import llamafactory.train.dpo.trainer
import llamafactory.train.dpo.workflow
import llamafactory.train.kto.workflow
import llamafactory.train.tuner
from llamafactory.extras.misc import get_device_count, is_env_enabled, use_kt, use_modelscope, use_openmind, use_ray

from reflogp.store import UsageError, resolve_model
from reflogp.trainer.batches.in_trainer import StoredReference
from reflogp.trainer.batches.options import (
    give_to_processes,
    names_reference,
    read_options,
    stored_reference,
    unclear_reference,
    warn_if_untested,
)
from reflogp.trainer.llamafactory.trainers import StoredDPOTrainer, StoredKTOTrainer

_MODULE = "reflogp.trainer.llamafactory.train"
_TESTED = "0.9.5"
#: Names of LLaMA-Factory's training stages that do not use reference log-probs of the dataset's completions.
_OTHER_STAGES = ("pt", "sft", "rm", "ppo")


class Replacements:
    """Replacements for the functions of LLaMA-Factory that create reference models and trainers.

    Args:
        options: the command-line options that begin with --reflogp.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._stored: StoredReference | None = None

    def create_ref_model(self, model_args: Any, finetuning_args: Any, **kwargs: Any) -> None:
        """Record which model LLaMA-Factory would load as the reference, so that this model's stored values can be
        looked up. No model is created."""
        self._stored = stored_reference(self._options, self._reference(model_args, finetuning_args))

    def _reference(self, model_args: Any, finetuning_args: Any) -> str | None:
        """Return the path or hub id of the model that LLaMA-Factory would load as the reference.

        Return None if an option of reflogp already names the reference.
        """
        if names_reference(self._options):
            return None
        own = finetuning_args.ref_model is None
        for owner, name, matters in (
            (finetuning_args, "ref_model_adapters", True),
            (finetuning_args, "ref_model_quantization_bit", True),
            (model_args, "rope_scaling", True),
            (model_args, "adapter_name_or_path", own),
            (model_args, "quantization_bit", own),
        ):
            if getattr(owner, name, None) and matters:
                raise unclear_reference(name, "model_name_or_path")
        model = str(finetuning_args.ref_model or model_args.model_name_or_path)
        if not Path(model).is_dir() and (use_modelscope() or use_openmind()):
            raise UsageError(
                f"{model} comes from a hub other than Hugging Face's: pass the downloaded model's folder as --reflogp.model"
            )
        revision = getattr(model_args, "model_revision", None)
        return model if revision in (None, "main") else str(resolve_model(model, revision))

    def trainer(self, trainer_class: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that creates a trainer of the given class. The trainer uses stored reference log-probs."""

        def make(*args: Any, **kwargs: Any) -> Any:
            if self._stored is None and kwargs.get("ref_model") is not None:
                raise UsageError(
                    "in a run that only evaluates and does not set ref_model, LLaMA-Factory uses the policy as the "
                    "reference, so no stored values are needed: start this run with llamafactory-cli"
                )
            if self._stored is None:
                loss = getattr(kwargs.get("finetuning_args"), "pref_loss", None)
                raise UsageError(
                    f"pref_loss {loss} uses no reference model: start this run with llamafactory-cli"
                    if loss in ("orpo", "simpo")
                    else "this version of LLaMA-Factory creates its reference model in a way that reflogp does not support: "
                    f"install version {_TESTED}"
                )
            return trainer_class(*args, stored=self._stored, **kwargs)

        return make


def main() -> None:
    """Read reflogp's options from the command line, and run LLaMA-Factory's launcher with the other arguments."""
    options, others, parser = read_options(_MODULE, sys.argv[1:], model="ref_model if set, otherwise model_name_or_path")
    if {"-h", "--help"} & set(others):
        parser.print_help()
        print("\nOther arguments are those of llamafactory-cli: train FILE.yaml [NAME=VALUE …]")
        return
    warn_if_untested("llamafactory", _TESTED)
    if is_env_enabled("USE_V1"):
        raise UsageError("USE_V1 selects LLaMA-Factory's v1 engine, which reflogp does not support: unset USE_V1")
    is_process = "RANK" in os.environ and others[:1] != ["train"]  # torchrun starts the processes without the word `train`
    if not is_process and others[:1] != ["train"]:
        parser.error("add `train FILE.yaml` after the options, as for llamafactory-cli")
    sys.argv[1:] = others
    give_to_processes(options)
    with ExitStack() as patches:
        if is_process:
            _replace(Replacements(options), patches)
            llamafactory.train.tuner.run_exp()
            return
        if not _starts_torchrun():
            _replace(Replacements(options), patches)
        # The launcher passes its __file__ to torchrun. With this module's file instead, torchrun's processes run this module.
        patches.enter_context(mock.patch.object(llamafactory.launcher, "__file__", __file__))
        llamafactory.launcher.launch()


def _starts_torchrun() -> bool:
    """Return True if LLaMA-Factory's launcher will start training in separate processes. This function checks the same
    conditions as the launcher."""
    forced = is_env_enabled("FORCE_TORCHRUN") or is_env_enabled("USE_MCA")
    return bool(forced or (get_device_count() > 1 and not use_ray() and not use_kt()))


def _replace(replacements: Replacements, patches: ExitStack) -> None:
    train = llamafactory.train
    replaced: list[tuple[Any, str, Any]] = [
        (train.dpo.workflow, "create_ref_model", replacements.create_ref_model),
        (train.kto.workflow, "create_ref_model", replacements.create_ref_model),
        (train.dpo.trainer, "CustomDPOTrainer", replacements.trainer(StoredDPOTrainer)),
        (train.kto.workflow, "CustomKTOTrainer", replacements.trainer(StoredKTOTrainer)),
        (
            train.tuner,
            "_ray_training_function",
            _refusing("use_ray is not supported: Ray would start training processes without reflogp's changes; unset USE_RAY"),
        ),
        (train.tuner, "is_mcore_adapter_available", _refusing("use_mca (Megatron) is not supported: unset USE_MCA")),
    ]
    for stage in _OTHER_STAGES:
        words = (
            f"stage {stage} does not use reference log-probs of the dataset's completions: start this run with llamafactory-cli"
        )
        replaced.append((train.tuner, f"run_{stage}", _refusing(words)))
    for owner, name, replacement in replaced:
        patches.enter_context(mock.patch.object(owner, name, replacement))


def _refusing(words: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(words)

    return refuse


if __name__ == "__main__":
    main()
