"""Let idle workers help with a running job, and relay frames between these helpers and the worker that runs it (the owner).

A frame is a message between the service and a worker. Use this module only in the event loop, because it is not thread-safe.
Units of work (batches of sequences to score) are relayed without being decoded.

Owners, helpers and the service exchange the following frames, usually in this order:

    help     service -> helper            help with a job
    helping  helper -> service            the helper has loaded the model and is ready
    helper   service -> owner             a helper is ready
    ask      owner -> service -> helper   a request, which can contain a unit of work
    answer   helper -> service -> owner   the result of a request
    stop     service -> helper            stop helping
    helped   helper -> service            the helper has stopped; `error` is the error that stopped it, or None
    gone     service -> owner             a helper that was ready has stopped, or its process has ended
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

#: A worker that has loaded a job's model helps only if the job has at least _LEFT_SECONDS of work left. For a worker that must
#: first load the model, the minimum is _LEFT_TO_LOAD_SECONDS.
_LEFT_SECONDS, _LEFT_TO_LOAD_SECONDS = 1.0, 30.0
#: A worker that has failed this many times while helping with a job is no longer asked to help with that job.
_FAILURES = 3


@dataclass(eq=False)
class _Help:
    """The state of a worker that is helping with another worker's job.

    Attributes:
        job: id of the job.
        owner: number of the worker that runs the job.
        joined: whether the owner was told that the helper is ready.
        leaving: whether the helper was told to stop.
    """

    job: str
    owner: int
    joined: bool = False
    leaving: bool = False


class Helping:
    """The helpers of all jobs, and the relay between owners and helpers.

    Args:
        pool: the workers of the service.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._helps: dict[int, _Help] = {}  # the state of each helper, by the worker's number
        self._failures: Counter[tuple[int, str]] = Counter()  # failures for each pair (worker's number, job id)

    def is_helping(self, number: int) -> bool:
        """Return whether a worker is helping with a job.

        A worker that was told to stop counts as helping until it has stopped.
        """
        return number in self._helps

    def offer(self, claim: Claim, owner: int, progress: JobProgress, idle: list[WorkerHandle]) -> None:
        """Ask idle workers to help with a job if the job is expected to run long enough to make help worthwhile.

        A worker that would have to unload a model before it could help is not asked. If a sequence of the job kills workers, no
        worker is asked to help until the service has found this sequence. Until then, the sequence can kill only the worker
        that runs the job.
        """
        left = progress.seconds_left
        if not progress.scored or left is None or claim.suspects:
            return
        for worker in idle:
            is_loaded = claim.reference_id in worker.loaded
            movable = [model for model in worker.loaded if model != worker.configuration.pinned]
            is_full = not is_loaded and bool(movable) and len(worker.loaded) >= worker.configuration.capacity
            least = _LEFT_SECONDS if is_loaded else _LEFT_TO_LOAD_SECONDS
            if worker.number in self._helps or self._failures[worker.number, claim.id] >= _FAILURES or is_full or left < least:
                continue
            logger.info("asked worker %d to help worker %d with a job", worker.number, owner, extra={"job": claim.id})
            self._helps[worker.number] = _Help(claim.id, owner)
            worker.send({"op": "help", "order": asdict(HelpOrder(claim.id, claim.reference_id, claim.poison))})

    def dismiss(self, number: int) -> None:
        """Tell a helper to stop.

        The helper commits its computed values and then reports that it has stopped. Do nothing if the worker is not helping.
        """
        help = self._helps.get(number)
        if help is not None and not help.leaving:
            help.leaving = True
            self._pool.workers[number].send({"op": "stop", "job": help.job, "why": "dismissed", "help": True})

    def end(self, job: str, owner: int) -> None:
        """Tell all helpers of a job to stop, and forget which workers failed while helping with the job.

        Call this method when the job no longer runs on its owner.
        """
        for number, help in self._helps.items():
            if (help.job, help.owner) == (job, owner):
                self.dismiss(number)
        for pair in [pair for pair in self._failures if pair[1] == job]:
            del self._failures[pair]

    def on_frame(self, worker: WorkerHandle, message: dict[str, Any], body: bytes) -> bool:
        """If a frame is about helping with a job, handle it and return True; otherwise, return False."""
        help = self._helps.get(worker.number)
        match message["op"]:
            case "ask":  # sent by an owner
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
                    logger.warning(
                        "worker %d cannot help with a job: %s", worker.number, message["error"], extra={"job": help.job}
                    )
                    self._failures[worker.number, help.job] += 1
                self._gone(worker.number, message["error"] or "it was dismissed", False)
            case "helping" | "answer" | "helped":
                pass
            case _:
                return False
        return True

    def on_death(self, worker: WorkerHandle, reason: str, blame: bool) -> None:
        """Handle the exit of a worker's process. If the worker had joined a job as a helper, tell the owner of the job.

        Args:
            reason: why the process exited.
            blame: True if the worker's job, or the job that it was helping with, may have caused the exit; False if the worker
                was computing an online request when it died.
        """
        if (help := self._helps.get(worker.number)) is not None:
            # If the worker had not joined yet, loading the model may have killed it. In that case, do not ask this
            # worker to help with the job again.
            self._failures[worker.number, help.job] += 1 if help.joined else _FAILURES
            self._gone(worker.number, reason, blame)

    def _gone(self, number: int, reason: str, blamed: bool) -> None:
        help = self._helps.pop(number)
        if help.joined:
            self._to_owner(help, {"op": "gone", "job": help.job, "worker": number, "reason": reason, "blamed": blamed})

    def _to_owner(self, help: _Help, message: dict[str, Any], body: bytes = b"") -> None:
        self._pool.workers[help.owner].send(message, body)
