"""Bound the bytes of uploads and fetched dataset files together by one setting."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock


class DatasetQuota:
    """A count of bytes with a limit. Safe to use from several threads.

    Args:
        most: maximum bytes of all datasets together.
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
        """Register a function that deletes files which nobody needs, and gives their room back."""
        self._sweepers.append(sweep)

    def fits(self, size: int) -> bool:
        """Return whether `size` bytes fit; sweep first if they do not. Blocks."""
        if self._used + size > self.most:
            self.sweep()
        return self._used + size <= self.most

    def take(self, size: int) -> bool:
        """Take room for bytes that have arrived. Return False, and take nothing, if they do not fit. Does not block."""
        with self._lock:
            if self._used + size > self.most:
                return False
            self._used += size
            return True

    def hold(self, size: int) -> None:
        """Count a file that exists already."""
        with self._lock:
            self._used += size

    def give(self, size: int) -> None:
        """Give room back."""
        with self._lock:
            self._used -= size

    def sweep(self) -> None:
        """Delete the files that nobody needs. Blocks."""
        for sweep in self._sweepers:
            sweep()
