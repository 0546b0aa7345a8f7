"""Keeps TRL from loading or hashing a reference model while a trainer is built, and proves that none is used after.

Knows which names of a TRL trainer's module do that. Called by the cached trainers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn


class NoReferenceModel:
    """Stands where TRL keeps its reference model, and refuses to be one.

    Its presence tells TRL's `evaluate` that the reference does not depend on the trained policy; any attempt to run, move or
    read it raises.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("this run has no reference model: its log-probs are joined from a store")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"this run has no reference model, so no {name!r} of it")

    def __bool__(self) -> bool:
        return False


@contextmanager
def no_reference_model(trainer_module: ModuleType, policy_is_path: bool) -> Iterator[None]:
    """While the block runs, `trainer_module` neither loads a reference model nor hashes the policy.

    TRL >= 1.15 hashes the policy's weights to name its cache file (`hash_module`), and loads a reference under FSDP even when
    it precomputes; TRL <= 1.1 always loads one (`create_model_from_path`). Both names are looked up in the trainer's module,
    and left alone where it has them not.

    Args:
        trainer_module: e.g. trl.trainer.dpo_trainer.
        policy_is_path: the policy is a path, so the first model that is created is the policy.
    """
    create = getattr(trainer_module, "create_model_from_path", None)
    digest = getattr(trainer_module, "hash_module", None)
    policies_left = 1 if policy_is_path else 0

    def create_policy_only(*args: Any, **kwargs: Any) -> Any:
        nonlocal policies_left
        if policies_left:
            policies_left -= 1
            assert create is not None
            return create(*args, **kwargs)
        return None

    try:
        if create is not None:
            trainer_module.create_model_from_path = create_policy_only  # type: ignore[attr-defined]
        if digest is not None:
            trainer_module.hash_module = lambda module: "reflogp"  # type: ignore[attr-defined]
        yield
    finally:
        if create is not None:
            trainer_module.create_model_from_path = create  # type: ignore[attr-defined]
        if digest is not None:
            trainer_module.hash_module = digest  # type: ignore[attr-defined]
