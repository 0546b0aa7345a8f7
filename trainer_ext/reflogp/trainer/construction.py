"""Keep a trainer's constructor from making a reference model, and from changing its arguments if the constructor fails.

TRL must not load, copy or hash a reference model, and must not use a reference model during training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch

from reflogp.store import UsageError
from reflogp.trainer.trl_versions import trl_modules
from reflogp.trainer.values import Where


class NoReferenceModel:
    """An object in place of TRL's reference model, which cannot be used as a model.

    The object tells TRL's `evaluate` that the reference does not depend on the trained policy. Any attempt to run, move or read
    the object raises an error.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("this run has no reference model: its log-probs are joined from a store")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"this run has no reference model, so the attribute {name!r} does not exist")

    def __bool__(self) -> bool:
        return False


class ReferenceDuringTraining(NoReferenceModel):
    """An object in place of a reference model, which gives the reference's values during training instead of columns of the
    dataset.

    Attributes:
        where: where the values come from.
        of_generated_text: whether the values are of text that the policy generates; if so, the policy runs more than once in a
            step.
    """

    where: Where
    of_generated_text = False

    def as_dict(self) -> dict[str, Any] | None:
        """Return the content of the audit's report under `remote`."""
        return None


def refuse_reference_model(trainer: str, ref_model: Any) -> None:
    """Raise UsageError if a reference model is given to a trainer that takes stored values."""
    if ref_model is not None:
        raise UsageError(f"{trainer} takes reference=, not ref_model=: no reference model is ever loaded")


@contextmanager
def no_reference_model(trainer_class: type, policy_is_path: bool) -> Iterator[None]:
    """Prevent the modules of `trl_modules` from making a reference model and from hashing the policy, within the block.

    TRL >= 1.15 hashes the policy's weights to name its cache file (`hash_module`), and loads a reference model under FSDP even
    if it precomputes log-probs. TRL <= 1.1 always makes a reference model (`create_model_from_path`, earlier
    `create_reference_model`). These functions are replaced in each module of the class and of its parents that has such a
    function.

    Args:
        trainer_class: a trainer.
        policy_is_path: whether the policy is given as a path, so that the first model that is created is the policy.
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
        for module in trl_modules(trainer_class):
            for name, make in (
                ("create_model_from_path", policy_only),
                ("create_reference_model", lambda _: lambda *args, **kwargs: None),
                ("hash_module", lambda _: lambda module: "reflogp"),
            ):
                if hasattr(module, name):
                    patches.enter_context(mock.patch.object(module, name, make(getattr(module, name))))
        yield


@contextmanager
def unchanged_by_failure(*given: Any) -> Iterator[None]:
    """Record the given objects, and restore them if the block raises an exception.

    TRL's constructors add a "ref" adapter to a PeftModel, put LoRA layers into a plain model, replace its forward, switch
    dropout off, freeze parameters, and set padding tokens. Without a restoration, a second trainer made with the same objects
    would start with the changes of the first trainer.

    Args:
        given: models and tokenizers; other objects are ignored. Devices are not restored.
    """
    kept = [_Attributes(owner) for owner in _owners(given)]
    gradients = [
        (parameter, parameter.requires_grad)
        for model in given
        if isinstance(model, torch.nn.Module)
        for parameter in model.parameters()
    ]
    try:
        yield
    except BaseException:
        for attributes in kept:
            attributes.put_back()
        for parameter, wanted in gradients:
            parameter.requires_grad_(wanted)
        raise


class _Attributes:
    """The attributes of one object, and the entries of those attributes that are lists, dictionaries or sets."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._values = dict(vars(owner))
        self._entries = [(value, value.copy()) for value in self._values.values() if isinstance(value, dict | list | set)]

    def put_back(self) -> None:
        attributes = vars(self._owner)
        attributes.clear()
        attributes.update(self._values)
        for container, entries in self._entries:  # changed in place: other objects may hold the same container
            container.clear()
            if isinstance(container, list):
                container.extend(entries)
            else:
                container.update(entries)


def _owners(given: tuple[Any, ...]) -> Iterator[Any]:
    for thing in given:
        if isinstance(thing, torch.nn.Module):
            for module in thing.modules():
                yield module
                for name in ("config", "generation_config"):
                    config = vars(module).get(name)
                    if config is None or not hasattr(config, "__dict__"):
                        continue
                    yield config
                    text = config.get_text_config() if hasattr(config, "get_text_config") else config
                    if text is not config:
                        yield text
        elif hasattr(thing, "pad_token") or hasattr(thing, "tokenizer"):
            yield thing
            if hasattr(getattr(thing, "tokenizer", None), "__dict__"):
                yield thing.tokenizer
