"""Find training steps that do not match a trainer's settings, and required logs, evaluations and saves that did not happen.

Such problems do not make reference values wrong, so the audit only reports them and never stops a run because of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

_EVENTS = ("logging", "eval", "save")


@dataclass
class Schedule:
    """The steps, logs, evaluations and saves of a training run, for comparison with the trainer's settings.

    Attributes:
        args: the trainer's settings.
        max_steps: the run's total number of steps. Intervals below 1, such as eval_steps=0.1, are fractions of this number.
        first_step: global step at which the run was started or resumed.
        every: dict from an event ("logging", "eval" or "save") to the number of steps between two occurrences. In a resumed
            run, this number may differ from `args`, because transformers uses the intervals from the checkpoint. For an event
            that is not in the dict, the interval in `args` is used.
        global_step: the last global step seen.
        optimizer_steps: optimizer steps since first_step.
        micro_steps: micro-batches since first_step.
        happened: dict from each event to the list of global steps at which it happened.
    """

    args: Any
    max_steps: int
    first_step: int
    every: dict[str, float] = field(default_factory=dict)
    global_step: int = 0
    optimizer_steps: int = 0
    micro_steps: int = 0
    happened: dict[str, list[int]] = field(default_factory=lambda: {event: [] for event in _EVENTS})
    _since_step: int = 0
    _stepped: int = 0

    def __post_init__(self) -> None:
        self.global_step = self.first_step

    def micro_step(self) -> None:
        self.micro_steps += 1
        self._since_step += 1

    def optimizer_step(self) -> None:
        self.optimizer_steps += 1
        self._stepped += 1

    def step_ended(self, global_step: int) -> list[str]:
        """Record that step `global_step` has ended, and return the step's problems."""
        problems = []
        if global_step != self.global_step + 1:
            problems.append(f"global_step went from {self.global_step} to {global_step} in one step")
        if self._stepped != 1:
            problems.append(f"the optimizer took {self._stepped} steps, not 1, to reach global_step {global_step}")
        accumulation = self.args.gradient_accumulation_steps
        if self._since_step > accumulation:
            problems.append(
                f"{self._since_step} micro-batches went into step {global_step}, but gradient_accumulation_steps is "
                f"{accumulation}"
            )
        self.global_step, self._since_step, self._stepped = global_step, 0, 0
        return problems

    def came(self, event: str, step: int) -> None:
        """Record that a log, an evaluation or a save (`event`) happened at `step`.

        Events that no setting requires are allowed, because callbacks may log, evaluate and save at any time.
        """
        if step not in self.happened[event]:
            self.happened[event].append(step)

    def missed(self) -> list[str]:
        """Describe the logs, evaluations and saves that were due by now but did not happen, in one message for each event."""
        problems = []
        for event in _EVENTS:
            due = {step for step in self._due(event, self.global_step) if step > self.first_step}
            missing = sorted(due - set(self.happened[event]))
            if missing:
                named = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
                problems.append(f"no {event} at step {named}: {self._says(event)}")
        return problems

    def as_dict(self) -> dict[str, Any]:
        return {
            "first_step": self.first_step,
            "global_step": self.global_step,
            "optimizer_steps": self.optimizer_steps,
            "micro_steps": self.micro_steps,
            "logs": len(self.happened["logging"]),
            "evaluations": len(self.happened["eval"]),
            "saves": len(self.happened["save"]),
        }

    def _due(self, event: str, until: int) -> set[int]:
        due: set[int] = set()
        if self._strategy(event) == "steps":
            every = self.every.get(event, getattr(self.args, f"{event}_steps", 0)) or 0
            every = math.ceil(self.max_steps * every) if 0 < every < 1 else int(every)
            if every > 0:
                due = set(range(every, until + 1, every))
            if event == "eval":
                due = {step for step in due if step >= (getattr(self.args, "eval_delay", 0) or 0)}
        if event == "logging" and getattr(self.args, "logging_first_step", False):
            due.add(1)
        return due

    def _says(self, event: str) -> str:
        every = self.every.get(event, getattr(self.args, f"{event}_steps", None))
        first = ", logging_first_step=True" if event == "logging" and getattr(self.args, "logging_first_step", False) else ""
        return f"this run has {event}_strategy={self._strategy(event)!r}, {event}_steps={every}{first}"

    def _strategy(self, event: str) -> str:
        strategy = getattr(self.args, f"{event}_strategy", "no")
        return str(getattr(strategy, "value", strategy))
