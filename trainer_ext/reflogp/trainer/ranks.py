"""Run work in all processes of a distributed run: if the work fails in one process, it fails in all, and no process waits
forever.

The functions use torch.distributed's process group and accelerate's numbering of processes.
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

#: Seconds between two heartbeats that the processes exchange.
_BEAT = 5.0


@dataclass(frozen=True)
class Rank:
    """The position of this process in a distributed run.

    Attributes:
        rank: number of the process in the run.
        count: number of processes.
        local_rank: number of the process on its node; process 0 of each node does the node's lookups.
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
    """Return every process' value, in the order of ranks, on every process."""
    rank = Rank.here()
    if rank.count == 1:
        return [value]
    values: list[T] = [value] * rank.count
    dist.all_gather_object(values, value)
    return values


def on_all_ranks(what: str, work: Callable[[], T]) -> T:
    """Run `work` on every process, and return this process' result after all have succeeded.

    Args:
        what: description of the work, for the error on the other processes.
        work: the function to run; it may use collective operations.

    Raises:
        the exception of `work` on the process where it was raised, and a RankFailedError with the exception's text on all other
        processes.
    """
    if Rank.here().count == 1:
        return work()
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # `_agreed` sends the error's text to the other processes, and raises the error
        future.set_exception(error)
    return _agreed(what, future)


def on_all_ranks_for_long(what: str, work: Callable[[], T]) -> T:
    """Run work as `on_all_ranks` does, even if it takes longer than the process group's timeout (10 minutes with NCCL).

    Args:
        what: description of the work, for the error on the other processes.
        work: the function to run, in a thread, while the processes exchange heartbeats. The function must not use collective
            operations.
    """
    if Rank.here().count == 1:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="reflogp-together") as thread:
        return outcome_on_all_ranks(what, thread.submit(work))


def outcome_on_all_ranks(what: str, future: Future[T], on_wait: Callable[[], None] | None = None) -> T:
    """Wait for work that has begun on every process, then return or raise as `on_all_ranks_for_long` does.

    Args:
        what: description of the work, for the error on the other processes.
        future: this process' work.
        on_wait: function that is called repeatedly while this process' work is not done.
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
            raise RankFailedError(f"{what} failed on process {number} of {len(problems)} ({words})")
    return future.result()


def of_my_node(values: list[T]) -> T:
    """Return the value of this node's first process, from values in the order of ranks."""
    rank = Rank.here()
    return values[rank.rank - rank.local_rank]
