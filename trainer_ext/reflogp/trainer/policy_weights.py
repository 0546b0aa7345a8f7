"""Detect whether a policy's weights have changed since its trainer was created.

Step counts do not reveal all changes: `train()` resets them, a checkpoint may be loaded without its step count, and users may
modify the model themselves. Version counters of tensors are not reliable either, because writes through `.data` do not change
the counters. Therefore, this module hashes the content of the weights.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import TrainerCallback

from reflogp.trainer.ranks import Rank, gather

#: Number of elements that are hashed at once. The number for CPUs fits in a CPU's cache. The number for GPUs keeps a GPU busy
#: without using much memory.
_AT_ONCE_ON_CPU, _AT_ONCE = 1 << 16, 1 << 26
#: Odd multipliers with which `_mixed_sum` hashes elements (xxHash's primes, as signed 32-bit integers).
_FIRST, _SECOND = 0x9E3779B1 - (1 << 32), 0x85EBCA77 - (1 << 32)


@dataclass(frozen=True)
class Fingerprint:
    """Digests of the weights that one process holds.

    Attributes:
        layout: digest of the weights' shapes and dtypes. It changes when weights are cast or are sharded across processes.
        content: digest of the weights' values.
    """

    layout: str
    content: str


def fingerprint(model: torch.nn.Module, with_adapters: bool = False) -> Fingerprint:
    """Hash a model's parameters on their device. On one CPU core, hashing takes 1.3 ns per parameter.

    If weights are sharded across processes (FSDP, ZeRO-3), each process hashes its own shard.

    Args:
        model: the unwrapped model.
        with_adapters: whether to hash the weights of all adapters of a PEFT model. If False, the only adapter that is hashed is
            the one named "ref", if there is one. TRL uses this adapter as the reference.
    """
    layout, content = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    with torch.no_grad():
        for tensor in _weights(model, with_adapters):
            layout.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
            content.update(_mixed_sum(tensor).to_bytes(8, "little", signed=True))
    return Fingerprint(layout.hexdigest(), content.hexdigest())


class PolicyWeights(TrainerCallback):
    """A callback that detects whether the weights of a trainer's policy change after the callback is created.

    Args:
        trainer: a transformers Trainer. Its `train` method is wrapped, because `train` casts, shards and loads weights before
            it calls any callback.
        with_adapters: see `fingerprint`.
    """

    def __init__(self, trainer: Any, with_adapters: bool = False) -> None:
        self._trainer, self._with_adapters = trainer, with_adapters
        self._known = [self._now()]
        self._carries = False
        train = trainer.train

        @functools.wraps(train)
        def watched_train(*args: Any, **kwargs: Any) -> Any:
            resumes = bool(args[0] if args else kwargs.get("resume_from_checkpoint"))
            self._carries = not resumes and self._is_split and self.unchanged
            return train(*args, **kwargs)

        trainer.train = watched_train
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the fingerprint of the weights after `train` has sharded, cast or broadcast them, so that they still count as
        unchanged.

        Do not record it if the weights had changed before `train` was called, or if `train` resumes from a checkpoint.
        """
        if self._carries:
            self._known.append(self._now())
        self._carries = False  # a restart within `train` (auto_find_batch_size) may begin with changed weights

    @property
    def unchanged(self) -> bool:
        """Return True if the policy still has its initial weights on all processes. All processes must read this property
        together."""
        return all(gather(self._now() in self._known))

    @property
    def _is_split(self) -> bool:
        """Return True if `train` may shard the weights, cast them, or replace them with the first process's weights."""
        split = any(getattr(self._trainer, f"is_{name}_enabled", False) for name in ("fsdp", "deepspeed"))
        return split or Rank.here().count > 1

    def _now(self) -> Fingerprint:
        return fingerprint(self._trainer.accelerator.unwrap_model(self._trainer.model), self._with_adapters)


def weights_of(trainer: Any, with_adapters: bool = False) -> PolicyWeights:
    """Return the PolicyWeights of a trainer. The first call creates the PolicyWeights, which records the fingerprint of the
    initial weights. Later calls ignore `with_adapters`."""
    found: PolicyWeights | None = getattr(trainer, "_reflogp_policy_weights", None)
    if found is None:
        found = trainer._reflogp_policy_weights = PolicyWeights(trainer, with_adapters)
    return found


def is_unchanged(trainer: Any) -> bool:
    """Return True if a trainer's policy still has its initial weights, or if `weights_of` has not recorded them yet (for
    example because the trainer is still being constructed). All processes must call this function together."""
    found: PolicyWeights | None = getattr(trainer, "_reflogp_policy_weights", None)
    return found is None or found.unchanged


def _weights(model: Any, with_adapters: bool) -> Iterator[torch.Tensor]:
    skips = is_peft_model(model) and not with_adapters
    adapters = {name for name in model.peft_config if name != "ref"} if skips else set()
    for name, parameter in model.named_parameters():
        if adapters.isdisjoint(name.split(".")):  # PEFT puts an adapter's name into its weights' names
            held = getattr(parameter, "ds_tensor", parameter)  # with ZeRO-3, this process's shard
            yield held.to_local() if hasattr(held, "to_local") else held


def _mixed_sum(tensor: torch.Tensor) -> int:
    """Hash the bits of each element, and return the sum of the hashes. A sum of the elements themselves would not reveal two
    changes that cancel each other out."""
    if tensor.is_meta or not tensor.numel():
        return 0
    flat = tensor.detach().reshape(-1)
    widths = {1: torch.uint8, 2: torch.int16}
    bits = flat.view(widths.get(flat.element_size(), torch.int32))
    at_once = _AT_ONCE_ON_CPU if bits.device.type == "cpu" else _AT_ONCE
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), at_once):
        mixed = bits[start : start + at_once].to(torch.int32) * _FIRST
        mixed.bitwise_xor_(mixed >> 15).mul_(_SECOND)
        total += mixed.sum(dtype=torch.int64)
    return int(total)
