"""Prepare passes in the background and collect their values, so that the device does not wait for the host."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from reflogp.scoring.torch_engine.device import Mark
from reflogp.scoring.torch_engine.packing import Pack
from reflogp.scoring.torch_engine.sequences import NOT_FINITE, Operations, Outcome, Sequence

#: Seconds between two checks whether the values of a pass are on the host, while the next pass is not prepared yet.
_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Unit:
    """One pass.

    Attributes:
        work: a pack or a padded batch.
        members: (index of a sequence, places of its values among the values of the pass).
        tokens: size of the pass, padding included.
        operations: operations of the pass.
        with_images: the sequences of a pack, if they have images.
    """

    work: Pack | list[Sequence]
    members: tuple[tuple[int, npt.NDArray[np.int64]], ...]
    tokens: int
    operations: Operations
    with_images: list[Sequence] | None = None


@dataclass(frozen=True)
class InFlight:
    """A launched pass whose values are not on the host yet.

    Attributes:
        values: host memory, complete when `landed` has passed.
        began, landed: marks before the pass and after the copy of its values.
    """

    unit: Unit
    values: torch.Tensor
    began: Mark
    landed: Mark

    def land(self) -> list[tuple[int, Outcome]]:
        """Wait for the values; return (index of a sequence, its token_logps or an error text if they are not finite)."""
        self.landed.wait()
        values = self.values.numpy()
        outcomes: list[tuple[int, Outcome]] = []
        for member, where in self.unit.members:
            logps = values[where]
            outcomes.append((member, logps if np.isfinite(logps).all() else NOT_FINITE))
        return outcomes

    def tokens_per_second(self) -> float:
        """Return the speed at which the device computed the pass, whose values must be on the host."""
        return self.unit.tokens / max(self.landed.seconds_since(self.began), 1e-6)


class Prepared:
    """A context manager that makes each unit in the background while the previous unit is computed.

    Args:
        units: iterated in a thread, one unit at a time. The iterable yields None, without waiting, if there is nothing to
            prepare at the moment.
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
        """Wait until the next unit is made, and return it.

        Returns None if the values of the pass in flight are on the host and no unit is ready, or if no pass is in flight and
        there is nothing to prepare at the moment.

        Raises StopIteration after the last unit, and any error raised while a unit was made.
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
