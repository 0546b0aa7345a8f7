"""What waits for a worker: misses in the order of their prompts, cut into units, and the units of workers that are gone.

Knows how large a unit shall be, and how to find a sequence that kills workers. Does not know workers. Used by `scorer`.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from reflogp.scoring.runs.commits import COMMIT_SECONDS
from reflogp.scoring.runs.pending import Miss

#: Sequences of the first units, before it is known how fast they go, and of a unit at the least.
LEAST = 8
#: Seconds of scoring in a unit at the least, so that commits take a small share of the time.
_LEAST_SECONDS = 2.0
#: Units of what is left that each worker gets, about: more make commits, fewer make workers wait for the last one.
_PARTS = 4


@dataclass(eq=False)
class Unit:
    """Misses that one worker scores and commits at once.

    Attributes:
        again: a worker that had it is gone, so that some of it may be stored.
        suspect: that worker died, so that it may be the reason.
        deaths: of workers at it, counted where it is a single sequence.
    """

    misses: list[Miss]
    again: bool = False
    suspect: bool = False
    deaths: int = 0


class UnitQueue:
    """Misses in line."""

    def __init__(self) -> None:
        self._groups: OrderedDict[bytes, deque[Miss]] = OrderedDict()  # by prompt
        self._again: deque[Unit] = deque()
        self._grouped = 0

    def __len__(self) -> int:
        return self._grouped + sum(len(unit.misses) for unit in self._again)

    def put(self, misses: list[Miss]) -> None:
        """Put misses in line, each beside those of its prompt."""
        for miss in misses:
            prompt = hashlib.blake2b(np.asarray(miss.sequence.prompt_ids, np.int64).tobytes(), digest_size=16).digest()
            self._groups.setdefault(prompt, deque()).append(miss)
        self._grouped += len(misses)

    def take(self, size: int, suspects: bool = True) -> Unit | None:
        """The next unit; of about `size` sequences, and no prompt's are parted that would fit one. None where there is none.

        Args:
            suspects: it may be one that a worker died at.
        """
        for at, unit in enumerate(self._again):
            if suspects or not unit.suspect:
                del self._again[at]
                return unit
        chosen: list[Miss] = []
        while self._groups:
            prompt, group = next(iter(self._groups.items()))
            if chosen and len(chosen) + len(group) > size:
                break
            chosen += [group.popleft() for _ in range(min(len(group), size))]
            if not group:
                del self._groups[prompt]
            if len(chosen) >= size:
                break
        self._grouped -= len(chosen)
        return Unit(chosen) if chosen else None

    def is_suspect(self) -> bool:
        """Whether the next unit is one that a worker died at."""
        return bool(self._again) and self._again[0].suspect

    def put_back(self, unit: Unit) -> None:
        """A unit of a worker that left goes next."""
        unit.again = True
        self._again.appendleft(unit)

    def died_at(self, unit: Unit) -> Miss | None:
        """A unit that a worker died at goes next, in halves; a single sequence once more, and then it is given back."""
        if len(unit.misses) == 1:
            unit.deaths += 1
            if unit.deaths > 1:
                return unit.misses[0]
            unit.suspect = True
            self.put_back(unit)
            return None
        middle = (len(unit.misses) + 1) // 2
        for half in (unit.misses[middle:], unit.misses[:middle]):
            self._again.appendleft(Unit(half, again=True, suspect=True))
        return None


def unit_size(left: int, workers: int, per_second: float | None, most: int) -> int:
    """Sequences of the next unit: a share of what is left, and no more than a worker scores between two commits.

    Args:
        left: sequences that no worker has yet, about.
        workers: that share them.
        per_second: sequences that a worker scores in a second; None before the first unit.
        most: sequences of one commit.
    """
    if per_second is None:
        return min(most, LEAST)
    share = math.ceil(left / (_PARTS * workers))
    least, longest = (int(per_second * seconds) for seconds in (_LEAST_SECONDS, COMMIT_SECONDS))
    return min(most, max(LEAST, least, min(share, longest)))
