"""Run work on all processes of a distributed run. If the work fails on one process, an error is raised on all processes, so
that none of them waits forever.

The functions of this module use torch.distributed's default process group, and get a process's number on its node from
accelerate.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from accelerate import PartialState

from reflogp.trainer.errors import RankFailedError

T = TypeVar("T")

#: Seconds between the heartbeats that the processes exchange.
_BEAT = 5.0


@dataclass(frozen=True)
class Rank:
    """The position of this process in a distributed run.

    Attributes:
        rank: number of the process in the run, starting at 0.
        count: number of processes.
        local_rank: number of the process on its node, starting at 0. The process with local_rank 0 looks up values for all
            processes on its node.
    """

    rank: int
    count: int
    local_rank: int

    @classmethod
    def here(cls) -> Rank:
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, 0)
        return cls(dist.get_rank(), dist.get_world_size(), PartialState().local_process_index)


def gather(value: T) -> list[T]:
    """Return, on every process, the list of the `value` arguments of all processes, in rank order."""
    rank = Rank.here()
    if rank.count == 1:
        return [value]
    values: list[T] = [value] * rank.count
    dist.all_gather_object(values, value)
    return values


def on_all_ranks(what: str, work: Callable[[], T]) -> T:
    """Run `work` on every process, and return this process's result once all processes have succeeded.

    Args:
        what: description of the work, such as "reading the datasets". The message of a RankFailedError begins with it.
        work: the function to run; it may use collective operations.

    Raises:
        Exception: `work` failed on this process. The exception that `work` raised is raised again.
        RankFailedError: `work` failed, but only on other processes. The message contains the exception text of the failed
            process with the lowest rank.
    """
    if Rank.here().count == 1:
        return work()
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # `_agreed` sends the error's text to the other processes and raises the error here
        future.set_exception(error)
    return _agreed(what, future)


def on_all_ranks_for_long(what: str, work: Callable[[], T]) -> T:
    """Run `work` as `on_all_ranks` does, but allow it to take longer than the process group's timeout.

    By default, this timeout is 10 minutes with NCCL.

    Args:
        what: description of the work, such as "reading the datasets". The message of a RankFailedError begins with it.
        work: the function to run. It runs in a thread while the processes exchange heartbeats, and must not use collective
            operations.
    """
    if Rank.here().count == 1:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="reflogp-together") as thread:
        return outcome_on_all_ranks(what, thread.submit(work))


def outcome_on_all_ranks(what: str, future: Future[T], on_wait: Callable[[], None] | None = None) -> T:
    """Wait for work that has already begun on every process, then return or raise as `on_all_ranks_for_long` does.

    Args:
        what: description of the work, such as "reading the datasets". The message of a RankFailedError begins with it.
        future: the future of this process's work.
        on_wait: function that is called about every 5 seconds until this process's work is done.
    """
    while True:
        wait([future], timeout=_BEAT)
        if on_wait is not None and not future.done():
            on_wait()
        if all(gather(future.done())):
            return _agreed(what, future)


def _agreed(what: str, future: Future[T]) -> T:
    problem = future.exception()
    problems = gather(None if problem is None else f"{type(problem).__name__}: {problem}")
    for number, words in enumerate(problems):
        if words is not None and problem is None:
            raise RankFailedError(f"{what} failed on rank {number} (of {len(problems)} processes): {words}")
    return future.result()


def of_my_node(values: list[T]) -> T:
    """Return the value of the first process on this node, given the values of all processes in rank order."""
    rank = Rank.here()
    return values[rank.rank - rank.local_rank]
