"""Run ms-swift's training pipeline without the reference model, in a process that ms-swift's command started.

Only the functions that load the reference model and choose the trainer are replaced.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from swift.cli.utils import try_use_single_device_mode

try_use_single_device_mode()  # called before torch detects the GPUs, as in `swift.cli.rlhf`

from swift.pipelines import rlhf_main  # noqa: E402
from swift.pipelines.train.rlhf import SwiftRLHF  # noqa: E402
from swift.trainers import TrainerFactory  # noqa: E402
from swift.utils import safe_snapshot_download  # noqa: E402

from reflogp.store import UsageError  # noqa: E402
from reflogp.trainer.batches.options import names_reference, read_options, stored_reference, unclear_reference  # noqa: E402
from reflogp.trainer.swift.trainers import StoredDPOTrainer, StoredKTOTrainer  # noqa: E402

_TRAINERS: dict[str, Callable[..., Any]] = {"dpo": StoredDPOTrainer, "kto": StoredKTOTrainer}
#: Dict from each restricted ms-swift setting to the maximum value that reflogp supports. 0 means that the setting must be off.
_NOT_SUPPORTED = {"packing": 0, "padding_free": 0, "sequence_parallel_size": 1, "reference_free": 0, "use_ray": 0}
#: ms-swift settings that can change the reference, so that it differs from the model in the folder that ms-swift loads (see
#: `unclear_reference`).
_OTHER_MODEL = ("ref_adapters", "adapters", "quant_bits", "quant_method", "rope_scaling")


class Replacements:
    """Replacements for the functions of ms-swift that load the reference model and choose the trainer.

    Args:
        options: the command-line options that begin with --reflogp.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def prepare_single_model(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `prepare`, the ms-swift function that loads a model, in a function that returns None instead of loading the
        reference model."""

        def prepared(pipeline: Any, key: str, *args: Any, **kwargs: Any) -> Any:
            if key == "ref":
                _require_supported(pipeline.args)
                return None
            return prepare(pipeline, key, *args, **kwargs)

        return prepared

    def trainer(self, args: Any) -> Callable[..., Any]:
        """Return a function that creates the DPO or KTO trainer that ms-swift's arguments select. The trainer uses stored
        reference log-probs."""
        _require_supported(args)
        return functools.partial(_TRAINERS[args.rlhf_type], stored=stored_reference(self._options, self._reference(args)))

    def _reference(self, args: Any) -> str | None:
        """Return the folder of the model that ms-swift would load as the reference. Return None if an option of reflogp
        already names the reference."""
        if names_reference(self._options):
            return None
        for name in _OTHER_MODEL:
            if getattr(args, name, None):
                raise unclear_reference(name, "--model")
        same_revision = args.ref_model_revision in (None, getattr(args, "model_revision", None))
        if args.ref_model in (None, args.model) and same_revision:
            return str(args.model_dir)
        return str(
            safe_snapshot_download(
                model_id_or_path=args.ref_model or args.model,
                revision=args.ref_model_revision,
                download_model=True,
                use_hf=args.use_hf,
                hub_token=args.hub_token,
            )
        )


def _require_supported(args: Any) -> None:
    """Raise UsageError if ms-swift's arguments select a feature that cannot be used with stored values."""
    kind = getattr(args, "rlhf_type", None)
    if kind not in _TRAINERS:
        raise UsageError(
            f"rlhf_type {kind} does not use reference log-probs of the dataset's completions: use ms-swift's own command "
            "`swift rlhf`"
        )
    for name, most in _NOT_SUPPORTED.items():
        value = getattr(args, name, None)
        if value and value > most:
            raise UsageError(f"{name}={value} is not supported with stored reference log-probs: set it to {most or 'false'}")


def main() -> None:
    """Run ms-swift's pipeline with the options of the command that started this process."""
    options, others, _ = read_options("reflogp.trainer.swift.process", sys.argv[1:], model="--ref_model, or else --model")
    sys.argv[1:] = others
    replacements = Replacements(options)
    with (
        mock.patch.object(
            SwiftRLHF, "_prepare_single_model", replacements.prepare_single_model(SwiftRLHF._prepare_single_model)
        ),
        mock.patch.object(TrainerFactory, "get_trainer_cls", replacements.trainer),
    ):
        rlhf_main()


if __name__ == "__main__":
    main()
