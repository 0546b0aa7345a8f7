"""Logged metrics against a gather of the audit's own: are they means over all processes, and of the joined columns?

Knows TRL's names of metrics. Called by the audit.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from reflogp_trainer.ranks import gather

#: Metrics that are one process' own business: times, and what they are divided by.
_OWN = ("runtime", "per_second", "memory", "flos", "step_time")
_ROUNDING = 1e-4


class GlobalMeans:
    """The joined columns of the micro-batches since the last log, and what the log must say about them.

    Attributes:
        compared: logs whose metrics were compared.
        worst: largest difference between one process' metric and the mean over all, relative.
    """

    def __init__(self) -> None:
        self.compared = 0
        self.worst = 0.0
        self._references: list[torch.Tensor] = []

    def saw(self, batch: dict[str, Any]) -> None:
        """Take one micro-batch' means of ref_chosen_logps and ref_rejected_logps."""
        columns = [batch.get("ref_chosen_logps"), batch.get("ref_rejected_logps")]
        means = [column.double().mean() for column in columns if isinstance(column, torch.Tensor)]
        if len(means) == len(columns):
            self._references.append(torch.stack(means))

    def check(self, logs: dict[str, float], beta: float | None) -> list[str]:
        """What is wrong with a log of training metrics, on all processes together."""
        mine = {name: float(value) for name, value in logs.items() if _is_shared(name, value)}
        everyone = gather(mine)
        problems = []
        for name, value in mine.items():
            values = [logged[name] for logged in everyone if name in logged]
            off = apart(value, sum(values) / len(values))
            self.worst = max(self.worst, off)
            if off > _ROUNDING:
                problems.append(
                    f"{name} is {value:.6g} on this process and {sum(values) / len(values):.6g} as the mean over all"
                )
        problems += self._check_references(logs, beta)
        self.compared += 1
        return problems

    def _check_references(self, logs: dict[str, float], beta: float | None) -> list[str]:
        """log-prob minus reward over beta is the reference's log-prob: that of the joined columns, over all processes."""
        seen = [float(value) for value in torch.stack(self._references).mean(0)] if self._references else None
        self._references.clear()
        per_process = gather(seen)
        if not beta or any(means is None for means in per_process):
            return []
        problems = []
        for at, side in enumerate(("chosen", "rejected")):
            if f"rewards/{side}" not in logs or f"logps/{side}" not in logs:
                continue
            joined = sum(means[at] for means in per_process if means) / len(per_process)
            logged = logs[f"logps/{side}"] - logs[f"rewards/{side}"] / beta
            if apart(logged, joined) > _ROUNDING:
                problems.append(
                    f"rewards/{side} and logps/{side} are those of a mean reference log-prob of {logged:.6g}, and the joined "
                    f"column's mean over all processes is {joined:.6g}"
                )
        return problems


def _is_shared(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and not any(own in name for own in _OWN)


def apart(left: float, right: float) -> float:
    """Relative difference of two metrics; infinite where one is not a number."""
    if math.isnan(left) and math.isnan(right):
        return 0.0
    off = abs(left - right) / max(1.0, abs(right))
    return math.inf if math.isnan(off) else off
