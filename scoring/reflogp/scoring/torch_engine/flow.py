"""Passes on their way: prepared in the background, launched, landed. What keeps a device from waiting for the host.

Knows units of work and when their values are here. Does not know models. Used by the torch engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from reflogp.scoring.torch_engine.device import Mark
from reflogp.scoring.torch_engine.operations import Operations
from reflogp.scoring.torch_engine.packing import Pack
from reflogp.scoring.torch_engine.sequences import NOT_FINITE, Outcome, Sequence

#: Seconds between two looks whether a pass has landed while the next one is not prepared.
_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Unit:
    """One pass: a pack or a padded batch, where each member's values will be, its size in tokens, and its operations."""

    work: Pack | list[Sequence]
    members: tuple[tuple[int, npt.NDArray[np.int64]], ...]
    tokens: int
    operations: Operations


@dataclass(frozen=True)
class InFlight:
    """A pass whose values are on their way off the device.

    Attributes:
        values: host memory, written when `landed` has passed.
        began, landed: marks before and behind the pass.
    """

    unit: Unit
    values: torch.Tensor
    began: Mark
    landed: Mark

    def land(self) -> list[tuple[int, Outcome]]:
        """(member, its values), once they are here."""
        self.landed.wait()
        values = self.values.numpy()
        outcomes: list[tuple[int, Outcome]] = []
        for member, where in self.unit.members:
            logps = values[where]
            outcomes.append((member, logps if np.isfinite(logps).all() else NOT_FINITE))
        return outcomes

    def tokens_per_second(self) -> float:
        """How fast the device computed it, once it has landed."""
        return self.unit.tokens / max(self.landed.seconds_since(self.began), 1e-6)


class Prepared:
    """Units, each made in the background while the one before it is computed; a context manager.

    Args:
        units: made one at a time; None stands for "nothing to prepare at the moment", and is made without waiting.
    """

    def __init__(self, units: Iterable[Unit | None]) -> None:
        self._units = iter(units)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="reflogp-pack")
        self._coming = self._background.submit(self._make)

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *exc: object) -> None:
        self._background.shutdown(cancel_futures=True)

    def take(self, flying: InFlight | None) -> Unit | None:
        """The next unit; None when there is none yet and nothing flies any more that could be waited for.

        Raises StopIteration at the end, and what making a unit raised.
        """
        while True:
            while flying is not None and not self._coming.done():
                if flying.landed.has_passed():
                    return None
                wait([self._coming], _LOOK_SECONDS)
            is_end, unit = self._coming.result()
            if is_end:
                raise StopIteration
            self._coming = self._background.submit(self._make)
            if unit is not None or flying is None or flying.landed.has_passed():
                return unit
            wait([self._coming], _LOOK_SECONDS)

    def _make(self) -> tuple[bool, Unit | None]:
        try:
            return False, next(self._units)
        except StopIteration:
            return True, None
