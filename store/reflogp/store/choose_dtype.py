"""Choose the dtype of a model from what a store holds of it: the rule of `dtype="auto"`."""

from __future__ import annotations

from collections.abc import Sequence

from reflogp.store.digests import Progress
from reflogp.store.errors import ReferenceNotFoundError, UsageError
from reflogp.store.reference import AUTO, Reference, describe_all_numerics, describe_reference
from reflogp.store.store import Store


def choose_reference(
    store: Store,
    model: str,
    dtype: str = AUTO,
    *,
    otherwise: str | None = None,
    lm_head_dtype: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> tuple[Reference, str]:
    """Return the reference of a model in a store, and how its dtype was chosen.

    Args:
        store: where the model's values are.
        model: as in describe_reference.
        dtype: a dtype of describe_reference; "auto" for the dtype in which the store holds the model.
        otherwise: dtype where the store holds nothing of the model; None to raise then.
        lm_head_dtype: "float32" for logits in float32. With "auto" and None, the store decides about it too.
        revision, progress: as in describe_reference.

    Returns:
        (reference, reason). The reason is a sentence without its full stop; empty if the dtype was given.

    Raises:
        StoreNotFoundError, ReferenceNotFoundError: the store holds nothing of the model.
        UsageError: the store holds the model in several dtypes; or what describe_reference raises.
    """
    if dtype != AUTO:
        return describe_reference(model, dtype, lm_head_dtype=lm_head_dtype, revision=revision, progress=progress), ""
    described = describe_all_numerics(model, lm_head_dtype=lm_head_dtype, revision=revision, progress=progress)
    held = store.held(described)
    if len(held) == 1:
        return held[0], f"dtype {numerics(held[0])}: what {store.uri} holds of this model was scored in it"
    if held:
        raise several_held(store.uri, model, held)
    if otherwise is None:
        there = ", ".join(f"{known.reference_id} ({known.name}, {known.dtype})" for known in store.references()) or "nothing"
        raise ReferenceNotFoundError(f"{described[0].name} was never scored into {store.uri}, which holds {there}")
    found = in_dtype(described, otherwise, lm_head_dtype)
    return found, f"dtype {numerics(found)}: {store.uri} holds nothing of this model yet"


def in_dtype(described: Sequence[Reference], dtype: str, lm_head_dtype: str | None) -> Reference:
    """Return the reference in a dtype, from those of `describe_all_numerics` with the same `lm_head_dtype`."""
    return next(found for found in described if found.dtype == dtype and (lm_head_dtype or found.lm_head_dtype == dtype))


def several_held(place: str, model: str, held: Sequence[Reference]) -> UsageError:
    """Return the error that a place holds a model in several dtypes."""
    heads = any(reference.lm_head_dtype != reference.dtype for reference in held)
    return UsageError(
        f"{place} holds {model} in {' and in '.join(numerics(reference) for reference in held)}: say which one to use "
        "(--dtype, or dtype=)" + ("; for logits in float32 also --lm-head-dtype float32, or lm_head_dtype=" if heads else "")
    )


def numerics(reference: Reference) -> str:
    """Return in words what a reference computes in."""
    return reference.dtype + (
        f" with logits in {reference.lm_head_dtype}" if reference.lm_head_dtype != reference.dtype else ""
    )
