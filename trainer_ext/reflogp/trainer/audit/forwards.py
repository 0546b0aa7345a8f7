"""Count the forward passes in training steps, for the policy and for any other language model.

Each model has only one hook, not one per module, so that the hooks do not slow down training or change compiled graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


class ForwardCount:
    """Counts of the forward passes between the last calls to `begin` and `end`.

    Args:
        policy: the model being trained.
        others: models that are allowed to run besides the policy.

    Attributes:
        policy: number of forward passes of the policy's decoder.
        policy_without_grad: number of the policy's passes that ran without gradients, as the passes of a reference model do.
        others: dict from a model's name (its class and number of parameters) to its number of forward passes. The dict contains
            the language models that ran although they are neither the policy nor one of the allowed models.
    """

    def __init__(self, policy: torch.nn.Module, others: Iterable[torch.nn.Module] = ()) -> None:
        self.policy = self.policy_without_grad = 0
        self.others: dict[str, int] = {}
        self._own = {id(module) for model in (policy, *others) for module in model.modules()}
        self._watched: set[int] = set()
        decoder = getattr(policy, "get_decoder", lambda: None)()
        self._handles = [(decoder if isinstance(decoder, torch.nn.Module) else policy).register_forward_pre_hook(self._ran)]
        self._on = False

    def watch_others(self) -> list[str]:
        """Start counting the forward passes of every language model in this process that is neither the policy nor an allowed
        model. Return a name for each of these models: its class and number of parameters."""
        found = []
        for model in [entry for entry in gc.get_objects() if _is_language_model(entry)]:
            if id(model) in self._own:
                continue
            parameters = sum(parameter.numel() for parameter in model.parameters())
            name = f"{type(model).__name__} with {parameters:,} parameters"
            found.append(name)
            if id(model) not in self._watched:
                self._watched.add(id(model))
                self._handles.append(model.register_forward_pre_hook(self._note(name)))
        return found

    def begin(self) -> None:
        self.policy = self.policy_without_grad = 0
        self.others, self._on = {}, True

    def end(self) -> None:
        self._on = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count forward passes within the block."""
        was_on, self._on = self._on, False
        try:
            yield
        finally:
            self._on = was_on

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _ran(self, module: torch.nn.Module, args: Any) -> None:
        self.policy += self._on
        self.policy_without_grad += self._on and not torch.is_grad_enabled()

    def _note(self, name: str) -> Any:
        def ran(module: torch.nn.Module, args: Any) -> None:
            if self._on:
                self.others[name] = self.others.get(name, 0) + 1

        return ran


def _is_language_model(entry: Any) -> bool:
    """Return True if an object counts as a language model: a transformers model with at least one parameter.

    This function uses issubclass instead of isinstance. isinstance reads `__class__`, and a proxy or lazy object may then load
    the module that it stands for.
    """
    return issubclass(type(entry), PreTrainedModel) and any(True for _ in entry.parameters())
