"""Keeps TRL from loading, copying or hashing a reference model while a trainer is built, and proves that none is used after.

Knows which names of a TRL trainer's module do that. Called by the cached and the remote trainers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

from reflogp.store import UsageError


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


def refuse_reference_model(trainer: str, ref_model: Any) -> None:
    """Raise UsageError where a trainer that takes values is given a model."""
    if ref_model is not None:
        raise UsageError(f"{trainer} takes reference=, not ref_model=: no reference model is ever loaded")


@contextmanager
def no_reference_model(trainer_class: type, policy_is_path: bool) -> Iterator[None]:
    """While the block runs, TRL's modules below `trainer_class` neither make a reference model nor hash the policy.

    TRL >= 1.15 hashes the policy's weights to name its cache file (`hash_module`), and loads a reference under FSDP even when
    it precomputes; TRL <= 1.1 always makes one (`create_model_from_path`, earlier `create_reference_model`). The names are
    looked up in the modules of the class and of its parents, and left alone where they are not there.

    Args:
        trainer_class: a trainer.
        policy_is_path: the policy is a path, so the first model that is created is the policy.
    """
    policies_left = 1 if policy_is_path else 0

    def policy_only(create: Callable[..., Any]) -> Callable[..., Any]:
        def create_policy_only(*args: Any, **kwargs: Any) -> Any:
            nonlocal policies_left
            if policies_left:
                policies_left -= 1
                return create(*args, **kwargs)
            return None

        return create_policy_only

    with ExitStack() as patches:
        for module in _trl_modules(trainer_class):
            for name, make in (
                ("create_model_from_path", policy_only),
                ("create_reference_model", lambda _: lambda *args, **kwargs: None),
                ("hash_module", lambda _: lambda module: "reflogp"),
            ):
                if hasattr(module, name):
                    patches.enter_context(mock.patch.object(module, name, make(getattr(module, name))))
        yield


def _trl_modules(trainer_class: type) -> list[ModuleType]:
    names = dict.fromkeys(parent.__module__ for parent in trainer_class.__mro__)
    return [sys.modules[name] for name in names if name.startswith("trl.")]
