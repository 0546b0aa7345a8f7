"""Prepare forward passes in the background and collect their values, so that the device rarely waits for the host."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from reflogp.scoring.torch_engine.device import Mark
from reflogp.scoring.torch_engine.packing import Pack
from reflogp.scoring.torch_engine.sequences import NOT_FINITE, Outcome, Sequence, TokenCounts, top_logps_of

#: Seconds between checks of whether the current pass's values are on the host, and of whether there is anything to prepare.
_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Unit:
    """A forward pass to run: the input of the pass, and the indices of each sequence's values in the output of the pass.

    Attributes:
        members: for each sequence, its index and the indices of its values in the output of the pass. In the units that
            `TorchEngine.flow` launches, the indices of the sequences are counted across all groups.
        tokens: number of tokens in the pass, including padding.
        token_counts: token counts of the pass, without padding.
    """

    work: Pack | list[Sequence]
    members: tuple[tuple[int, npt.NDArray[np.int64]], ...]
    tokens: int
    token_counts: TokenCounts
    with_images: list[Sequence] | None = None
    is_single: bool = False


@dataclass(frozen=True)
class InFlight:
    """A launched pass whose values may not be on the host yet.

    Attributes:
        values: tensor on the host that receives the log-probs; it is complete once the mark `landed` has passed.
        began, landed: marks in the device's stream. `began` comes before the pass, `landed` after the copy of the pass's values
            to the host.
    """

    unit: Unit
    values: torch.Tensor
    began: Mark
    landed: Mark

    def land(self) -> list[tuple[int, Outcome]]:
        self.landed.wait()
        values = self.values.numpy()
        return [(member, _outcome(values[where])) for member, where in self.unit.members]

    def tokens_per_second(self) -> float:
        """Return how many tokens per second the device processed in this pass."""
        return self.unit.tokens / max(self.landed.seconds_since(self.began), 1e-6)


def _outcome(values: npt.NDArray[np.float32]) -> Outcome:
    if not np.isfinite(values).all():
        return NOT_FINITE
    return values if values.ndim == 1 else top_logps_of(values)


class Prepared:
    """A context manager that prepares each unit (a forward pass) in the background while the device computes the previous one.

    Args:
        units: iterable that prepares a unit when the unit is requested. A background thread requests one unit in advance. When
            there is nothing to prepare yet, the iterable must yield None instead of blocking.
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
        """Wait until the next unit is ready, and return it.

        Returns None if the values of the pass in flight arrive on the host before the next unit is ready. Also returns None if
        no pass is in flight and there is nothing to prepare yet.

        Raises StopIteration after the last unit, and re-raises any error that occurred while a unit was being prepared.
        """
        while True:
            while flying is not None and not self._coming.done():
                if flying.landed.has_passed():
                    return None
                wait([self._coming], _LOOK_SECONDS)
            is_end, unit = self._coming.result()
            if is_end:
                raise StopIteration
            is_waiting = unit is None and flying is not None and not flying.landed.has_passed()
            if is_waiting:
                time.sleep(_LOOK_SECONDS)
            self._coming = self._background.submit(self._make)
            if not is_waiting:
                return unit

    def _make(self) -> tuple[bool, Unit | None]:
        try:
            return False, next(self._units)
        except StopIteration:
            return True, None
