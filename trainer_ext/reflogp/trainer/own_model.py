"""Compute reference log-probs with the trainer's model, by calling TRL's method for this purpose. The method's name and
parameters depend on the version of TRL."""

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

#: Only this number of rows, from the start of each weight tensor, are compared with the reference's weight files. Training
#: changes some of these rows in nearly every tensor.
_WEIGHT_ROWS = 64
#: A model's values for rows without stored values are accepted only if the model reproduces the stored values of this many
#: other rows, or of all other rows if there are fewer.
_PROBES = 8


def computes_references(trainer: Any) -> bool:
    """Return True if a trainer has TRL's method for computing reference log-probs."""
    return hasattr(trainer, "compute_ref_log_probs") or hasattr(trainer, "compute_reference_log_probs")


def no_own_reference(trainer: Any) -> str:
    """Return the reason why the trainer's model cannot compute reference log-probs, or an empty string if it can.

    The model can compute them if it has an adapter that can be turned off, or if the policy starts from the reference's
    weights. In both cases, the weights that the trainer's `PolicyWeights` hashes must not have changed since the trainer was
    created. By default, these do not include the weights of the trained adapters. All processes must call this function
    together.
    """
    if not is_peft_model(trainer.model) and not getattr(trainer, "policy_starts_at_reference", True):
        return "the policy does not start from the reference's weights (policy_starts_at_reference=False)"
    return "" if is_unchanged(trainer) else "the policy's weights have changed since the trainer was created"


def reference_logps(trainer: Any, model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Compute a batch's reference log-probs with the policy, by calling TRL's method for this purpose.

    If the policy has an adapter, TRL turns it off, or uses the adapter named "ref" instead if there is one.

    Args:
        trainer: a trainer for which `computes_references` returns True.
        model: the model that is passed to `training_step`.
        batch: the collated batch, on the model's device.

    Returns:
        dict from the name of each reference column to the sum of each row's log-probs in nats, shape (n,).
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
    """Compute reference log-probs for the rows without values, on all processes together, and write them into `columns`.

    To check that the model is the reference, log-probs are also computed for some rows that have values, and are compared with
    these values. If no row has values, the model's weights are compared with the reference's weight files instead.

    Args:
        trainer: the trainer whose model computes the log-probs.
        dataset: the tokenized rows, as prepared by TRL.
        missing: indices of the rows without values, int64 of shape (m,).
        columns: dict from the name of each reference column to its values, float32 of shape (n,), in the form that the
            trainer's loss reads.
        tokens: for each column, an array with the number of tokens that each row's value covers, int64 of shape (n,).
        dtype: dtype in which the reference log-probs were computed.

    Returns:
        the reason why the trainer's model cannot compute the log-probs, or an empty string if the log-probs were written.
    """
    if why := no_own_reference(trainer):
        return why
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False):
        return "each process needs the whole model, but FSDP and DeepSpeed split the model"
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
                f"this trainer's model is not the reference: its log-probs of rows {', '.join(map(str, known))} differ from "
                f"the stored values by up to {apart.max():.4g} nats"
            )
    for column, values in computed.items():
        columns[names[column]][missing] = values[: len(missing)]
    return ""


def _is_not_the_checkpoint(trainer: Any) -> str:
    """Compare the weights of a trainer's model with the reference's weight files. Return the reason why they may differ, or an
    empty string if no difference was found. Only the first rows of each weight tensor are compared."""
    unknown = "no row has stored values with which to check that this trainer's model is the reference"
    if trainer.reference.model is None:
        return (
            f"{unknown}, and the model's weights can be compared with the reference's only if model= is passed to "
            "ReferenceSource"
        )
    folder = resolve_model(trainer.reference.model)
    checkpoint = read_checkpoint(folder)
    if checkpoint.adapter is not None:
        return f"{unknown}, and the model's weights cannot be compared with the reference's, because {folder} is an adapter"
    policy = trainer.accelerator.unwrap_model(trainer.model)
    own = {_name_in_files(name): parameter for name, parameter in policy.named_parameters() if parameter.ndim}
    compared = 0
    for file in checkpoint.weight_files:
        with safe_open(file, framework="pt") as tensors:
            for name in set(tensors.keys()) & own.keys():
                stored, held = tensors.get_slice(name)[:_WEIGHT_ROWS], own[name].detach()[:_WEIGHT_ROWS].cpu()
                if stored.shape != held.shape or not torch.equal(stored.to(held.dtype), held):
                    return f"this trainer's model is not the reference: its weight {name} differs from the one in {folder}"
                compared += 1
    return "" if compared else f"{unknown}, and none of the model's weights has the same name as a weight in {folder}"


def _name_in_files(name: str) -> str:
    """Return the name that a parameter has in the weight files, without PEFT's additions."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")


def _computed(trainer: Any, rows: Dataset) -> dict[str, npt.NDArray[np.float32]]:
    """Compute the reference log-probs of the given rows with the trainer's model; every process gets the values of all rows."""
    loader = trainer.accelerator.prepare(
        DataLoader(rows, batch_size=trainer.args.per_device_eval_batch_size, collate_fn=trainer.data_collator)
    )
    found: dict[str, list[torch.Tensor]] = {}
    for batch in tqdm(loader, desc="Reference log-probs from this trainer's model", disable=trainer.args.disable_tqdm):
        for name, values in reference_logps(trainer, trainer.model, trainer._prepare_inputs(batch)).items():
            found.setdefault(name, []).append(trainer.accelerator.gather_for_metrics(values).cpu())
    return {name: torch.cat(parts).float().numpy() for name, parts in found.items()}


@contextmanager
def _no_stand_in(trainer: Any) -> Iterator[None]:
    """Within the block, make TRL compute reference log-probs with the policy instead of the placeholder for a reference model.

    For a PEFT model, ref_model is set to None, so that TRL turns the adapter off or uses the adapter named "ref". For other
    models, ref_model is set to the policy, because TRL 0.29 to 1.1 does not accept None for these models.
    """
    stand_in = getattr(trainer, "ref_model", None)
    trainer.ref_model = None if is_peft_model(trainer.model) else trainer.model
    try:
        yield
    finally:
        trainer.ref_model = stand_in
