"""Keep essential asyncio tasks of a service running. If a task fails, log the error and start the task again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

#: Seconds before a failed task is started again: _FIRST_PAUSE, doubled after each failure, at most _LONGEST_PAUSE. The pause is
#: _FIRST_PAUSE again if the task ran for _QUIET seconds without a failure.
_FIRST_PAUSE, _LONGEST_PAUSE, _QUIET = 0.2, 30.0, 60.0


async def supervise(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` until it returns without an exception. After an exception, log the exception and run `work` again.

    Args:
        name: name of the task in the log.
    """
    pause = _FIRST_PAUSE
    while True:
        began = time.monotonic()
        try:
            await work()
            return
        except Exception:
            logger.exception("%s failed and is started again", name)
        if time.monotonic() - began > _QUIET:
            pause = _FIRST_PAUSE
        await asyncio.sleep(pause)
        pause = min(_LONGEST_PAUSE, pause * 2)
