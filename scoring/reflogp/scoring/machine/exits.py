"""Describe why a process ended."""

from __future__ import annotations

import signal


def reason_of(status: int, log: str) -> str:
    """Return in words why a process ended.

    Args:
        status: exit status; negative for a signal.
        log: name of the log that has the process's output.
    """
    if status < 0:
        name = signal.Signals(-status).name if -status in {int(s) for s in signal.Signals} else str(-status)
        return f"killed by {name}" + (" (out of memory, perhaps)" if -status == signal.SIGKILL else "")
    return f"it ended with status {status}; its last words are in {log}"
