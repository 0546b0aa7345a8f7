"""The room for datasets: bytes of uploads and fetched files together, bounded by one setting."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock


class DatasetRoom:
    """Counts bytes. Safe to use from several threads.

    Args:
        most: bytes of all datasets together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._used = 0
        self._lock = Lock()
        self._sweepers: list[Callable[[], object]] = []

    @property
    def used(self) -> int:
        return self._used

    def add_sweeper(self, sweep: Callable[[], object]) -> None:
        """Name a function that deletes files which nobody needs, and gives their room back."""
        self._sweepers.append(sweep)

    def fits(self, size: int) -> bool:
        """Whether there is room; sweeps where there is not. Blocks."""
        if self._used + size > self.most:
            self.sweep()
        return self._used + size <= self.most

    def take(self, size: int) -> bool:
        """Take room for bytes that have arrived; False, and none is taken, where there is none. Does not block."""
        with self._lock:
            if self._used + size > self.most:
                return False
            self._used += size
            return True

    def hold(self, size: int) -> None:
        """Count a file that is there already."""
        with self._lock:
            self._used += size

    def give(self, size: int) -> None:
        """Give room back."""
        with self._lock:
            self._used -= size

    def sweep(self) -> None:
        """Delete what nobody needs. Blocks."""
        for sweep in self._sweepers:
            sweep()
