"""Define the cases that are trained in every environment. Both processes import this module, which has only data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

#: Maximum difference of a loss from TRL's loss that counts as rounding.
TOLERANCE = 1e-5
STEPS = 10
#: Minimum change of the losses in a run: a run whose losses do not change proves nothing.
MOVES = 1e-3


@dataclass(frozen=True)
class Case:
    """A pair of runs: with the cached trainer, and with TRL's trainer and a reference model in memory.

    Attributes:
        name: name of the case in the table.
        trainer: kind of trainer.
        settings: settings of the trainer's config.
        lora: True if the policy is an adapter.
        evaluates: True to evaluate after training, on pairs that the trainer has not seen.
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
    """The result of a case.

    Attributes:
        difference: largest difference of any loss; None if a run did not finish.
        seconds: time of both runs, and of scoring the missing rows.
        scored: number of rows that the cached trainer lacked and that were scored then.
        problem: why the case failed; empty if it succeeded.
    """

    difference: float | None = None
    seconds: float = 0.0
    scored: int = 0
    problem: str = ""
