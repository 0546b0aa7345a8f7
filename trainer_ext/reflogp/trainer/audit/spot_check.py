"""Score some random rows again, and compare the results with the stored values.

The rows are scored by a service that serves the reference model, by the policy with its adapter off, or by the policy before
training. The `step_zero` check covers only the first batch; the spot check covers rows from the whole dataset.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reflogp.store.joins import PAIR_COLUMNS, completion_columns
from reflogp.store.windows import windows
from reflogp.trainer.audit.step_zero import differences
from reflogp.trainer.layouts import layout_of, reference_columns
from reflogp.trainer.own_model import no_own_reference, reference_logps
from reflogp.trainer.values import ServiceValues


@dataclass(frozen=True)
class SpotCheck:
    """The result of a spot check.

    Attributes:
        by: what scored the rows ("service" or "policy"), or the reason why the rows could not be scored again.
        rows: indices of the checked rows in the training dataset.
        seen: results of `step_zero.differences`, which compares the new sums of log-probs with the joined sums. If the policy
            scored the rows, there is one result for each batch. If a service scored the rows, the main process has one result
            for each completion column, and the other processes have none.
    """

    by: str
    rows: list[int]
    seen: list[list[float]]


def spot_check(trainer: Any, model: Any, rows: int, seed: int) -> SpotCheck:
    """Score some rows of the training dataset again; all processes choose the same rows.

    Args:
        trainer: a trainer whose training dataset has joined reference columns.
        model: the model that is passed to `training_step`.
        rows: maximum number of rows.
        seed: seed for choosing the rows.
    """
    dataset = trainer.train_dataset
    if not hasattr(dataset, "__len__") or not len(dataset):
        return SpotCheck("not checked: rows cannot be chosen at random from a stream or an empty dataset", [], [])
    chosen = sorted(random.Random(seed).sample(range(len(dataset)), min(rows, len(dataset))))
    source = getattr(trainer, "reference", None)
    if source is not None and source.is_service:
        seen = _by_service(trainer, source.open(), chosen) if trainer.accelerator.is_main_process else []
        return SpotCheck("service", chosen, seen)
    if not reference_columns(_kept(trainer, dataset[chosen[0]])):
        return SpotCheck("not checked: the training batches contain no reference columns", [], [])
    if why := no_own_reference(trainer):
        return SpotCheck(f"not checked: {why}, and the reference log-probs do not come from a service", [], [])
    return SpotCheck("policy", chosen, _by_policy(trainer, model, chosen))


def _by_policy(trainer: Any, model: Any, rows: list[int]) -> list[list[float]]:
    size = max(1, trainer.args.per_device_train_batch_size)
    parts = []
    for start in range(0, len(rows), size):
        batch = trainer.data_collator([_kept(trainer, trainer.train_dataset[row]) for row in rows[start : start + size]])
        batch = trainer._prepare_inputs(batch)
        parts.append(differences(*sums_of_batch(trainer, model, batch)))
    return parts


def sums_of_batch(trainer: Any, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three tensors of shape (n,) for the n completions in a collated batch: the sums of the policy's log-probs
    (computed with any adapter turned off), the joined sums, and the numbers of completion tokens."""
    found = reference_logps(trainer, model, batch)
    names = {name: name if name in batch else name.replace("ref_", "reference_") for name in found}
    policy = torch.cat(list(found.values()))
    joined = torch.cat([batch[names[name]] for name in found])
    return policy, joined.to(policy.device), torch.cat([_tokens(batch, name) for name in found])


def _tokens(batch: dict[str, Any], name: str) -> torch.Tensor:
    """Return the number of completion tokens for each sum in the reference column `name`. The batch may come from any
    supported TRL version."""
    masks = {
        "ref_chosen_logps": ("chosen_attention_mask",),
        "ref_rejected_logps": ("rejected_attention_mask",),
        "ref_logps": ("completion_mask", "completion_labels"),
        "ref_KL_logps": ("KL_completion_mask", "KL_completion_labels"),
    }
    for mask in masks[name]:
        if mask in batch:
            values: torch.Tensor = batch[mask]
            return (values != -100 if mask.endswith("labels") else values)[:, 1 if "completion" in mask else 0 :].sum(1)
    pairs: torch.Tensor = batch["completion_mask"]
    return dict(zip(PAIR_COLUMNS.values(), pairs[:, 1:].sum(1).chunk(2), strict=True))[name]


def _by_service(trainer: Any, values: Any, rows: list[int]) -> list[list[float]]:
    assert isinstance(values, ServiceValues)
    dataset = trainer.train_dataset.select(rows)
    layout = layout_of(dataset.column_names, trainer)
    table = layout.canonical(dataset.select_columns(layout.columns).with_format("arrow")[:])
    settings = trainer.joins["train"].settings
    max_length = None if layout.cut else settings.max_length
    fresh: dict[str, list[Any]] = {}
    needed: dict[str, Any] = {}
    names = {column: layout.name(reference) for column, reference in completion_columns(table.column_names).items()}
    for column in names:
        view = windows(table["prompt_ids"], table[column], max_length, settings.truncation_mode)
        scores = values.client.score(values.where.reference_id, view.prompt_ids, view.completion_ids, cache_read=False)
        fresh[column], needed[column] = scores.token_logps, view.needed
    shared = np.minimum.reduce(list(needed.values()))
    alpha = 1.0 if settings.ld_alpha is None else settings.ld_alpha
    parts = []
    for column, name in names.items():
        sums = [
            logps[:front].sum(dtype=np.float64) + alpha * logps[front:need].sum(dtype=np.float64)
            for logps, front, need in zip(fresh[column], shared, needed[column], strict=True)
        ]
        joined = torch.tensor(dataset[name][:], dtype=torch.float64)
        parts.append(differences(torch.tensor(sums), joined, torch.tensor(needed[column])))
    return parts


def _kept(trainer: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the columns that TRL removes before it passes rows to its collator."""
    trainer._set_signature_columns_if_needed()
    kept = set(trainer._signature_columns or row)
    return {name: value for name, value in row.items() if name in kept} if trainer.args.remove_unused_columns else row
