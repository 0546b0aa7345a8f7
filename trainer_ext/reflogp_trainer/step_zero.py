"""The step-0 gate: before the first step a policy that starts at the reference must give the joined log-probs.

Knows numbers only. Called by the trainers with the first batch's own log-probs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from reflogp_trainer.errors import StepZeroError

#: Allowed difference of a sum over n tokens, in nats, is this times sqrt(n): rounding errors of single tokens are
#: independent, so they grow with the root. float32 against float32 differs by about 1e-6 a token; bfloat16 by 0.01 to 0.05
#: with real models (0.003 with small random ones). Another checkpoint of the same model differs by 0.1 a token and more,
#: and by one sign, so it grows with n.
TOLERANCE_FLOAT32 = 1e-3
TOLERANCE_HALF = 0.1


@dataclass(frozen=True)
class StepZero:
    """What the gate saw.

    Attributes:
        sequences: sequences compared, over all processes.
        max_difference: largest |policy - reference| of a sum, in nats.
        max_per_root_token: largest of those over sqrt(tokens); compared with `tolerance`.
        tolerance: what was allowed.
    """

    sequences: int
    max_difference: float
    max_per_root_token: float
    tolerance: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def default_tolerance(reference_dtype: str, policy_dtype: torch.dtype, autocast: bool) -> float:
    """The tolerance for these numerics, in nats per root token."""
    exact = reference_dtype == "float32" and policy_dtype == torch.float32 and not autocast
    return TOLERANCE_FLOAT32 if exact else TOLERANCE_HALF


def differences(policy: torch.Tensor, reference: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(sequences, largest |difference|, largest |difference| / sqrt(tokens)) of this process, float64 (3,).

    Args:
        policy: sums of the policy's log-probs, (n,).
        reference: the joined sums, (n,).
        tokens: completion tokens of each, (n,).
    """
    delta = (policy.double() - reference.to(policy.device).double()).abs()
    scaled = delta / tokens.to(policy.device).clamp(min=1).double().sqrt()
    return torch.stack([torch.tensor(float(len(delta)), device=delta.device, dtype=torch.float64), delta.max(), scaled.max()])


def judge(per_process: torch.Tensor, tolerance: float) -> StepZero:
    """Combine every process' `differences`, (processes, 3), and stop the run where they exceed the tolerance.

    Raises:
        StepZeroError: beyond tolerance, or not a number.
    """
    seen = StepZero(
        sequences=int(per_process[:, 0].sum()),
        max_difference=float(per_process[:, 1].max()),
        max_per_root_token=float(per_process[:, 2].max()),
        tolerance=tolerance,
    )
    if not seen.max_per_root_token <= tolerance:
        raise StepZeroError(
            f"the policy's log-probs of the first batch differ from the joined reference's by up to {seen.max_difference:.4g} "
            f"nats ({seen.max_per_root_token:.4g} per root token, {tolerance:g} allowed). Either the reference is not the "
            "model that the policy starts from (then pass policy_starts_at_reference=False), or the store was scored with "
            "another model, dtype or chat template"
        )
    return seen
