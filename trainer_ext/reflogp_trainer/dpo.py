"""CachedDPOTrainer: TRL's DPOTrainer on reference log-probs from a store.

Overrides one hook of TRL's, `_precompute_ref_logps`: it is handed the dataset after TRL's own tokenisation and filtering, and
answers with the two columns that the loss reads and that TRL keeps through column pruning. Everything else is TRL's.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from trl import DPOConfig, DPOTrainer

from reflogp_store import UsageError
from reflogp_trainer.join import JoinRecord, join_with_record
from reflogp_trainer.no_reference import NoReferenceModel, no_reference_model
from reflogp_trainer.source import ReferenceSource
from reflogp_trainer.step_zero import StepZero, default_tolerance, differences, judge

#: Written into the run's output folder.
PROVENANCE_FILE = "reflogp.json"


class CachedDPOTrainer(DPOTrainer):
    """DPO without a reference model: its log-probs come from a store.

    Takes what `trl.DPOTrainer` takes, and

    Args:
        reference: where the reference log-probs are.
        policy_starts_at_reference: True (default) when the policy begins as the reference model: the first batch is then
            checked against the joined values before the first step. Pass False when the policy starts elsewhere, say from a
            later checkpoint.
        step_zero_tolerance: allowed |policy - reference| of a completion's sum, in nats per root token; None picks one for the
            dtypes in use (step_zero.default_tolerance).

    Raises:
        MissingLogpsError, UnusableLogpsError: as `join_reference_logps`, before anything trains.
        StepZeroError: at the first step, when policy and reference differ by more than the tolerance.
        UsageError: arguments that contradict a stored reference.

    Attributes:
        joins: dataset name ("train", "eval", …) -> what was joined from where. Also in `output_dir/reflogp.json`.
        step_zero: what the gate saw; None until the first step, or where it is off.
    """

    _tag_names: ClassVar[list[str]] = [*DPOTrainer._tag_names, "reflogp"]

    def __init__(
        self,
        model: Any,
        args: DPOConfig | None = None,
        *,
        reference: ReferenceSource,
        policy_starts_at_reference: bool = True,
        step_zero_tolerance: float | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("ref_model") is not None:
            raise UsageError("CachedDPOTrainer takes reference=, not ref_model=: no reference model is ever loaded")
        if args is None:
            raise UsageError("CachedDPOTrainer needs args=DPOConfig(...)")
        args = copy.copy(args)
        args.precompute_ref_log_probs = True  # TRL then reads the columns, and keeps no model to compute them
        if getattr(args, "sync_ref_model", False):
            raise UsageError("sync_ref_model moves the reference while training: stored log-probs would be stale")
        self.reference = reference
        self.joins: dict[str, JoinRecord] = {}
        self.step_zero: StepZero | None = None
        self._policy_starts_at_reference = policy_starts_at_reference
        self._step_zero_tolerance = step_zero_tolerance
        with no_reference_model(sys.modules[DPOTrainer.__module__], policy_is_path=isinstance(model, str)):
            super().__init__(model, args=args, **kwargs)
        self.ref_model = NoReferenceModel()

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """TRL's hook: the tokenised, filtered dataset in, the same with reference columns out."""
        if isinstance(dataset, IterableDataset):
            raise UsageError("CachedDPOTrainer joins map-style datasets; an IterableDataset cannot be checked for misses")
        source = self.reference
        pinned = [source.table.snapshot_number() if source.snapshot_number is None else source.snapshot_number]
        broadcast_object_list(pinned, from_process=0)  # every process reads one snapshot, whatever is committed meanwhile
        joined, record = join_with_record(
            dataset,
            self.reference,
            self.reference.table.snapshot(pinned[0]),
            self.args.max_length,
            self.args.truncation_mode,
            self.args.ld_alpha,
            missing_rows_to=Path(self.args.output_dir) if self.accelerator.is_main_process else None,
        )
        self.joins[name] = record
        self._write_provenance()
        return joined

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._policy_starts_at_reference and self.step_zero is None and self.state.global_step == 0:
            self.step_zero = self._check_step_zero(model, inputs)
            self._write_provenance()
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    def _check_step_zero(self, model: Any, inputs: dict[str, Any]) -> StepZero:
        """Compare this batch's policy log-probs, in evaluation mode, with the joined ones, on all processes."""
        batch = self._prepare_inputs(inputs)
        was_training = model.training
        model.eval()
        try:
            policy = torch.cat(self.compute_ref_log_probs(model, batch))  # TRL's own sums, of the policy itself
        finally:
            model.train(was_training)
        reference = torch.cat([batch["ref_chosen_logps"], batch["ref_rejected_logps"]])
        tokens = batch["completion_mask"][:, 1:].sum(1)
        seen = self.accelerator.gather(differences(policy, reference, tokens)[None])
        autocast = bool(self.args.bf16 or self.args.fp16 or self.args.tf32)
        tolerance = self._step_zero_tolerance
        if tolerance is None:
            tolerance = default_tolerance(self.reference.scored_dtype(), policy_dtype=self.model.dtype, autocast=autocast)
        return judge(seen.cpu(), tolerance)

    def _write_provenance(self) -> None:
        if not self.accelerator.is_main_process:
            return
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / PROVENANCE_FILE
        seen = self.step_zero.as_dict() if self.step_zero else None
        if seen is None and file.is_file():  # a resumed run keeps what its first start saw
            seen = json.loads(file.read_text(encoding="utf-8")).get("step_zero")
        content = {
            "joins": {name: record.as_dict() for name, record in self.joins.items()},
            "step_zero": seen,
        }
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
