"""Let idle workers help with a running job, and pass frames between the owner of the job and its helpers.

All state belongs to the event loop. The content of a unit of work is never read here.

    owner    -> ask (+ unit), for a helper        helper -> helping, answer, helped
    service  -> helper, answer, gone to an owner; help, ask, stop to a helper
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from reflogp.service.ledger import Claim
from reflogp.service.models import JobProgress
from reflogp.service.pool import Pool, WorkerHandle
from reflogp.service.worker.protocol import HelpOrder

logger = logging.getLogger(__name__)

#: Seconds of work that a job must have left for help to be worthwhile: from a worker that has the model loaded, and from a
#: worker that must load it.
_LEFT_SECONDS, _LEFT_TO_LOAD_SECONDS = 1.0, 30.0
#: After this many failures of a worker with a job, the worker is not asked again to help with that job.
_FAILURES = 3


@dataclass(eq=False)
class _Help:
    """The help of one worker with the job of another worker.

    Attributes:
        owner: number of the worker that has the job.
        joined: whether the owner was informed of the helper.
        leaving: whether the helper was ordered to stop.
    """

    job: str
    owner: int
    joined: bool = False
    leaving: bool = False


class Helping:
    """Keeps track of the helpers, and relays their frames.

    Args:
        pool: holds the workers.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._helps: dict[int, _Help] = {}  # by helper
        self._failures: Counter[tuple[int, str]] = Counter()  # by worker and job

    def is_helping(self, number: int) -> bool:
        """Return whether a worker is helping, or has not stopped helping yet."""
        return number in self._helps

    def offer(self, claim: Claim, owner: int, progress: JobProgress, idle: list[WorkerHandle]) -> None:
        """Ask idle workers to help with a job if enough of the job is left.

        No model is unloaded for this. A search for a sequence that kills workers stays with the job's own worker.
        """
        left = progress.seconds_left
        if not progress.scored or left is None or claim.suspects:
            return
        for worker in idle:
            is_loaded = claim.reference_id in worker.loaded
            is_full = not is_loaded and len(worker.loaded) >= worker.configuration.capacity
            least = _LEFT_SECONDS if is_loaded else _LEFT_TO_LOAD_SECONDS
            if worker.number in self._helps or self._failures[worker.number, claim.id] >= _FAILURES or is_full or left < least:
                continue
            logger.info("worker %d helps worker %d", worker.number, owner, extra={"job": claim.id})
            self._helps[worker.number] = _Help(claim.id, owner)
            worker.send({"op": "help", "order": asdict(HelpOrder(claim.id, claim.reference_id, claim.poison))})

    def dismiss(self, number: int) -> None:
        """Dismiss a helper: it commits its computed values and reports that. Do nothing if the worker does not help."""
        help = self._helps.get(number)
        if help is not None and not help.leaving:
            help.leaving = True
            self._pool.workers[number].send({"op": "stop", "job": help.job, "why": "dismissed", "help": True})

    def end(self, job: str, owner: int) -> None:
        """Dismiss the helpers of a job that its worker no longer has."""
        for number, help in self._helps.items():
            if (help.job, help.owner) == (job, owner):
                self.dismiss(number)
        for pair in [pair for pair in self._failures if pair[1] == job]:
            del self._failures[pair]

    def on_frame(self, worker: WorkerHandle, message: dict[str, Any], body: bytes) -> bool:
        """Relay a frame; return whether it was about help."""
        help = self._helps.get(worker.number)
        match message["op"]:
            case "ask":  # from an owner
                to = self._helps.get(message["to"])
                if to is not None and (to.job, to.owner) == (message["job"], worker.number):
                    self._pool.workers[message["to"]].send(message, body)
            case "helping" if help is not None:
                help.joined = True
                self._to_owner(help, {**message, "op": "helper", "worker": worker.number})
            case "answer" if help is not None:
                self._to_owner(help, message, body)
            case "helped" if help is not None:
                if message["error"] is not None:
                    logger.warning("worker %d cannot help: %s", worker.number, message["error"], extra={"job": help.job})
                    self._failures[worker.number, help.job] += 1
                self._gone(worker.number, message["error"] or "it was dismissed", False)
            case "helping" | "answer" | "helped":
                pass
            case _:
                return False
        return True

    def on_death(self, worker: WorkerHandle, reason: str, blame: bool) -> None:
        """Record that a worker's process has ended, and inform the owner of the job that it helped with."""
        if (help := self._helps.get(worker.number)) is not None:
            self._failures[worker.number, help.job] += 1 if help.joined else _FAILURES  # loading the model may kill it
            self._gone(worker.number, reason, blame)

    def _gone(self, number: int, reason: str, blamed: bool) -> None:
        help = self._helps.pop(number)
        if help.joined:
            self._to_owner(help, {"op": "gone", "job": help.job, "worker": number, "reason": reason, "blamed": blamed})

    def _to_owner(self, help: _Help, message: dict[str, Any], body: bytes = b"") -> None:
        self._pool.workers[help.owner].send(message, body)
