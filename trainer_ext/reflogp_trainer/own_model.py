"""Reference log-probs by the trainer's own model, with TRL's own function for them.

Knows how TRL's trainers compute a batch's reference values, in each version's spelling. Called by the step-0 gate and spot
checks (is the policy the reference?) and for `on_miss="compute"`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from reflogp_trainer.errors import MissingLogpsError


def computes_references(trainer: Any) -> bool:
    """Whether a trainer has TRL's function for reference log-probs."""
    return hasattr(trainer, "compute_ref_log_probs") or hasattr(trainer, "compute_reference_log_probs")


def has_own_reference(trainer: Any) -> bool:
    """Whether the trainer's model still gives the reference's values: an adapter can be switched off, or no step was made."""
    if _is_peft(trainer):
        return True
    return trainer.state.global_step == 0 and bool(getattr(trainer, "policy_starts_at_reference", True))


def reference_logps(trainer: Any, model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What TRL would take for a batch's reference log-probs, from the policy itself (with adapters off, where it has them).

    Args:
        model: as `training_step` gets it.
        batch: collated, on the model's device.

    Returns:
        reference column -> sums in nats, (n,).
    """
    compute = getattr(trainer, "compute_ref_log_probs", None) or trainer.compute_reference_log_probs
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _no_stand_in(trainer):
            values = compute(model, batch) if "model" in inspect.signature(compute).parameters else compute(batch)
    finally:
        model.train(was_training)
    names = ("ref_logps", "ref_KL_logps") if hasattr(trainer, "calculate_KL") else ("ref_chosen_logps", "ref_rejected_logps")
    return {name: value.detach() for name, value in zip(names, values, strict=True) if value is not None}


def compute_missing(trainer: Any, rows: Dataset, missing: MissingLogpsError) -> dict[str, npt.NDArray[np.float32]]:
    """Reference log-probs of rows that have none, on all processes together; every process gets them all.

    Args:
        rows: tokenised rows as TRL prepared them.
        missing: raised where the model is not the reference any more, or is split over processes.
    """
    if not has_own_reference(trainer):
        raise MissingLogpsError(
            f"on_miss='compute': this trainer's model is not the reference any more. {missing}", missing.rows, missing.command
        )
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False):
        raise MissingLogpsError(
            f"on_miss='compute' needs the whole model on each process, and FSDP and DeepSpeed split it. {missing}",
            missing.rows,
            missing.command,
        )
    loader = trainer.accelerator.prepare(
        DataLoader(rows, batch_size=trainer.args.per_device_eval_batch_size, collate_fn=trainer.data_collator)
    )
    found: dict[str, list[torch.Tensor]] = {}
    for batch in tqdm(loader, desc="Reference log-probs by this trainer's model", disable=trainer.args.disable_tqdm):
        for name, values in reference_logps(trainer, trainer.model, trainer._prepare_inputs(batch)).items():
            found.setdefault(name, []).append(trainer.accelerator.gather_for_metrics(values).cpu())
    return {name: torch.cat(parts).float().numpy() for name, parts in found.items()}


def _is_peft(trainer: Any) -> bool:
    return hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config")


@contextmanager
def _no_stand_in(trainer: Any) -> Iterator[None]:
    """Put the policy where a cached trainer has a stand-in. TRL takes None for a policy with its adapter off, and from 0.29 to
    1.1 for nothing else."""
    stand_in = getattr(trainer, "ref_model", None)
    trainer.ref_model = None if _is_peft(trainer) else trainer.model
    try:
        yield
    finally:
        trainer.ref_model = stand_in
