"""Work that the processes of a distributed run do together: what fails on one fails on all, and nobody waits for the dead.

Knows torch.distributed's process group and accelerate's numbering of processes. Does not know what the work is. Called by the
trainers' join and by the audit.
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

#: Seconds between two signs of life.
_BEAT = 5.0


@dataclass(frozen=True)
class Rank:
    """This process among all.

    Attributes:
        rank: its number.
        count: processes in all.
        local_rank: its number on its node; 0 does the node's lookups.
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
    """Every process' value, in the order of ranks, on every process."""
    rank = Rank.here()
    if rank.count == 1:
        return [value]
    values: list[T] = [value] * rank.count
    dist.all_gather_object(values, value)
    return values


def on_all_ranks(what: str, work: Callable[[], T]) -> T:
    """Run `work` on every process, and give this one's result once all have succeeded.

    Args:
        what: what is done, for the error on the others.
        work: may take part in collective operations itself.

    Raises:
        what `work` raised, on the process where it did; RankFailedError, with its words, on all others.
    """
    if Rank.here().count == 1:
        return work()
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # told to the others, and raised again
        future.set_exception(error)
    return _agreed(what, future)


def on_all_ranks_for_long(what: str, work: Callable[[], T]) -> T:
    """As `on_all_ranks`, for work that may outlast the process group's timeout (10 minutes with NCCL).

    Args:
        work: takes no part in collective operations: it runs in a thread, while the processes tell each other that they live.
    """
    if Rank.here().count == 1:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="reflogp-together") as thread:
        return outcome_on_all_ranks(what, thread.submit(work))


def outcome_on_all_ranks(what: str, future: Future[T], on_wait: Callable[[], None] | None = None) -> T:
    """As `on_all_ranks_for_long`, for work that is under way on every process; `on_wait` is called while this one's is slow."""
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
    """Of values in the order of ranks, the one that this node's first process gave."""
    rank = Rank.here()
    return values[rank.rank - rank.local_rank]
