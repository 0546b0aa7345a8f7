"""Run work on all processes of a distributed run. If the work fails on one process, an error is raised on all processes, so
that none of them waits forever."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch.distributed as dist

from reflogp.trainer.errors import RankFailedError

T = TypeVar("T")

#: Seconds between the heartbeats that the processes exchange.
_BEAT = 5.0


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather(value: T) -> list[T]:
    """Return, on every process, the list of the `value` arguments of all processes, in rank order."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_all_ranks(what: str, work: Callable[[], T]) -> T:
    """Run `work` on every process, and return this process's result once all processes have succeeded.

    The work may take longer than the process group's timeout (10 minutes with NCCL): it runs in a thread, while the processes
    exchange heartbeats. It must not use collective operations.

    Raises what `work` raised on this process, or RankFailedError if it failed only on others; the message begins with `what`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="reflogp") as thread:
        return outcome_on_all_ranks(what, thread.submit(work))


def outcome_on_all_ranks(what: str, future: Future[T], on_wait: Callable[[], None] | None = None) -> T:
    """Wait for work that has already begun on every process, then return or raise as `on_all_ranks` does. Until this process's
    work is done, call `on_wait` about every 5 seconds."""
    while True:
        wait([future], timeout=_BEAT)
        if on_wait is not None and not future.done():
            on_wait()
        if all(gather(future.done())):
            break
    error = future.exception()
    for number, message in enumerate(gather(None if error is None else f"{type(error).__name__}: {error}")):
        if message is not None and error is None:
            raise RankFailedError(f"{what} failed on rank {number}: {message}")
    return future.result()
