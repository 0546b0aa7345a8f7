"""Compare two computations of the same log-probs, for the `step_zero` check (before the first step) and for spot checks.

Before the first step, a policy that starts from the reference's weights must reproduce the joined log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from reflogp.store.texts import counted, short_repr
from reflogp.trainer.errors import StepZeroError
from reflogp.trainer.tolerances import coarser, computes_in, explained, is_moe, tolerance

_CAUSES = (
    "Likely causes: the policy starts from weights other than the reference's (if intended, pass "
    "policy_starts_at_reference=False to the trainer, or set policy_starts_elsewhere in your framework's command or "
    "config);{dtype} the scored sequences were not truncated in the same way as the policy's batches; the stored values "
    "were changed after scoring (run `reflogp store verify`)"
)
_CAUSES_WITH_A_SERVICE = (
    "Likely causes: the stored values were changed after scoring (run `reflogp store verify`); the dataset's "
    "token ids or reference columns were changed after the join"
)
_OTHER_DTYPE = " the stored values were computed in {reference}, but the policy computes in {policy};"
_UNTRUE_DTYPE = " the stored values were computed in another dtype, although the store says {reference};"


@dataclass(frozen=True)
class StepZero:
    """The result of comparing a policy's log-probs with the joined reference log-probs.

    In a spot check by a service, the log-probs that the service has just computed take the place of the policy's.

    Attributes:
        sequences: number of sequences compared, over all processes.
        max_difference: largest |policy - reference| of a sequence's summed log-probs, in nats.
        max_per_root_token: largest |policy - reference| / sqrt(tokens) of a sequence; compared with `tolerance`.
        mean_difference: mean of policy - reference, in nats. Rounding errors average out to nearly 0; the differences between
            two models do not.
        tolerance: the allowed difference, in nats/√tokens.
        reference_dtype: dtype in which the reference log-probs were computed.
        policy_dtype: dtype in which the policy computes.
        advice: advice on how to get reference values in the policy's dtype, for the error that is raised if the two dtypes
            differ.
        not_finite: number of sequences that were not compared because the policy's log-probs are NaN or infinite, although the
            reference's are finite.
    """

    sequences: int
    max_difference: float
    max_per_root_token: float
    mean_difference: float
    tolerance: float
    reference_dtype: str
    policy_dtype: str
    advice: str = ""
    not_finite: int = 0

    def __repr__(self) -> str:
        return short_repr(
            "StepZero",
            f"{'passed' if self.passed else 'failed'}: differences of up to {self.max_difference:.2g} nats in "
            f"{counted(self.sequences, 'sequence')} ({self.max_per_root_token:.2g} nats/√tokens, {self.tolerance:g} allowed), "
            f"policy in {self.policy_dtype}, reference in {self.reference_dtype}",
        )

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["advice"]
        return fields

    @property
    def passed(self) -> bool:
        return self.max_per_root_token <= self.tolerance

    def require(self, what: str, scorer: str = "policy", check: str = "step_zero") -> None:
        """Raise StepZeroError if a difference exceeds the tolerance or is NaN.

        Args:
            what: description of the sequences, for the error message.
            scorer: what computed the log-probs that are compared with the joined log-probs: "policy" or "service".
            check: name of the check that the error reports as failed.
        """
        if not self.passed:
            causes = _CAUSES if scorer == "policy" else _CAUSES_WITH_A_SERVICE
            same = self.reference_dtype == self.policy_dtype
            text = "" if self.reference_dtype == "unknown" else _UNTRUE_DTYPE if same else _OTHER_DTYPE
            dtypes = text.format(reference=self.reference_dtype, policy=self.policy_dtype)
            raise StepZeroError(
                f"the {scorer}'s log-probs of {what} differ from this run's reference log-probs by up to "
                f"{self.max_difference:.4g} nats "
                f"({self.max_per_root_token:.4g} nats/√tokens, {self.tolerance:g} allowed; {self.mean_difference:+.4g} nats "
                "on average). " + causes.format(dtype=dtypes),
                check,
            )

    def require_one_dtype(self, check: str = "step_zero") -> None:
        """Raise StepZeroError if the reference's dtype is known and differs from the policy's.

        Args:
            check: name of the check that the error reports as failed.
        """
        wanted = self.policy_dtype
        if self.reference_dtype not in ("unknown", wanted):
            raise StepZeroError(
                f"the reference log-probs were computed in {self.reference_dtype}, but the policy computes in "
                f"{wanted}{explained(wanted)}: log-probs in these two dtypes differ even before training. The "
                f"largest difference in this check is {self.max_difference:.4g} nats. "
                f"{self.advice}, or pass step_zero_tolerance= to accept the difference",
                check,
            )


def differences(policy: torch.Tensor, reference: torch.Tensor, tokens: torch.Tensor) -> list[float]:
    """Return how much the policy's sums differ from the reference's, as five numbers.

    The numbers are the count of compared sequences, the largest |difference|, the largest |difference| / sqrt(tokens), the sum
    of the differences, and the count of skipped sequences. A sequence is skipped if the policy's sum is NaN or infinite, but
    the reference's is finite. If the reference's sum of any sequence is NaN or infinite, the second to fourth numbers are NaN.

    Args:
        policy: sums of the policy's log-probs, shape (n,).
        reference: the joined sums, shape (n,).
        tokens: number of completion tokens of each sequence, shape (n,).
    """
    policy, reference = policy.double().cpu(), reference.double().cpu()
    compared = torch.isfinite(policy) | ~torch.isfinite(reference)
    delta = (policy - reference)[compared]
    not_finite = int((~compared).sum())
    if not len(delta):
        return [0, 0.0, 0.0, 0.0, not_finite]
    scaled = delta.abs() / tokens.cpu()[compared].clamp(min=1).double().sqrt()
    if not torch.isfinite(delta).all():
        return [len(delta), float("nan"), float("nan"), float("nan"), not_finite]
    return [len(delta), float(delta.abs().max()), float(scaled.max()), float(delta.sum()), not_finite]


def compared(
    parts: list[list[float]],
    allowed: float | None,
    reference_dtype: str,
    policy: torch.nn.Module,
    accelerator: Any,
    advice_for_dtype: Callable[[str], str] | None = None,
) -> StepZero:
    """Combine the results of `differences` for several batches and processes into one StepZero.

    Args:
        parts: the result of `differences` for each batch.
        allowed: largest accepted |policy - reference| / sqrt(tokens) of a sequence's summed log-probs. If None, the limit
            depends on the dtypes of the reference and the policy, and is larger for mixtures of experts.
        reference_dtype: dtype in which the reference log-probs were computed.
        policy: the policy, without wrappers such as DistributedDataParallel.
        accelerator: the trainer's accelerator, whose mixed precision may determine the policy's dtype. If None, the policy's
            dtype is the dtype of its weights.
        advice_for_dtype: function that returns advice on how to get the reference's values in a given dtype. If None, the
            result contains general advice.
    """
    policy_dtype = computes_in(policy, accelerator)
    advice = (advice_for_dtype or _in_general)(policy_dtype)
    if allowed is None:
        allowed = tolerance(coarser(reference_dtype, policy_dtype), is_moe(getattr(policy, "config", None)))
    seen = torch.tensor(parts, dtype=torch.float64)
    return StepZero(
        sequences=int(seen[:, 0].sum()),
        max_difference=float(seen[:, 1].max()),
        max_per_root_token=float(seen[:, 2].max()),
        mean_difference=float(seen[:, 3].sum() / max(1.0, float(seen[:, 0].sum()))),
        tolerance=allowed,
        reference_dtype=reference_dtype,
        policy_dtype=policy_dtype,
        advice=advice,
        not_finite=int(seen[:, 4].sum()),
    )


def _in_general(dtype: str) -> str:
    return (
        f"Score the data in {dtype} (`reflogp score --dtype {dtype}`) and pass --reflogp.dtype {dtype} (in Python, "
        f'dtype="{dtype}" to ReferenceSource)'
    )
