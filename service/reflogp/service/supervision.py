"""Keep a service's essential asyncio tasks running. If a task fails, log the error and restart the task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

#: Seconds before a failed task is restarted.
_PAUSE = 1.0


async def supervise(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` until it returns without an exception. If `work` raises an exception, log the exception and run `work` again.

    Args:
        name: name of the task in log messages.
    """
    while True:
        try:
            await work()
            return
        except Exception:
            logger.exception('the task "%s" failed and will be restarted', name)
        await asyncio.sleep(_PAUSE)
