"""Queue misses for workers: group them by prompt, cut units from them, and retry the units of lost workers.

A sequence that kills its worker is found by halving the unit.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from reflogp.scoring.runs.committer import COMMIT_SECONDS
from reflogp.scoring.runs.pending import Miss

#: Number of sequences of the first units, before a worker's rate is known, and minimum number for later units.
LEAST = 8
#: Shortest scoring time of a unit in seconds, so that commits take a small share of the time.
_LEAST_SECONDS = 2.0
#: About how many units each worker gets of the remaining sequences. More units need more commits; with fewer, idle workers wait
#: longer for the last unit.
_PARTS = 4
#: A unit has images of at most this many bytes, or a single sequence.
_IMAGE_BYTES = 32 << 20
#: Seconds of scoring after which a unit counts half as much in the measured rate.
_HALVED_SECONDS = 30.0


@dataclass(eq=False)
class Unit:
    """Misses that one worker scores and commits together.

    Attributes:
        again: True if a worker that had the unit is gone, so that the store may have some of its sequences.
        suspect: True if that worker died, so that a sequence of the unit may be the reason.
        deaths: number of workers that died at the unit; counted only for a single sequence.
    """

    misses: list[Miss]
    again: bool = False
    suspect: bool = False
    deaths: int = 0


class UnitQueue:
    """The queue of misses and of units to retry."""

    def __init__(self) -> None:
        self._groups: OrderedDict[bytes, deque[Miss]] = OrderedDict()  # by prompt
        self._again: deque[Unit] = deque()
        self._grouped = 0

    def __len__(self) -> int:
        return self._grouped + sum(len(unit.misses) for unit in self._again)

    def put(self, misses: list[Miss]) -> None:
        """Queue misses, each next to the others with its prompt."""
        for miss in misses:
            self._groups.setdefault(_prompt(miss), deque()).append(miss)
        self._grouped += len(misses)

    def take(self, size: int, suspects: bool = True) -> Unit | None:
        """Remove and return the next unit, or None if there is none.

        Units to retry come first. A new unit has up to `size` sequences, and sequences of one prompt are split only if they are
        more than `size`.

        Args:
            size: maximum number of sequences of a new unit.
            suspects: also return units at which a worker died.
        """
        for at, unit in enumerate(self._again):
            if suspects or not unit.suspect:
                del self._again[at]
                return unit
        chosen: list[Miss] = []
        images: dict[bytes, int] = {}
        while self._groups:
            prompt, group = next(iter(self._groups.items()))
            if chosen and len(chosen) + len(group) > size:
                break
            while group and len(chosen) < size and _fits(group[0], images):
                chosen.append(group.popleft())
            if group:
                break
            del self._groups[prompt]
        self._grouped -= len(chosen)
        return Unit(chosen) if chosen else None

    def is_suspect(self) -> bool:
        """Return True if the next unit is a retry after a worker died at it."""
        return bool(self._again) and self._again[0].suspect

    def put_back(self, unit: Unit) -> None:
        """Queue a lost worker's unit again, before all others."""
        unit.again = True
        self._again.appendleft(unit)

    def died_at(self, unit: Unit) -> Miss | None:
        """Split a unit at which a worker died into halves, and queue them again, before all others.

        A single sequence is queued once more. After its second death it is not queued but returned.
        """
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


def _prompt(miss: Miss) -> bytes:
    return hashlib.blake2b(np.asarray(miss.sequence.prompt_ids, np.int64).tobytes(), digest_size=16).digest()


def _fits(miss: Miss, images: dict[bytes, int]) -> bool:
    """Add a miss's images to a unit's (digest -> bytes). Returns False, and adds none, if a unit cannot hold them all."""
    own = {} if miss.sequence.images is None else {image.digest: image.size for image in miss.sequence.images.pictures}
    both = images | own
    if images and len(both) > len(images) and sum(both.values()) > _IMAGE_BYTES:
        return False
    images |= own
    return True


class Rate:
    """Measures how many sequences one worker scores in a second, as an average in which old units lose weight."""

    def __init__(self) -> None:
        self._sequences = self._seconds = 0.0

    def add(self, sequences: int, seconds: float) -> None:
        """Add a scored unit.

        Args:
            sequences: number of its sequences.
            seconds: how long its worker was busy with it alone, 0 if it was scored in the same pass as the unit before it.
        """
        kept = 0.5 ** (seconds / _HALVED_SECONDS)
        self._sequences = kept * self._sequences + sequences
        self._seconds = kept * self._seconds + seconds

    def per_second(self) -> float | None:
        """Return sequences per second of one worker; None before the first unit."""
        return self._sequences / self._seconds if self._seconds else None


def unit_size(left: int, workers: int, per_second: float | None, most: int) -> int:
    """Return the number of sequences of the next unit.

    It is a share of the remaining sequences, between what a worker scores in two seconds and what it scores in 30. It is never
    more than the remaining sequences divided by the number of workers, unless that is less than 8.

    Args:
        left: about how many sequences no worker has yet.
        workers: number of workers that share them.
        per_second: sequences that a worker scores per second; None before the first unit.
        most: maximum number of sequences of one commit.
    """
    if per_second is None:
        return min(most, LEAST)
    share = math.ceil(left / (_PARTS * workers))
    least, longest = (int(per_second * seconds) for seconds in (_LEAST_SECONDS, COMMIT_SECONDS))
    even = math.ceil(left / workers)  # if the rate is wrong, the other workers must not be idle for long
    return min(most, max(LEAST, min(even, max(least, min(share, longest)))))
