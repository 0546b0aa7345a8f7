"""Prevent a trainer's constructor from creating a reference model. If the constructor fails, undo its changes to its arguments.

With stored values, TRL must not load, copy or use a reference model, and does not need to hash the policy's weights.
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
    """A placeholder for TRL's reference model. The placeholder cannot be used as a model.

    If a trainer's ref_model is None, TRL's `evaluate` rejects new datasets after the first step, because TRL would compute the
    reference log-probs with the trained policy. With the placeholder, `evaluate` accepts new datasets. Any attempt to call the
    placeholder, move it to a device or read its attributes raises an error.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("this run has no reference model, because it uses stored reference log-probs")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"this run has no reference model, so the attribute {name!r} does not exist")

    def __bool__(self) -> bool:
        return False


class ReferenceDuringTraining(NoReferenceModel):
    """An object that replaces a reference model and supplies the model's log-probs during training, so that datasets need no
    columns with reference log-probs.

    Attributes:
        where: the source, reference and snapshot of the values.
        of_generated_text: whether the values are for text that the policy generates. If True, the audit does not limit the
            number of the policy's forward passes, because generation needs forward passes too.
    """

    where: Where
    of_generated_text = False

    def as_dict(self) -> dict[str, Any] | None:
        """Return the content of the `remote` field in the audit's report, or None if no values are requested from a service
        during training."""
        return None


def refuse_reference_model(trainer: str, ref_model: Any) -> None:
    """Raise UsageError if a reference model is passed to a trainer that uses stored values."""
    if ref_model is not None:
        raise UsageError(
            f"{trainer} needs no reference model, because the reference log-probs come from `reference`: remove ref_model"
        )


@contextmanager
def no_reference_model(trainer_class: type, policy_is_path: bool) -> Iterator[None]:
    """Within the block, prevent TRL from creating a reference model and from hashing the policy's weights.

    TRL 1.15 and newer hash the policy's weights (`hash_module`) to name a cache file for precomputed log-probs. Under FSDP,
    these versions also load a reference model, even if log-probs are precomputed. TRL 1.1 and older always create a reference
    model, with `create_model_from_path` or `create_reference_model`. Within the block, these three functions are replaced in
    all modules that `trl_modules` returns.

    Args:
        trainer_class: class of the trainer that is constructed within the block.
        policy_is_path: whether the policy is given as a path or hub id. If True, TRL may create one model within the block: the
            policy.
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
    """Record the attributes of the given objects, and restore them if the block raises an exception.

    TRL's constructors add a "ref" adapter to a PeftModel, insert LoRA layers into a plain model, replace a model's `forward`,
    disable dropout, freeze parameters, and set padding tokens. If these changes were not undone, a second attempt to create a
    trainer with the same objects would start with modified objects.

    Args:
        given: models, tokenizers and processors; other objects are ignored. Values of weights are not recorded, and models are
            not moved back to their original devices.
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
    """A copy of one object's attributes, including the entries of attributes that are lists, dictionaries or sets."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._values = dict(vars(owner))
        self._entries = [(value, value.copy()) for value in self._values.values() if isinstance(value, dict | list | set)]

    def put_back(self) -> None:
        attributes = vars(self._owner)
        attributes.clear()
        attributes.update(self._values)
        for container, entries in self._entries:  # in place, because other objects may share the container
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
