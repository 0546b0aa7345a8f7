"""Keep a service's essential asyncio tasks running. If a task fails, log the error and restart the task."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

#: Seconds before a failed task is restarted: _FIRST_PAUSE, doubled after each failure, up to _LONGEST_PAUSE. The pause is reset
#: to _FIRST_PAUSE if the task ran for more than _QUIET seconds before it failed.
_FIRST_PAUSE, _LONGEST_PAUSE, _QUIET = 0.2, 30.0, 60.0


async def supervise(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` until it returns without an exception. If `work` raises an exception, log the exception and run `work` again.

    Args:
        name: name of the task in log messages.
    """
    pause = _FIRST_PAUSE
    while True:
        began = time.monotonic()
        try:
            await work()
            return
        except Exception:
            logger.exception('the task "%s" failed and will be restarted', name)
        if time.monotonic() - began > _QUIET:
            pause = _FIRST_PAUSE
        await asyncio.sleep(pause)
        pause = min(_LONGEST_PAUSE, pause * 2)
