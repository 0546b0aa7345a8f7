"""Floating point operations, two per multiply-add: what sequences would take one by one, and what was computed for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operations:
    """Operations of scored sequences. Both are 0 where an engine cannot count them.

    Attributes:
        plain: of one forward pass over each sequence on its own.
        computed: of the passes that ran, with what sequences share counted once. Only what values depend on counts: padding,
            pairs of tokens that a mask hides, and passes that ran out of memory do not, so a device did at least this much.
    """

    plain: float = 0.0
    computed: float = 0.0

    def __add__(self, other: Operations) -> Operations:
        return Operations(self.plain + other.plain, self.computed + other.computed)

    def __sub__(self, other: Operations) -> Operations:
        return Operations(self.plain - other.plain, self.computed - other.computed)

    @property
    def sharing_gain(self) -> float | None:
        """How many times as much would be computed if nothing were shared, at least 1; None where nothing was counted."""
        return self.plain / self.computed if self.computed else None
