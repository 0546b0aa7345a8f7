"""Compare the policy's log-probs of the first batch with the reference's, and record what a run was trained on.

A policy that starts from the reference's weights must reproduce the stored log-probs, except for rounding. If it does not, the
weights, the tokens or the truncation differ, and the run would silently train on wrong values.
"""

from __future__ import annotations

import importlib.metadata
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from reflogp.store import UsageError
from reflogp.store.files import write_atomically
from reflogp.store.reference import autocast_dtype
from reflogp.trainer.errors import StepZeroError
from reflogp.trainer.ranks import gather, rank

RECORD_FILE = "reflogp.json"
STARTS_ELSEWHERE = "not compared: the policy does not start from the reference's weights"
#: Dict from each dtype to two tolerances, in nats/sqrt(tokens): one for dense models, and one for mixtures of experts. Two sums
#: over n tokens may differ by the tolerance times sqrt(n). Rounding errors of individual tokens are independent, so their sum
#: grows with sqrt(n). The tolerances come from measurements with tools/gate_trials.py, with a margin above the largest observed
#: difference (docs/trainer.md). In contrast, the log-probs of a different checkpoint of the same model typically differ by 0.1
#: per token or more. Most of these differences have the same sign, so the difference between two sums grows with n.
PER_ROOT_TOKEN = {"float32": (1e-3, 5e-3), "float16": (0.02, 0.06), "bfloat16": (0.1, 0.3)}
#: Measured mean of |difference| between a completion's sums in a dtype and in a finer one, in nats (docs/trainer.md).
_APART_ON_AVERAGE = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.1}
_LIBRARIES = ("reflogp", "torch", "transformers", "accelerate", "trl", "peft", "deepspeed")
_FRAMEWORKS = ("openrlhf", "llamafactory", "ms-swift", "axolotl", "unsloth")
#: Base class of the trainers' mixins: `object` at run time, or any trainer for type checkers.
_AnyTrainer: Any = object


@dataclass(frozen=True)
class StepZero:
    """The result of comparing a policy's log-probs of the first batch with the reference's.

    Attributes:
        sequences: number of sequences compared, over all processes.
        max_difference: largest |policy - reference| of a sequence's summed log-probs, in nats.
        max_per_root_token: largest |policy - reference| / sqrt(tokens) of a sequence, less the rounding of the dtype in which
            the trainer sums log-probs; compared with `tolerance`.
        mean_difference: mean of policy - reference, in nats. Rounding errors average out to nearly 0; the differences between
            two models do not.
        tolerance: the allowed difference, in nats/√tokens.
        reference_dtype: dtype in which the reference log-probs were computed.
        policy_dtype: dtype in which the policy computes.
        not_finite: number of sequences that were not compared because the policy's log-probs are NaN or infinite.
    """

    sequences: int
    max_difference: float
    max_per_root_token: float
    mean_difference: float
    tolerance: float
    reference_dtype: str
    policy_dtype: str
    not_finite: int = 0

    @property
    def passed(self) -> bool:
        return self.max_per_root_token <= self.tolerance

    def require(self) -> None:
        """Raise StepZeroError if a difference exceeds the tolerance or is NaN."""
        if self.passed:
            return
        dtypes = ""
        if self.reference_dtype != self.policy_dtype:
            dtypes = (
                f" the reference log-probs were computed in {self.reference_dtype}, the policy computes in {self.policy_dtype};"
            )
        raise StepZeroError(
            f"the policy's log-probs of the first batch differ from the reference's by up to {self.max_difference:.4g} nats "
            f"({self.max_per_root_token:.4g} nats/√tokens, {self.tolerance:g} allowed; {self.mean_difference:+.4g} nats on "
            "average). Likely causes: the policy starts from weights other than the reference's (if intended, pass "
            "policy_starts_at_reference=False to the trainer, or set policy_starts_elsewhere in your framework's command or "
            f"config);{dtypes} the scored sequences were not truncated in the same way as the policy's batches; the stored "
            "values were changed after scoring (run `reflogp verify` with the model and the data)"
        )


class GateMixin(_AnyTrainer):
    """Mixin of trainers that are derived from transformers' Trainer: compares a run's first batch, and writes the record."""

    joins: dict[str, Any]
    starts_at_reference: bool
    outcome: StepZero | str | None = None  # of the comparison, or the reason why there was none; None before the first batch

    @property
    def step_zero(self) -> StepZero | None:
        return self.outcome if isinstance(self.outcome, StepZero) else None

    def check_first_batch(self, sums: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]], **more: Any) -> None:
        """Before a run's first step, compare its first batch: `sums` returns the first three arguments of `compare`. Subclasses
        call this method for every batch. Raises StepZeroError if a difference exceeds the tolerance."""
        if self.outcome is None:
            if self.state.global_step:
                self.outcome = f"not compared: the run was resumed at step {self.state.global_step}"
            elif not self.starts_at_reference:
                self.outcome = STARTS_ELSEWHERE
            else:
                policy = self.accelerator.unwrap_model(self.model)
                dtypes = next(iter(self.joins.values())).where.reference_dtype, computes_in(policy, self.accelerator)
                self.outcome = compare(*sums(), *dtypes, policy.config)
            write_record(self.args.output_dir, self.joins, self.outcome, **more)
        if self.step_zero is not None:
            self.step_zero.require()


def compare(
    policy: torch.Tensor, reference: torch.Tensor, tokens: torch.Tensor, reference_dtype: str, policy_dtype: str, config: Any
) -> StepZero:
    """Compare sums of log-probs on all processes together; every process gets the same result.

    Args:
        policy: sums of the policy's log-probs in nats, shape (n,), in the dtype in which the trainer summed them: under FSDP2,
            accelerate makes this dtype bfloat16, whose steps at -100 are 0.5 nats wide.
        reference: the reference's sums, shape (n,).
        tokens: number of tokens in each sum, shape (n,). Sums over no token are not compared.
    """
    rounding = torch.finfo(policy.dtype).eps / 2
    sums, stored, counts = (values.detach().cpu().double() for values in (policy, reference, tokens))
    finite = sums.isfinite() | ~stored.isfinite()
    used = finite & (counts > 0)
    delta = (sums - stored)[used]
    beyond = (delta.abs() - rounding * sums[used].abs()) / counts[used].sqrt()
    own = [len(delta), 0.0, 0.0, float(delta.sum()), int((~finite).sum())]
    if len(delta):
        own[1:3] = float(delta.abs().max()), float(beyond.max().clamp(min=0))
    seen = torch.tensor(gather(own), dtype=torch.float64)
    return StepZero(
        sequences=int(seen[:, 0].sum()),
        max_difference=float(seen[:, 1].max()),
        max_per_root_token=float(seen[:, 2].max()),
        mean_difference=float(seen[:, 3].sum() / seen[:, 0].sum().clamp(min=1)),
        tolerance=max(tolerance(dtype, is_moe(config)) for dtype in (reference_dtype, policy_dtype)),
        reference_dtype=reference_dtype,
        policy_dtype=policy_dtype,
        not_finite=int(seen[:, 4].sum()),
    )


def tolerance(dtype: str, moe: bool) -> float:
    """Return the allowed difference between two computations of the same sum of log-probs in `dtype`, in nats/√tokens.

    For an autocast dtype, the tolerance depends on the dtype of the matrix products, because matrix products cause most of the
    difference. An unknown dtype is treated as bfloat16.
    """
    return PER_ROOT_TOKEN[_products(dtype)][moe]


def warn_of_other_dtype(reference_dtype: str, policy_dtype: str, command: str) -> None:
    """Warn, on the run's first process, if the dtypes differ. `command` scores the data in the policy's dtype."""
    if reference_dtype != policy_dtype and rank() == 0:
        apart = max(_APART_ON_AVERAGE[_products(dtype)] for dtype in (reference_dtype, policy_dtype))
        warnings.warn(
            f"the reference log-probs were computed in {reference_dtype}, but the policy computes in {policy_dtype}"
            f"{_explained(policy_dtype)}: even before the first step, a completion's sums differ by about {apart:g} nats on "
            f"average. If they should be equal, score the data in {policy_dtype}: {command}",
            stacklevel=4,
        )


def computes_in(model: torch.nn.Module, accelerator: Any) -> str:
    """Return the name of the dtype in which an unwrapped policy computes, spelled as in `reflogp score --dtype`.

    It is "bfloat16-autocast" for float32 weights under torch.autocast (accelerate's mixed precision, which TRL enables by
    default), and "bfloat16" if the weights are bfloat16 during the forward pass: in a bfloat16 policy (with or without
    autocast), under DeepSpeed with bf16, and under FSDP with FSDP's mixed precision. The names for float16 are analogous.
    """
    weights = str(getattr(model, "dtype", torch.float32)).removeprefix("torch.")
    if str(accelerator.distributed_type).endswith("DEEPSPEED"):
        own = accelerator.state.deepspeed_plugin.deepspeed_config.get("torch_autocast") or {}
        if own.get("enabled") and weights == "float32":
            return f"{own.get('dtype', 'bfloat16')}-autocast"
        return {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision, weights)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    cast_by_fsdp = getattr(getattr(plugin, "mixed_precision_policy", None), "param_dtype", None)
    if cast_by_fsdp is not None:
        weights = str(cast_by_fsdp).removeprefix("torch.")
    handler = getattr(accelerator, "autocast_handler", None)
    if not accelerator.native_amp or (handler is not None and not handler.enabled):
        return weights
    products = "float16" if accelerator.mixed_precision == "fp16" else "bfloat16"
    return f"{products}-autocast" if weights == "float32" else products


def is_moe(config: Any) -> bool:
    """Return True if a config describes a mixture-of-experts model."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)


def write_record(folder: str | Path, joins: Mapping[str, Any], step_zero: StepZero | str, **more: Any) -> None:
    """Write what a run is trained on to `folder`/reflogp.json, on the run's first process. If it cannot be written, warn."""
    if rank():
        return
    compared = step_zero if isinstance(step_zero, str) else {**asdict(step_zero), "passed": step_zero.passed}
    content = {
        "joins": {name: join.as_dict() for name, join in joins.items()},
        "step_zero": compared,
        "versions": versions(),
        **more,
    }
    file = Path(folder) / RECORD_FILE
    try:
        with write_atomically(file) as partial:
            partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
    except UsageError as error:
        warnings.warn(f"{error}; the run goes on", stacklevel=2)


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that a run's values depend on."""
    found = {}
    for package in (*_LIBRARIES, *_FRAMEWORKS):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _products(dtype: str) -> str:
    products = autocast_dtype(dtype) or dtype
    return products if products in PER_ROOT_TOKEN else "bfloat16"


def _explained(dtype: str) -> str:
    products = autocast_dtype(dtype)
    flag = "fp16=True" if products == "float16" else "bf16=True, the default of TRL's configs"
    return f" (float32 weights under torch.autocast, enabled by {flag})" if products else ""
