"""How far two computations of the same log-probs may lie apart: measured, by dtype and kind of model.

Knows numbers only. Used by the step-0 gate, by spot checks, and to verify columns that a dataset brought along.
"""

from __future__ import annotations

from typing import Any

import torch

#: Allowed difference of a sum over n tokens, in nats, is this times sqrt(n): rounding errors of single tokens are independent,
#: so they grow with the root. (dense, mixture of experts); measured by tests/trainer_ext/gate_trials.py, with room above the
#: largest seen (docs/trainer.md).
#: Another checkpoint of the same model differs by 0.1 a token and more, and by one sign, so it grows with n.
PER_ROOT_TOKEN = {"float32": (1e-3, 5e-3), "float16": (0.02, 0.06), "bfloat16": (0.1, 0.3)}


def tolerance(dtype: str, is_moe: bool) -> float:
    """Allowed difference in nats per root token, where both sides computed in `dtype` (an unknown one counts as bfloat16)."""
    dense, experts = PER_ROOT_TOKEN.get(dtype, PER_ROOT_TOKEN["bfloat16"])
    return experts if is_moe else dense


def coarser(first: str, second: str) -> str:
    """Of two dtypes the one with the larger tolerance."""
    return max(first, second, key=lambda dtype: PER_ROOT_TOKEN.get(dtype, PER_ROOT_TOKEN["bfloat16"]))


def computes_in(model: torch.nn.Module, args: Any) -> str:
    """The dtype of a policy's matrix products: its weights', or what the trainer's mixed precision casts them to."""
    if getattr(args, "bf16", False):
        return "bfloat16"
    if getattr(args, "fp16", False):
        return "float16"
    return str(getattr(model, "dtype", torch.float32)).removeprefix("torch.")


def is_moe(config: Any) -> bool:
    """Whether a model's config names experts among which a router chooses."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)
