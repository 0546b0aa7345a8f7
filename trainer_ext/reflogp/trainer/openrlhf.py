"""Run OpenRLHF's DPO training with stored reference log-probs instead of a reference model.

    deepspeed --module openrlhf.cli.train_dpo ARGUMENTS…                                       becomes
    deepspeed --module reflogp.trainer.openrlhf --reflogp.store ./logps ARGUMENTS…

OpenRLHF's module runs unchanged, as `__main__`, with its own parser. Only two classes that the module imports are replaced:
Actor, which creates the models, and DPOTrainer. Any launcher can start this module.
"""

from __future__ import annotations

import functools
import itertools
import runpy
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import openrlhf.models
import openrlhf.trainer.dpo_trainer
import openrlhf.utils.deepspeed  # import it before Actor is replaced: its isinstance(model, Actor) needs the real class
import torch
from openrlhf.trainer.dpo_trainer import DPOTrainer

from reflogp.trainer.batch import IGNORED, BatchReference, Row
from reflogp.trainer.gate import STARTS_ELSEWHERE, StepZero, compare, write_record
from reflogp.trainer.options import Options, read_options, warn_if_untested
from reflogp.trainer.ranks import on_all_ranks

_MODULE = "openrlhf.cli.train_dpo"
#: Dict from each value of --ds.param_dtype to reflogp's name of this dtype.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class StoredReferenceSlot:
    """Takes the place of a reference model until the trainer is created. `model` is None: nothing is left to prepare."""

    model = None

    def __init__(self, path: str) -> None:
        self.path = path

    def __bool__(self) -> bool:
        return False  # so that OpenRLHF's strategy.prepare returns it as it is

    def eval(self) -> StoredReferenceSlot:
        return self


class CachedReferenceDPOTrainer(DPOTrainer):
    """OpenRLHF's DPOTrainer, with reference log-probs from a store or a service, as reflogp's options say."""

    def __init__(
        self,
        model: Any,
        ref_model: StoredReferenceSlot,
        strategy: Any,
        tokenizer: Any,
        optim: Any,
        train_dataloader: Any,
        eval_dataloader: Any,
        *args: Any,
        options: Options,
        **kwargs: Any,
    ) -> None:
        loaders = {"train": train_dataloader, "eval": eval_dataloader}
        datasets = {name: loader.dataset for name, loader in loaders.items() if loader is not None}
        self._folder = strategy.args.ckpt.output_dir
        self._dtype = _DTYPES[strategy.args.ds.param_dtype]
        # Looked up before wandb or TensorBoard start, so that a run without values does not appear there.
        asked = options.reference(), datasets, reward_rows, self._folder, ref_model.path, self._dtype
        self._stored = on_all_ranks("looking up the datasets", lambda: BatchReference(*asked))
        self._skipped = STARTS_ELSEWHERE if options.policy_starts_elsewhere else ""
        self._has_begun = False
        loaders_given = (train_dataloader, eval_dataloader)
        super().__init__(model, ref_model, strategy, tokenizer, optim, *loaders_given, *args, **kwargs)

    def fit(self, args: Any, consumed_samples: int = 0, num_update_steps_per_epoch: int | None = None) -> None:
        if consumed_samples:
            self._skipped = f"not compared: the run was resumed after {consumed_samples} samples"
        super().fit(args, consumed_samples, num_update_steps_per_epoch)

    def concatenated_forward(self, model: Any, *batch: Any) -> Any:
        """Return stored sums instead of running the reference model. Before the first step, compare them with the policy's."""
        if model is not self.ref_model:
            if not self._has_begun:
                self._compare_first_batch(batch)
                self._has_begun = True
            return super().concatenated_forward(model, *batch)
        return (*self._reference(batch)[0].chunk(2), [], torch.zeros(()))

    def _reference(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask, prompt_lengths = self.concatenated_inputs(*batch)
        prompts = torch.as_tensor(prompt_lengths, device=ids.device)[:, None]
        return self._stored.sums(ids, mask, ids.masked_fill((mask.cumsum(1) <= prompts) | (mask == 0), IGNORED))

    @torch.no_grad()
    def _compare_first_batch(self, batch: Any) -> None:
        step_zero: StepZero | None = None
        if not self._skipped:
            self.model.eval()
            policy = torch.cat(super().concatenated_forward(self.model, *batch)[:2])
            self.model.train()
            dtypes = next(iter(self._stored.joins.values())).where.reference_dtype, self._dtype
            config = self.strategy._unwrap_model(self.model).config
            step_zero = compare(policy, *self._reference(batch), *dtypes, config)
        write_record(self._folder, self._stored.joins, step_zero or self._skipped)
        if step_zero is not None:
            step_zero.require()


def reward_rows(dataset: Any) -> Iterator[Row]:
    """Return the rows of OpenRLHF's RewardDataset, as its data loader reads them: the tokens of the chosen and of the rejected
    sequence, each truncated and ending with EOS, and the number of prompt tokens, which OpenRLHF counts by tokenizing the
    prompt alone."""
    for number in range(len(dataset)):
        chosen, chosen_mask, rejected, rejected_mask, prompt_length = dataset[number]
        sides = (ids[mask.bool()] for ids, mask in ((chosen, chosen_mask), (rejected, rejected_mask)))
        yield [(ids.numpy(), ids.masked_fill(torch.arange(len(ids)) < prompt_length, IGNORED).numpy()) for ids in sides]


def main() -> None:
    """Read reflogp's options from the command line, and run OpenRLHF's module with the other arguments."""
    command = "python -m reflogp.trainer.openrlhf"
    options, sys.argv[1:] = read_options(command, sys.argv[1:], f"All other arguments are those of {_MODULE}.")
    warn_if_untested("openrlhf", "0.11")
    create, policies = openrlhf.models.Actor, itertools.count()

    def actor(model: str, *args: Any, **kwargs: Any) -> Any:
        """Create the policy on the first call. The second call would create the reference model: remember only its path."""
        return StoredReferenceSlot(model) if next(policies) else create(model, *args, **kwargs)

    trainer = functools.partial(CachedReferenceDPOTrainer, options=options)
    with (
        mock.patch.object(openrlhf.models, "Actor", actor),
        mock.patch.object(openrlhf.trainer.dpo_trainer, "DPOTrainer", trainer),
    ):
        runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
