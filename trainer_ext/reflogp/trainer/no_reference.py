"""Keep TRL from loading, copying or hashing a reference model in a trainer's constructor, and from using one afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

from reflogp.store import UsageError


class NoReferenceModel:
    """Takes the place of TRL's reference model, and refuses to be used as one.

    Its presence tells TRL's `evaluate` that the reference does not depend on the trained policy. Any attempt to run, move or
    read it raises an error.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("this run has no reference model: its log-probs are joined from a store")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"this run has no reference model, so no {name!r} of it")

    def __bool__(self) -> bool:
        return False


def refuse_reference_model(trainer: str, ref_model: Any) -> None:
    """Raise UsageError if a reference model is given to a trainer that takes stored values."""
    if ref_model is not None:
        raise UsageError(f"{trainer} takes reference=, not ref_model=: no reference model is ever loaded")


@contextmanager
def no_reference_model(trainer_class: type, policy_is_path: bool) -> Iterator[None]:
    """Within the block, prevent the TRL modules of `trainer_class` from making a reference model and from hashing the policy.

    TRL >= 1.15 hashes the policy's weights to name its cache file (`hash_module`), and loads a reference under FSDP even when
    it precomputes. TRL <= 1.1 always makes a reference (`create_model_from_path`, earlier `create_reference_model`). These
    names are replaced in the modules of the class and of its parents, if they exist there.

    Args:
        trainer_class: a trainer.
        policy_is_path: True if the policy is given as a path, so that the first model that is created is the policy.
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
