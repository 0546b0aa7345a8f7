"""Count floating point operations, two per multiply-add."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operations:
    """Operations of scored sequences. Both counts are 0 if an engine cannot count them.

    Attributes:
        plain: operations of one forward pass over each sequence on its own.
        computed: operations of the passes that ran; tokens that sequences share count once. Only operations that values depend
            on count. Padding, pairs of tokens that a mask hides, and passes that ran out of memory do not, so the device
            computed at least this many.
    """

    plain: float = 0.0
    computed: float = 0.0

    def __add__(self, other: Operations) -> Operations:
        return Operations(self.plain + other.plain, self.computed + other.computed)

    def __sub__(self, other: Operations) -> Operations:
        return Operations(self.plain - other.plain, self.computed - other.computed)

    @property
    def sharing_gain(self) -> float | None:
        """`plain` divided by `computed`, at least 1; None if nothing was counted."""
        return self.plain / self.computed if self.computed else None
