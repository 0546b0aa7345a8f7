"""Score sequences online, while the caller waits for the response.

OnlineScoring chooses a worker for each request, limits the number of queued tokens, and resends requests when a worker dies.
The worker decides which requests are computed together. Use this module only in the event loop, because it is not thread-safe.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from reflogp.service.metrics import Metrics
from reflogp.service.pool import Pool, WorkerHandle
from reflogp.service.problems import Problem
from reflogp.service.registry import ReferenceRegistry
from reflogp.service.request_ids import request_id
from reflogp.service.settings import ServerSettings
from reflogp.service.worker.protocol import MASKED_SEQUENCES, OUTCOMES, TOP_OUTCOMES, table_of, token_count
from reflogp.store import ReferenceNotFoundError, StoreUnavailableError, UsageError, sequence_keys
from reflogp.store.schema import one_array, stream_bytes

logger = logging.getLogger(__name__)

#: A request fails after this many worker processes have died while computing it. The request probably caused the deaths.
_DEATHS = 2
_CHECK_MODEL = "ask an administrator to check the reference model's files and the service's log"
#: Maximum number of seconds to look up the sequences of a request in the store, which takes at most half of the time until the
#: request's deadline. After that, all of them are scored.
_LOOK_UP_SECONDS = 5.0
#: How many seconds loading a model is assumed to take.
_LOAD_SECONDS = 20.0
#: Weight of the latest request in the moving average of tokens per second. The average is used to compute Retry-After.
_RATE_WEIGHT = 0.2


@dataclass(frozen=True)
class Scored:
    """The result of a scoring request."""

    #: Schema worker.protocol.OUTCOMES, or TOP_OUTCOMES; one row per sequence, in the order of the request.
    outcomes: pa.Table
    reference_id: str
    hits: int  # number of sequences found in the store
    engine_seconds: float  # until the last outcome, perhaps with work on other requests of the round; 0 if none was computed
    queue_seconds: float  # that the request waited in the worker
    snapshot: int | None  # number of the snapshot in which the sequences were looked up


@dataclass
class _Pending:
    """A request that was sent to a worker but has no response yet."""

    worker: WorkerHandle
    message: dict[str, Any]
    body: bytes
    tokens: int
    answer: asyncio.Future[tuple[dict[str, Any], bytes]]
    began: bool = False  # whether the worker's current process has started to compute the request
    deaths: int = 0  # number of worker processes that died while computing the request


@dataclass(eq=False)
class OnlineScoring:
    settings: ServerSettings
    registry: ReferenceRegistry
    metrics: Metrics
    pool: Pool
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _tokens_per_second: float = 0.0

    def queued_tokens(self, worker: WorkerHandle | None = None) -> int:
        return sum(entry.tokens for entry in self._pending.values() if worker is None or entry.worker is worker)

    async def score(
        self,
        reference: str,
        sequences: pa.Table,
        temperature: float,
        cache_read: bool,
        cache_write: bool,
        deadline_seconds: float,
        top_k: int = 0,
    ) -> Scored:
        """Score sequences. Cancelling the calling task also cancels the request.

        Args:
            reference: name or id of one of the service's references.
            sequences: table with the columns prompt_ids and completion_ids, each of type list<int32>. If there is a third
                column, attention_mask, the sequences are rows of padded batches, whose values are neither looked up nor stored.
            temperature: number to divide the logits by. Values at temperatures other than 1 are neither looked up nor stored.
            top_k: number of most probable tokens of each position to return too, at most the `top_k` in the reference's
                settings. Temperature must be 1.

        Raises:
            ReferenceNotFoundError: the service has no model for the reference (404).
            UsageError: the reference's engine does not support the temperature.
            Problem: 429 with Retry-After: too many tokens are queued. 500: worker processes died while computing the request,
                or the model can never be loaded. 503: no worker can respond. 504: the deadline has passed.
        """
        deadline = time.monotonic() + deadline_seconds
        served = self.registry.served(reference)
        model = served.reference
        if not len(sequences):
            return Scored((TOP_OUTCOMES if top_k else OUTCOMES).empty_table(), model.reference_id, 0, 0.0, 0.0, None)
        if temperature != 1.0 and served.settings.engine != "torch":
            raise UsageError(f"temperature {temperature}: the engine of {reference!r} supports only temperature 1")
        known: list[Any] = [None] * len(sequences)
        snapshot = None
        storable = temperature == 1.0 and sequences.schema.names != MASKED_SEQUENCES.names
        if cache_read and storable:
            known, snapshot = await self._stored(model.reference_id, sequences, top_k, deadline)
        missing = [at for at, values in enumerate(known) if values is None]
        hits = len(sequences) - len(missing)
        self.metrics.sequences.labels("online", "hit").inc(hits)
        if not missing:
            outcomes = _merged(known, [], (TOP_OUTCOMES if top_k else OUTCOMES).empty_table())
            return Scored(outcomes, model.reference_id, hits, 0.0, 0.0, snapshot)
        asked = sequences if not hits else sequences.take(pa.array(missing))
        message, body = await self._ask(model.reference_id, asked, temperature, cache_write and storable, deadline, top_k)
        outcomes = table_of(body)
        self.metrics.sequences.labels("online", "scored").inc(outcomes["error"].null_count)
        if hits:
            outcomes = _merged(known, missing, outcomes)
        return Scored(outcomes, model.reference_id, hits, message["engine_seconds"], message["queue_seconds"], snapshot)

    def on_frame(self, worker: WorkerHandle, message: dict[str, Any], body: bytes) -> None:
        match message["op"]:
            case "ready":
                for waiting in self._pending.values():
                    if waiting.worker is worker:
                        worker.send(waiting.message, waiting.body)
            case "round":
                for key in message["ids"]:
                    if key in self._pending:
                        self._pending[key].began = True
            case "scored":
                entry = self._pending.pop(message["id"], None)
                if entry is not None and not entry.answer.done():
                    entry.answer.set_result((message, body))

    def on_death(self, worker: WorkerHandle, reason: str) -> bool:
        """Let a worker's next process compute each request alone that the last one was computing, and fail after _DEATHS.

        Return True if the exited process was computing any request.
        """
        mine = {key: entry for key, entry in self._pending.items() if entry.worker is worker}
        blame = any(entry.began for entry in mine.values())
        for key, entry in mine.items():
            if entry.began:
                entry.deaths += 1
                entry.began = False
                entry.message["alone"] = True
            if entry.deaths >= _DEATHS:
                step = "ask an administrator to check the service's log"
                self._fail(key, Problem(500, f"workers died while scoring this request: {reason}", step))
            elif worker.broken:
                self._fail(key, _no_worker(worker))
        return blame

    async def _ask(
        self, reference_id: str, sequences: pa.Table, temperature: float, write: bool, deadline: float, top_k: int
    ) -> tuple[dict[str, Any], bytes]:
        tokens = token_count(sequences)
        worker = self._worker_for(reference_id, tokens)
        key = str(next(self._ids))
        message = {
            "op": "score",
            "id": key,
            "request": request_id(),
            "reference_id": reference_id,
            "temperature": temperature,
            "alone": False,
            "write": write,
            "top_k": top_k,
        }
        answer: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        entry = _Pending(worker, message, stream_bytes(sequences), tokens, answer)
        self._pending[key] = entry
        if worker.ready:
            worker.send(message, entry.body)
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                answered, body = await answer
        except TimeoutError:
            self.metrics.refused.labels("deadline").inc()
            step = "set a longer deadline, or send fewer sequences per request"
            raise Problem(504, "the deadline has passed", step) from None
        finally:
            if self._pending.pop(key, None) is not None:
                worker.send({"op": "forget", "id": key})
        if answered["error"] is not None and answered["is_permanent"]:
            raise Problem(500, answered["error"], _CHECK_MODEL)
        if answered["error"] is not None:
            raise Problem(503, answered["error"], _CHECK_MODEL, {"Retry-After": "30"})
        self.metrics.tokens.labels("online").inc(tokens)
        self.metrics.engine_seconds.observe(answered["engine_seconds"])
        self.metrics.queue_seconds.observe(answered["queue_seconds"])
        if answered["engine_seconds"] > 0:
            rate = tokens / answered["engine_seconds"]
            self._tokens_per_second += (_RATE_WEIGHT if self._tokens_per_second else 1.0) * (rate - self._tokens_per_second)
        return answered, body

    def _worker_for(self, reference_id: str, tokens: int) -> WorkerHandle:
        """Choose the worker that is expected to begin with the request first.

        Loading the model counts as scoring for _LOAD_SECONDS, and twice that if another model has to be unloaded.

        Raises Problem: 503 if no worker can respond, 429 if too many tokens are queued for each of them.
        """
        working = [worker for worker in self.pool.workers if not worker.broken and not worker.late]
        if not working:
            raise _no_worker(self.pool.workers[0])
        load = int(_LOAD_SECONDS * self._tokens_per_second) or self.settings.max_queued_tokens // 8

        def expected(worker: WorkerHandle) -> int:
            loads = 0 if reference_id in worker.loaded else 1 if len(worker.loaded) < worker.configuration.capacity else 2
            return self.queued_tokens(worker) + loads * load

        def has_room(worker: WorkerHandle) -> bool:
            queued = self.queued_tokens(worker)
            return not queued or queued + tokens <= self.settings.max_queued_tokens

        free = [worker for worker in working if has_room(worker)]
        chosen = min(free or working, key=expected)
        if not free:
            queued = self.queued_tokens(chosen)
            self.metrics.refused.labels("queue").inc()
            wait = math.ceil(queued / self._tokens_per_second) if self._tokens_per_second else 1
            raise Problem(
                429,
                f"{queued:,} tokens are already queued",
                "try again later, or send fewer tokens per request",
                {"Retry-After": str(max(1, min(60, wait)))},
            )
        return chosen

    async def _stored(
        self, reference_id: str, sequences: pa.Table, top_k: int, deadline: float
    ) -> tuple[list[Any], int | None]:
        """Look up sequences as `_look_up` does. If the store does not answer, no sequence counts as stored: all are scored."""
        nothing: tuple[list[Any], int | None] = [None] * len(sequences), None
        if self.registry.away:
            return nothing
        try:
            async with asyncio.timeout(min(_LOOK_UP_SECONDS, (deadline - time.monotonic()) / 2)):
                return await self.registry.threads.run(self._look_up, reference_id, sequences, top_k)
        except TimeoutError:
            why = "a look-up in the store takes long"
        except StoreUnavailableError as error:
            why = str(error)
        if not self.registry.away:
            self.registry.away = True  # until the next check of the store
            logger.warning("online requests are scored without looking their sequences up: %s", why)
        return nothing

    def _look_up(self, reference_id: str, sequences: pa.Table, top_k: int) -> tuple[list[Any], int | None]:
        """Return the stored value columns of each sequence (None if there are none), and the number of the snapshot, if any."""
        served = self.registry.served(reference_id).settings.top_k if top_k else 0  # the table that workers write to
        try:
            snapshot = self.registry.snapshot(reference_id, None, served)
        except ReferenceNotFoundError:
            return [None] * len(sequences), None
        found = snapshot.find(sequence_keys(sequences["prompt_ids"], sequences["completion_ids"]))
        needed = one_array(sequences["completion_ids"]).value_lengths().to_numpy()
        hits = np.flatnonzero((found.lengths >= needed) & (needed > 0))
        known: list[Any] = [None] * len(needed)
        if len(hits):
            logps: list[Any] = found.token_logps(hits)
            tops: list[Any] = list(found.top(top_k, hits)) if top_k else [()] * len(hits)
            for at, values, top in zip(hits.tolist(), logps, tops, strict=True):
                known[at] = (values[: needed[at]], *(column[: needed[at]].ravel() for column in top))
        return known, snapshot.number

    def _fail(self, key: str, problem: Problem) -> None:
        entry = self._pending.pop(key, None)
        if entry is not None and not entry.answer.done():
            entry.answer.set_exception(problem)


def _no_worker(worker: WorkerHandle) -> Problem:
    late = f"worker {worker.number} has not answered for {worker.silent_seconds:.0f} seconds" if worker.late else ""
    said = late or worker.last_error or "see the service's log"
    return Problem(
        503, f"no worker can answer: {said}", "try again, or ask an administrator to check the service", {"Retry-After": "10"}
    )


def _merged(known: list[Any], missing: list[int], outcomes: pa.Table) -> pa.Table:
    """Return stored and computed values as one table, in the order of the request."""
    hits = [at for at, values in enumerate(known) if values is not None]
    names = [name for name in outcomes.column_names if name != "error"]
    stored = {name: [known[at][column] for at in hits] for column, name in enumerate(names)}
    both = pa.concat_tables([outcomes, pa.table({**stored, "error": pa.nulls(len(hits))}, schema=outcomes.schema)])
    return both.take(np.argsort([*missing, *hits]))
