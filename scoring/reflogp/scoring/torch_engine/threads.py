"""Keep the number of OpenMP threads of a process low, because torch is slower on a CPU if there are more threads than cores."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def run_in_own_thread(function: Callable[[], Result]) -> Result:
    """Call a function in a thread that ends with the call; return its result or raise its error.

    libgomp keeps a group of threads for each thread that ever computed in parallel, until that thread ends. If all groups
    together have more threads than the process has cores, they sleep between two operations instead of waiting actively
    (GOMP_SPINCOUNT in libgomp's manual): a model that was loaded in one thread and computed in another ran at 0.65 of its rate
    on two cores. If the caller is interrupted, the call goes on in its thread.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="reflogp-load", daemon=True).start()
    return outcome.result()
