"""Reference log-probs by the trainer's own model, with TRL's own function for them.

Knows how TRL's trainers compute a batch's reference values, in each version's spelling. Called by the step-0 gate and spot
checks (is the policy the reference?) and for `on_miss="compute"`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from safetensors import safe_open
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from reflogp.store import read_checkpoint, resolve_model
from reflogp.trainer.policy_weights import is_unchanged
from reflogp.trainer.ranks import on_all_ranks
from reflogp.trainer.tolerances import coarser, computes_in, is_moe, tolerance

#: First rows of each weight that are compared: training moves some of nearly every one.
_WEIGHT_ROWS = 64
#: Rows with stored values that a model has to give before its values of others are taken.
_PROBES = 8


def computes_references(trainer: Any) -> bool:
    """Whether a trainer has TRL's function for reference log-probs."""
    return hasattr(trainer, "compute_ref_log_probs") or hasattr(trainer, "compute_reference_log_probs")


def no_own_reference(trainer: Any) -> str:
    """Why the trainer's model does not give the reference's values; empty where it does.

    It does with its adapter switched off, or where it starts at the reference, as long as the weights behind that are those
    that the trainer was made with. Every process has to ask together.
    """
    if not is_peft_model(trainer.model) and not getattr(trainer, "policy_starts_at_reference", True):
        return "the policy does not start at the reference (policy_starts_at_reference=False)"
    return "" if is_unchanged(trainer) else "the policy's weights have changed since the trainer was made"


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


def fill_in(
    trainer: Any,
    dataset: Dataset,
    missing: npt.NDArray[np.int64],
    columns: dict[str, npt.NDArray[np.float32]],
    tokens: Sequence[npt.NDArray[np.int64]],
    dtype: str,
) -> str:
    """Compute reference log-probs of rows that have none, on all processes together, and write them into `columns`.

    Some rows that have values are computed too: where the model does not give those, it is not the reference. Where no row has
    values, its weights are compared with the reference's files.

    Args:
        dataset: tokenised rows as TRL prepared them.
        columns: column -> float32 (n,), as the trainer's loss reads them.
        tokens: log-probs in each sum, int64 (n,), for each column.
        dtype: what the reference was scored in.

    Returns:
        why the trainer's model cannot compute them, and then nothing was written; else an empty text.
    """
    if why := no_own_reference(trainer):
        return why
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False):
        return "it needs the whole model on each process, and FSDP and DeepSpeed split it"
    known = np.setdiff1d(np.arange(len(dataset)), missing)[:_PROBES]
    if not len(known) and (why := on_all_ranks("reading the reference's weights", lambda: _is_not_the_checkpoint(trainer))):
        return why
    computed = _computed(trainer, dataset.select(np.concatenate([missing, known])))
    names = {column: column if column in columns else column.replace("ref_", "reference_") for column in computed}
    policy = trainer.accelerator.unwrap_model(trainer.model)
    used = coarser(dtype, computes_in(policy, trainer.accelerator))
    allowed = getattr(trainer, "step_zero_tolerance", None) or tolerance(used, is_moe(getattr(policy, "config", None)))
    for (column, values), counts in zip(computed.items(), tokens, strict=True):
        apart = np.abs(values[len(missing) :] - columns[names[column]][known])
        if not (apart <= allowed * np.sqrt(np.maximum(counts[known], 1))).all():
            return (
                f"this trainer's model is not the reference: its log-probs of rows {', '.join(map(str, known))}, which have "
                f"stored values, differ from those by up to {apart.max():.4g} nats"
            )
    for column, values in computed.items():
        columns[names[column]][missing] = values[: len(missing)]
    return ""


def _is_not_the_checkpoint(trainer: Any) -> str:
    """Why a trainer's model is not known to have the weights of its reference's files; empty where it has them."""
    unknown = "no row has stored values to compare this trainer's model with"
    if trainer.reference.model is None:
        return f"{unknown}, and ReferenceSource has no model="
    folder = resolve_model(trainer.reference.model)
    checkpoint = read_checkpoint(folder)
    if checkpoint.adapter is not None:
        return f"{unknown}, and {folder} is an adapter"
    policy = trainer.accelerator.unwrap_model(trainer.model)
    own = {_name_in_files(name): parameter for name, parameter in policy.named_parameters() if parameter.ndim}
    compared = 0
    for file in checkpoint.weight_files:
        with safe_open(file, framework="pt") as tensors:
            for name in set(tensors.keys()) & own.keys():
                stored, held = tensors.get_slice(name)[:_WEIGHT_ROWS], own[name].detach()[:_WEIGHT_ROWS].cpu()
                if stored.shape != held.shape or not torch.equal(stored.to(held.dtype), held):
                    return f"this trainer's model is not the reference: its {name} is not that of {folder}"
                compared += 1
    return "" if compared else f"{unknown}, and its weights have other names than those in {folder}"


def _name_in_files(name: str) -> str:
    """A parameter's name without what PEFT puts around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")


def _computed(trainer: Any, rows: Dataset) -> dict[str, npt.NDArray[np.float32]]:
    """Reference log-probs of rows by the trainer's model; every process gets them all."""
    loader = trainer.accelerator.prepare(
        DataLoader(rows, batch_size=trainer.args.per_device_eval_batch_size, collate_fn=trainer.data_collator)
    )
    found: dict[str, list[torch.Tensor]] = {}
    for batch in tqdm(loader, desc="Reference log-probs by this trainer's model", disable=trainer.args.disable_tqdm):
        for name, values in reference_logps(trainer, trainer.model, trainer._prepare_inputs(batch)).items():
            found.setdefault(name, []).append(trainer.accelerator.gather_for_metrics(values).cpu())
    return {name: torch.cat(parts).float().numpy() for name, parts in found.items()}


@contextmanager
def _no_stand_in(trainer: Any) -> Iterator[None]:
    """Put the policy where a cached trainer has a stand-in. TRL takes None for a policy with its adapter off, and from 0.29 to
    1.1 for nothing else."""
    stand_in = getattr(trainer, "ref_model", None)
    trainer.ref_model = None if is_peft_model(trainer.model) else trainer.model
    try:
        yield
    finally:
        trainer.ref_model = stand_in
