"""What is trained in every environment, and under which settings. Plain data: both sides import it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

#: Largest difference of a loss from TRL's own that counts as rounding.
TOLERANCE = 1e-5
STEPS = 10
#: How far losses must move in a run: one that stands still proves nothing.
MOVES = 1e-3


@dataclass(frozen=True)
class Case:
    """One pair of runs: ours, and TRL's with a live reference model.

    Attributes:
        name: as the table calls it.
        trainer: whose.
        settings: of the trainer's config.
        lora: the policy is an adapter.
        evaluates: on pairs that the trainer has not seen, after training.
    """

    name: str
    trainer: Literal["dpo", "kto"]
    settings: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    evaluates: bool = False


CASES = [
    Case("DPO", "dpo"),
    Case("DPO, `ipo`", "dpo", {"loss_type": "ipo", "beta": 0.5}),
    Case("DPO, `ld_alpha`", "dpo", {"ld_alpha": 0.4}),
    Case("DPO, LoRA", "dpo", {"learning_rate": 1e-3}, lora=True),
    Case("DPO, `keep_end`", "dpo", {"max_length": 80, "truncation_mode": "keep_end"}),
    Case("DPO, `evaluate` on new pairs after training", "dpo", evaluates=True),
    Case("KTO", "kto"),
    Case("KTO, `apo_zero_unpaired`", "kto", {"loss_type": "apo_zero_unpaired"}),
]


@dataclass
class Result:
    """What came of a case.

    Attributes:
        difference: largest one of any loss; None where a run did not come to its end.
        seconds: both runs, and scoring what they missed.
        scored: rows that the cached trainer missed, and that were scored then.
        problem: why the case does not hold.
    """

    difference: float | None = None
    seconds: float = 0.0
    scored: int = 0
    problem: str = ""
