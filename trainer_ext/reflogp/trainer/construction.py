"""Undo what a trainer's constructor changes in its model and tokenizer, if the constructor fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def unchanged_by_failure(*given: Any) -> Iterator[None]:
    """Record the given objects, and restore them if the block raises an exception.

    TRL's constructors add a "ref" adapter to a PeftModel, put LoRA layers into a plain model, replace its forward, switch
    dropout off, freeze parameters, and set padding tokens. A second trainer made with the same objects would get all these
    changes.

    Args:
        given: models and tokenizers; anything else is ignored. Devices are not restored.
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
        for container, entries in self._entries:  # in place: other objects may hold the same container
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
