"""Queue misses for workers: group misses by prompt, divide them into units, and retry the units of lost workers.

A miss is a sequence that the store lacks. A unit is a group of misses that one worker scores together.

If a worker dies, each of its units is split into halves, and so on; see `isolation`.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from reflogp.scoring.isolation import Isolation
from reflogp.scoring.runs.pipeline import COMMIT_SECONDS, Miss

#: Number of sequences in the first units, before a worker's rate is known, and minimum number in later units.
LEAST = 8
#: Minimum scoring time of a unit in seconds, so that commits take only a small fraction of the time.
_LEAST_SECONDS = 2.0
#: Approximate number of units per worker into which the remaining sequences are divided. More units need more commits; with
#: fewer units, idle workers wait longer for the last unit.
_PARTS = 4
#: Maximum number of bytes of images in a unit, unless a single sequence has more.
_IMAGE_BYTES = 32 << 20
#: Seconds of scoring after which a unit counts half as much in the measured rate.
_HALVED_SECONDS = 30.0


@dataclass(eq=False)
class Unit:
    """Misses that one worker scores and commits together.

    Attributes:
        again: True if the unit is retried after the loss of a worker; the store may already have some of its sequences.
        suspect: True if a worker died while it was processing this unit or a larger unit from which this unit was split. One of
            this unit's sequences may be the cause.
    """

    misses: list[Miss]
    again: bool = False
    suspect: bool = False


class UnitQueue:
    """A queue of misses and of units to retry."""

    def __init__(self) -> None:
        self._isolation: Isolation[Miss] = Isolation()
        self._groups: OrderedDict[bytes, deque[Miss]] = OrderedDict()  # by the prompt's digest
        self._again: deque[Unit] = deque()
        self._grouped = 0

    def __len__(self) -> int:
        return self._grouped + sum(len(unit.misses) for unit in self._again)

    def put(self, misses: list[Miss]) -> None:
        for miss in misses:
            self._groups.setdefault(_prompt(miss), deque()).append(miss)
        self._grouped += len(misses)

    def take(self, size: int) -> Unit | None:
        """Remove and return the next unit, or None if there is none.

        Units to retry come first. A new unit has up to `size` sequences. Sequences with the same prompt are split across units
        only if there are more than `size` of them, or if the unit has no room for all their images.
        """
        if self._again:
            return self._again.popleft()
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
        return bool(self._again) and self._again[0].suspect

    def put_back(self, unit: Unit) -> None:
        """Queue a lost worker's unit again, ahead of all other units."""
        unit.again = True
        self._again.appendleft(unit)

    def died_at(self, unit: Unit) -> Miss | None:
        """Queue the parts of a unit whose worker died ahead of all other units; or return the miss that killed two workers."""
        parts, killer = self._isolation.died(unit.misses)
        self._again.extendleft(Unit(part, again=True, suspect=True) for part in reversed(parts))
        return killer


def _prompt(miss: Miss) -> bytes:
    return hashlib.blake2b(np.asarray(miss.sequence.prompt_ids, np.int64).tobytes(), digest_size=16).digest()


def _fits(miss: Miss, images: dict[bytes, int]) -> bool:
    """Add a miss's images to the images of a unit, and return True. If they do not all fit, add none and return False.

    `images` is a dict from the digest of each image in the unit to its size in bytes.
    """
    own = {picture.digest: picture.size for picture in miss.sequence.pictures}
    both = images | own
    if images and len(both) > len(images) and sum(both.values()) > _IMAGE_BYTES:
        return False
    images |= own
    return True


class Rate:
    """The number of sequences that one worker scores per second, as an average in which older units have less weight."""

    def __init__(self) -> None:
        self._sequences = self._seconds = 0.0

    def add(self, sequences: int, seconds: float) -> None:
        """Add a scored unit.

        Args:
            seconds: number of seconds until the unit's result arrived, counted from the time when the unit was sent or from the
                arrival of the worker's previous result, whichever is later. It is about 0 if both results arrive together.
        """
        kept = 0.5 ** (seconds / _HALVED_SECONDS)
        self._sequences = kept * self._sequences + sequences
        self._seconds = kept * self._seconds + seconds

    def per_second(self) -> float | None:
        return self._sequences / self._seconds if self._seconds else None


def unit_size(left: int, workers: int, per_second: float | None, most: int) -> int:
    """Return the number of sequences for the next unit.

    The number is a quarter of one worker's share of the remaining sequences, within these limits. If two limits contradict each
    other, the limit that is listed later applies.

    1. At most the number of sequences that a worker scores in 30 seconds.
    2. At least the number of sequences that a worker scores in 2 seconds.
    3. At most the worker's whole share.
    4. At least 8.
    5. At most `most`.

    Before the first result, the number is 8, or `most` if that is smaller.
    """
    if per_second is None:
        return min(most, LEAST)
    share = math.ceil(left / (_PARTS * workers))
    least, longest = (int(per_second * seconds) for seconds in (_LEAST_SECONDS, COMMIT_SECONDS))
    even = math.ceil(left / workers)  # if the rate is wrong, the other workers must not be idle for long
    return min(most, max(LEAST, min(even, max(least, min(share, longest)))))
