"""Suspend the processes of sides that are not being measured: an idle vLLM process still uses the cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil


class OwnProcesses:
    """The processes that each side started. A side's processes run only while the side is measured.

    On 2 cores, with an idle vLLM process and an idle vLLM server, TRL reached only half of its speed.
    """

    def __init__(self) -> None:
        self._of_sides: dict[str, list[psutil.Process]] = {}

    def start(self, make: Callable[[], Any]) -> Any:
        """Create a side, remember the processes that it starts, and suspend them; return the side."""
        before = set(_descendants())
        side = make()
        self._of_sides[side.name] = [process for process in _descendants() if process not in before]
        self._send(side.name, psutil.Process.suspend)
        return side

    @contextmanager
    def running(self, side: Any) -> Iterator[None]:
        """Let the processes of this side run during the `with` block."""
        self._send(side.name, psutil.Process.resume)
        try:
            yield
        finally:
            self._send(side.name, psutil.Process.suspend)

    def resume(self) -> None:
        """Let all processes run, so that they can exit."""
        for name in self._of_sides:
            self._send(name, psutil.Process.resume)

    def _send(self, name: str, signal: Callable[[psutil.Process], None]) -> None:
        for process in self._of_sides.get(name, []):
            if process.is_running():
                signal(process)


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)
