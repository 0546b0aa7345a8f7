"""Run `openrlhf.cli.train_dpo` with stored reference log-probs instead of a reference model.

    deepspeed --module openrlhf.cli.train_dpo ARGUMENTS…                                             becomes
    deepspeed --module reflogp.trainer.openrlhf.train_dpo --reflogp.store ./logps ARGUMENTS…

OpenRLHF's module runs unchanged, as `__main__`, with its own parser. Only two classes that the module imports are replaced:
Actor, which creates the models, and DPOTrainer. reflogp's module runs once in each process, and can be started by any launcher.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from typing import Any
from unittest import mock

import openrlhf.models
import openrlhf.trainer.dpo_trainer
import openrlhf.utils.deepspeed  # import it before Actor is replaced: its isinstance(model, Actor) needs the real class

from reflogp.store import UsageError
from reflogp.trainer.batches.options import read_options, source_of, warn_if_untested
from reflogp.trainer.construction import NoReferenceModel
from reflogp.trainer.openrlhf.trainer import CachedReferenceDPOTrainer
from reflogp.trainer.source import ReferenceSource

_MODULE = "openrlhf.cli.train_dpo"
#: Dict from each value of --ds.param_dtype to reflogp's name of this dtype.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class ReferenceSlot(NoReferenceModel):
    """A placeholder that OpenRLHF holds in place of a reference model until the trainer is created.

    `model` is None, because there is no model for OpenRLHF to prepare.
    """

    model = None


class Launch:
    """Replacements for Actor and DPOTrainer in `openrlhf.cli.train_dpo`.

    Args:
        options: the command-line options that begin with --reflogp.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._actor = openrlhf.models.Actor
        self._policy_is_made = False
        self._source: ReferenceSource | None = None

    def actor(self, model: str, *args: Any, **kwargs: Any) -> Any:
        """Create the policy on the first call. On the second call, return a placeholder instead of a model.

        OpenRLHF makes the second call to create the reference model. The path and dtype in this call are the defaults of
        --reflogp.model and --reflogp.dtype.
        """
        if not self._policy_is_made:
            self._policy_is_made = True
            return self._actor(model, *args, **kwargs)
        self._source = source_of(self._options, model, _DTYPES[kwargs["param_dtype"]])
        return ReferenceSlot()

    def trainer(self, *args: Any, **kwargs: Any) -> CachedReferenceDPOTrainer:
        if self._source is None:
            raise UsageError(
                f"{_MODULE} of the installed OpenRLHF creates models in a way that reflogp does not support: install "
                "version 0.11"
            )
        return CachedReferenceDPOTrainer(
            *args,
            reference=self._source,
            run_command=self._options.on_miss == "run",
            policy_starts_at_reference=not self._options.policy_starts_elsewhere,
            step_zero_tolerance=self._options.step_zero_tolerance,
            on_finding=self._options.on_finding,
            **kwargs,
        )


def main() -> None:
    """Read reflogp's options from the command line, and run OpenRLHF's module with the other arguments."""
    options, others, parser = read_options(
        "reflogp.trainer.openrlhf.train_dpo",
        sys.argv[1:],
        model="--ref.model_name_or_path if set, otherwise the policy's model",
        dtype="--ds.param_dtype",
    )
    if {"-h", "--help"} & set(others):
        parser.print_help()
        print(f"\nOther arguments are those of {_MODULE}:\n")
    warn_if_untested("openrlhf", "0.11")
    launch = Launch(options)
    sys.argv[1:] = others
    with (
        mock.patch.object(openrlhf.models, "Actor", launch.actor),
        mock.patch.object(openrlhf.trainer.dpo_trainer, "DPOTrainer", launch.trainer),
    ):
        runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
