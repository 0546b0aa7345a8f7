"""Help with another worker's job: receive units, score them on this worker's engine between online requests, and commit them.

`helpers` is the other side. Runs in the worker's job thread.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from reflogp.scoring.runs.spread.units import IN_FLIGHT, UnitScorer
from reflogp.service.worker.engine_loop import EngineLoop
from reflogp.service.worker.helpers import encoded
from reflogp.service.worker.job_engine import JobEngine
from reflogp.service.worker.protocol import HelpOrder
from reflogp.store import LogprobTable

_LOOK_SECONDS = 0.1

#: A frame of the job's worker, and the unit that it carries.
Asked = tuple[dict[str, Any], bytes]


def help_with(
    order: HelpOrder,
    table: LogprobTable,
    loop: EngineLoop,
    asked: queue.SimpleQueue[Asked],
    send: Callable[[dict[str, Any]], None],
    check: Callable[[], None],
) -> None:
    """Help until `check` raises. Values computed by then are committed; the rest is left to the job's worker.

    Args:
        asked: requests of the job's worker.
        send: sends the frame `helping` when the engine is loaded, and the answers.
        check: called now and then; raises to stop.

    Raises the errors of `check`, of the engine and of the store.
    """
    loaded = loop.engine(order.reference_id, check)
    units = UnitScorer(JobEngine(loop, loaded, order.reference_id, (), order.poison, lambda _: None, check), table)
    failed: list[BaseException] = []

    def answer(message: dict[str, Any], content: bytes) -> None:
        try:
            value = units.score(content, message["again"]) if message["method"] == "score" else units.peak()
        except BaseException as error:
            failed.append(error)
            return
        which = {"job": order.job, "run": message["run"], "number": message["number"]}
        send({"op": "answer", **which, "value": encoded(value)})

    send({"op": "helping", "job": order.job, "provenance": units.provenance})
    with ThreadPoolExecutor(IN_FLIGHT + 1) as pool:
        try:
            while True:
                check()
                if units.error is not None:
                    raise units.error
                if failed:  # unanswered units go to other workers once this one has left
                    raise failed[0]
                try:
                    pool.submit(answer, *asked.get(timeout=_LOOK_SECONDS))
                except queue.Empty:
                    continue
        finally:
            units.stop()
