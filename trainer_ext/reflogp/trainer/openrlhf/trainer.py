"""Train with OpenRLHF's DPOTrainer, using stored reference log-probs, and audit the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from openrlhf.trainer.dpo_trainer import DPOTrainer

from reflogp.trainer.audit.metrics import begin_report
from reflogp.trainer.audit.step_zero import differences
from reflogp.trainer.construction import NoReferenceModel, refuse_reference_model
from reflogp.trainer.openrlhf.audit import Cadence, RunAudit
from reflogp.trainer.openrlhf.reference import CachedReference
from reflogp.trainer.policy_weights import fingerprint
from reflogp.trainer.ranks import Rank, gather, on_all_ranks
from reflogp.trainer.source import ReferenceSource


class CachedReferenceDPOTrainer(DPOTrainer):
    """OpenRLHF's DPOTrainer, with reference log-probs from a store or a service.

    The constructor takes the arguments of DPOTrainer, with ref_model=None, and these:

    Args:
        reference: where the reference log-probs are stored.
        run_command: whether to score sequences that the store lacks, by running `reflogp score` on this machine in a separate
            process.
        policy_starts_at_reference: whether the policy starts from the reference's weights. If True, the policy's log-probs of
            the first batch are compared with the stored values before the first step.
        step_zero_tolerance: maximum |policy - reference| for the sum of a completion's log-probs, in nats/√tokens. If None, the
            tolerance depends on the dtypes of policy and reference, and on the type of model (see reflogp.trainer.tolerances).
            In that case, the run is also stopped if the two dtypes differ.
        on_finding: "fail" stops the run if the stored values are wrong or an unexpected forward pass runs; "warn" only logs a
            warning.

    Raises:
        MissingLogpsError, UnusableLogpsError: see `CachedReference`; raised before training begins.
        AuditError, StepZeroError: raised during training, on all processes; see `RunAudit`.
        RankFailedError: another process raised one of these errors.
        UsageError: an argument is incompatible with stored reference log-probs.

    Attributes:
        joins: dict from the name of each dataset ("train", "eval") to a record of how its values were looked up. The records
            are also in reflogp_audit.json in --ckpt.output_dir.
        audit: the run's RunAudit.
    """

    def __init__(
        self,
        model: Any,
        ref_model: Any,
        strategy: Any,
        tokenizer: Any,
        optim: Any,
        train_dataloader: Any,
        eval_dataloader: Any,
        scheduler: Any,
        *args: Any,
        reference: ReferenceSource,
        run_command: bool = False,
        policy_starts_at_reference: bool = True,
        step_zero_tolerance: float | None = None,
        on_finding: Literal["fail", "warn"] = "fail",
        **kwargs: Any,
    ) -> None:
        if not isinstance(ref_model, NoReferenceModel):  # the launcher passes a ReferenceSlot, which is a subclass
            refuse_reference_model("CachedReferenceDPOTrainer", ref_model)
        loaders = {"train": train_dataloader, "eval": eval_dataloader}
        datasets = {name: loader.dataset for name, loader in loaders.items() if loader is not None}
        output_dir = Path(strategy.args.ckpt.output_dir)
        begin_report(str(output_dir), Rank.here().rank)
        # Look up the values before the trainer starts wandb or TensorBoard, so that a run without values does not appear there.
        cached = CachedReference(reference, datasets, output_dir, run_command)
        super().__init__(
            model, cached, strategy, tokenizer, optim, train_dataloader, eval_dataloader, scheduler, *args, **kwargs
        )
        self.policy_starts_at_reference = policy_starts_at_reference
        self.joins = cached.joins
        self.audit = RunAudit(output_dir, cached.joins, on_finding, step_zero_tolerance)
        self._compares_first_batch = False
        self._weights = fingerprint(self._policy, with_adapters=True)
        self.loss_fn.register_forward_hook(self._saw_loss)

    def fit(self, args: Any, consumed_samples: int = 0, num_update_steps_per_epoch: int | None = None) -> None:
        """Train as DPOTrainer does, and audit the run."""
        first_step = consumed_samples // args.train.batch_size
        if first_step:
            self.audit.skip_step_zero("the run was resumed")
        elif not self.policy_starts_at_reference:
            self.audit.skip_step_zero("the policy does not start from the reference's weights")
        elif not all(gather(fingerprint(self._policy, with_adapters=True) == self._weights)):
            self.audit.skip_step_zero("the policy's weights have changed since the trainer was created")
        else:
            self._compares_first_batch = True
        cadence = Cadence(
            args,
            accumulation=self.strategy.accumulated_gradient,
            writes_logs=self._wandb is not None or self._tensorboard is not None,
            evaluates=self.eval_dataloader is not None and len(self.eval_dataloader) > 0,
            saves=self.save_hf_ckpt or not self.disable_ds_ckpt,
        )
        self.audit.begin(cadence, self.model.model, self._policy, first_step)
        super().fit(args, consumed_samples, num_update_steps_per_epoch)
        self.audit.end()

    def concatenated_forward(self, model: Any, *batch: Any) -> Any:
        """Call DPOTrainer's method, and check how many forward passes it runs. Before the first call, compare the policy's
        log-probs of the batch with the stored values, unless the `step_zero` check is skipped."""
        if self._compares_first_batch:
            self._compares_first_batch = False
            seen = on_all_ranks("comparing the first batch with the stored values", lambda: self._differences(*batch))
            self.audit.saw_first_batch(seen, self._policy)
        is_policy = model is self.model
        with self.audit.passes(int(is_policy), "policy" if is_policy else "reference"):
            return super().concatenated_forward(model, *batch)

    def save_logs_and_checkpoints(
        self, args: Any, global_step: int, step_bar: Any, logs_dict: Any = None, client_states: Any = None
    ) -> None:
        """Log, evaluate and save as DPOTrainer does, but log `loss_mean` and `acc_mean` as means over all processes. Then run
        the audit's checks at the end of the step.

        DPOTrainer computes these two metrics only from the batches of the first process.
        """
        if logs_dict and global_step % args.logger.logging_steps == 0:
            logs_dict = self.audit.over_all_processes(logs_dict)
        with self.audit.events(self, global_step):
            super().save_logs_and_checkpoints(args, global_step, step_bar, logs_dict, client_states)
        self.audit.step_ended(global_step)

    @property
    def _policy(self) -> torch.nn.Module:
        policy: torch.nn.Module = self.strategy._unwrap_model(self.model)
        return policy

    def _saw_loss(self, module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        if self.model.training:  # not in evaluate(), which turns training mode off
            self.audit.saw_loss(*output)

    @torch.no_grad()
    def _differences(self, chosen_ids: Any, c_mask: Any, reject_ids: Any, r_mask: Any, prompt_id_lens: Any) -> list[float]:
        """Return the `differences` between the policy's and the reference's sums of log-probs for one batch. The policy runs
        without dropout."""
        batch = (chosen_ids, c_mask, reject_ids, r_mask, prompt_id_lens)
        self.model.eval()
        policy, reference = (
            torch.cat(super(CachedReferenceDPOTrainer, self).concatenated_forward(model, *batch)[:2])
            for model in (self.model, self.ref_model)
        )
        self.model.train()
        tokens = torch.cat([c_mask.sum(1), r_mask.sum(1)]).cpu() - torch.tensor(prompt_id_lens * 2).clamp(min=1)
        return differences(policy, reference, tokens)
