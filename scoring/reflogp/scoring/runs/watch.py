"""Notice workers that hang: workers whose process does not respond, and workers that score nothing for much too long.

Slow work is not a hang. A worker may load its model for as long as it needs, and so may the run's first unit, if the process
responds. Afterwards, the limit follows from the slowest step of the run so far. Only time in which the run itself is running
counts, because a machine or a terminal may be suspended together with its workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

#: Seconds between two questions to a worker, and the number of seconds after which a worker that does not respond hangs.
PING_SECONDS, SILENT_SECONDS = 10.0, 300.0
#: When the run's first unit is done, a worker hangs if it scores nothing for STUCK_SECONDS, and for STUCK_STEPS times as long
#: as the slowest step of any worker so far. A step is the loading of the model, or the time between two results.
STUCK_SECONDS, STUCK_STEPS = 1800.0, 20
#: Maximum number of seconds that are counted between two calls of `Clock.tick`, which are at most about one second apart.
_TICK_SECONDS = 5.0


class Clock:
    """The seconds for which the run was running, and the slowest step of its workers.

    Attributes:
        slowest: number of seconds of the slowest step.
        longest: number of tokens of the longest sequence that was scored so far; 0 if nothing has been scored yet.
    """

    def __init__(self) -> None:
        self.now = self.slowest = 0.0
        self.longest = 0
        self._ticked_at = time.monotonic()

    def tick(self) -> None:
        at = time.monotonic()
        self.now += min(at - self._ticked_at, _TICK_SECONDS)
        self._ticked_at = at


class Pulse:
    def __init__(self, clock: Clock, ask: Callable[[], Future[int] | None]) -> None:
        self._clock = clock
        self._ask = ask
        self._asked: Future[int] | None = None
        self._asked_at = self._moved_at = self._begun_at = clock.now
        self._scored = 0
        self._is_watched = True

    def note_loaded(self) -> None:
        """Count the time since the worker began as a step."""
        self._clock.slowest = max(self._clock.slowest, self._clock.now - self._begun_at)
        self._moved_at = self._clock.now

    def problem(self, longest: int) -> str | None:
        """Return why the worker hangs, or None. This method never blocks."""
        clock = self._clock
        if self._asked is None:
            if clock.now - self._asked_at >= PING_SECONDS:
                self._asked, self._asked_at = self._ask(), clock.now
                self._is_watched = self._asked is not None
        elif self._asked.done():
            scored = self._scored if self._asked.exception() else self._asked.result()
            if scored != self._scored and longest:
                clock.slowest = max(clock.slowest, clock.now - self._moved_at)
            if scored != self._scored or not longest:
                self._scored, self._moved_at = scored, clock.now
            self._asked = None
        elif clock.now - self._asked_at > SILENT_SECONDS:
            return f"its process has not responded for {clock.now - self._asked_at:.0f} s"
        if not longest or not clock.longest or not self._is_watched:
            return None
        # A pass takes at most the square of the length: attention does, everything else grows with the length.
        steps = STUCK_STEPS * max(1.0, longest / clock.longest) ** 2
        if clock.now - self._moved_at > max(STUCK_SECONDS, steps * clock.slowest):
            return f"it has scored nothing for {(clock.now - self._moved_at) / 60:.0f} min, although its process responds"
        return None
