"""Define how much two computations of the same log-probs may differ, based on measurements for each dtype and type of model."""

from __future__ import annotations

from typing import Any

import torch

from reflogp.store.reference import autocast_dtype

#: Dict from each dtype to two tolerances, in nats/sqrt(tokens): one for dense models, and one for mixtures of experts. Two sums
#: over n tokens may differ by the tolerance times sqrt(n). Rounding errors of individual tokens are independent, so their sum
#: grows with sqrt(n). The tolerances come from measurements with tools/gate_trials.py, with a margin above the largest observed
#: difference (docs/trainer.md). In contrast, the log-probs of a different checkpoint of the same model typically differ by 0.1
#: per token or more. Most of these differences have the same sign, so the difference between two sums grows with n.
PER_ROOT_TOKEN = {"float32": (1e-3, 5e-3), "float16": (0.02, 0.06), "bfloat16": (0.1, 0.3)}


def tolerance(dtype: str, is_moe: bool) -> float:
    """Return the allowed difference between two computations of the same sum of log-probs in `dtype`, in nats/√tokens.

    Two sums over n tokens may differ by the returned value times √n. An unknown dtype is treated as bfloat16.

    For an autocast dtype, the tolerance depends on the dtype of the matrix products, because matrix products cause most of the
    difference.
    """
    dense, experts = _allowed(dtype)
    return experts if is_moe else dense


def coarser(first: str, second: str) -> str:
    """Return whichever of two dtypes has the larger tolerance."""
    return max(first, second, key=_allowed)


def computes_in(model: torch.nn.Module, accelerator: Any) -> str:
    """Return the name of the dtype in which a policy computes, spelled as in `Reference.dtype`.

    Args:
        model: the policy, unwrapped.
        accelerator: the trainer's Accelerator. Its mixed precision comes from bf16=, fp16=, `accelerate launch
            --mixed_precision` or DeepSpeed's settings. If `accelerator` is None, the dtype of the weights is returned.

    Returns:
        "bfloat16-autocast" for float32 weights under torch.autocast (accelerate's mixed precision, which TRL enables by
        default), and "bfloat16" if the weights are bfloat16 during the forward pass. The weights are bfloat16 in a bfloat16
        policy (with or without autocast), under DeepSpeed with bf16, and under FSDP with FSDP's mixed precision. The names for
        float16 are analogous. Without mixed precision, the result is the dtype of the weights.
    """
    weights = _name(getattr(model, "dtype", torch.float32))
    if accelerator is None:
        return weights
    if str(accelerator.distributed_type).endswith("DEEPSPEED"):
        return _deepspeed_computes_in(weights, accelerator)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    cast_by_fsdp = getattr(getattr(plugin, "mixed_precision_policy", None), "param_dtype", None)
    if cast_by_fsdp is not None:
        weights = _name(cast_by_fsdp)
    handler = getattr(accelerator, "autocast_handler", None)
    if not accelerator.native_amp or (handler is not None and not handler.enabled):
        return weights
    products = "float16" if accelerator.mixed_precision == "fp16" else "bfloat16"
    return f"{products}-autocast" if weights == "float32" else products


def explained(dtype: str) -> str:
    """Return an explanation to append to a dtype in a message, or an empty string if the dtype needs no explanation."""
    products = autocast_dtype(dtype)
    if products is None:
        return ""
    flag = "fp16=True" if products == "float16" else "bf16=True, the default of TRL's configs"
    return f" (float32 weights under torch.autocast, enabled by {flag})"


def how_to_compute_in(dtype: str) -> str:
    """Return advice on how to make a policy compute in `dtype`, as an imperative clause to insert into a sentence."""
    products = autocast_dtype(dtype)
    if products is not None:
        return f'load the policy with dtype="float32" and set {"fp16" if products == "float16" else "bf16"}=True'
    return f'load the policy with dtype="{dtype}"' + (" and set bf16=False" if dtype == "float32" else "")


def _deepspeed_computes_in(weights: str, accelerator: Any) -> str:
    """Return the dtype in which a policy computes under DeepSpeed. DeepSpeed either casts the weights (bf16, fp16) or runs
    float32 weights under autocast (torch_autocast)."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    own = config.get("torch_autocast") or {}
    if own.get("enabled") and weights == "float32":
        return f"{own.get('dtype', 'bfloat16')}-autocast"
    return {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision, weights)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _allowed(dtype: str) -> tuple[float, float]:
    return PER_ROOT_TOKEN.get(autocast_dtype(dtype) or dtype, PER_ROOT_TOKEN["bfloat16"])


def is_moe(config: Any) -> bool:
    """Return True if a config describes a mixture-of-experts model."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)
