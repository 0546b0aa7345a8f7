"""Follow a job through server-sent events (html.spec.whatwg.org/multipage/server-sent-events.html).

This module parses events, and decides when to reopen a lost connection and when to stop. It does not open connections: the
clients open them, and pass the received bytes to this module.
"""

from __future__ import annotations

import json
import math
import re
import time

import httpx

from reflogp.client import protocol
from reflogp.client.errors import DeadlineExceededError, ServiceFailedError
from reflogp.client.jobs import events_call, job_from
from reflogp.client.models import Job

#: Number of seconds without a byte after which a connection counts as lost. The service sends a comment every 15 seconds.
_SILENCE = 45.0
#: A watch fails if it receives no byte from the service for this many seconds, even if the watch's timeout is longer. This is
#: long enough for the service to restart.
_AWAY = 600.0
#: Minimum number of seconds before a stream is reopened.
_LEAST_PAUSE = 0.5
#: Number of seconds added to the watch's remaining time when this time limits a read. Without the addition, the read could end
#: just before the watch's timeout.
_SLACK = 0.05


class EventParser:
    """Parses the events of a stream whose bytes arrive in chunks of any size.

    Only the fields that a scoring service sends are supported: `event` and `data`.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[tuple[str, str]]:
        """Return a list of (name, data), with one item for each event that this chunk completes."""
        *lines, self._rest = re.split(rb"\r\n|\n|\r(?!\Z)", self._rest + chunk)  # a final \r may be the first half of \r\n
        found = []
        for line in lines:
            name, _, value = line.decode("utf-8", "replace").partition(":")
            value = value.removeprefix(" ")
            if not line:
                if self._data:
                    found.append((self._event or "message", "\n".join(self._data)))
                self._event, self._data = "", []
            elif name == "event":
                self._event = value
            elif name == "data":
                self._data.append(value)
        return found


class Following:
    """Tracks one call of `watch` or `events`: the job's last state, when to reopen the stream, and when to stop.

    Args:
        job: id of the job.
        url: URL of the service, for messages.
        timeout: maximum number of seconds for the whole call, or None for no maximum.
    """

    def __init__(self, job: str, url: str, timeout: float | None) -> None:
        self.ended = False
        self._id, self._url, self._timeout = job, url, timeout
        self._until = math.inf if timeout is None else time.monotonic() + timeout
        self._parser = EventParser()
        self._last: Job | None = None
        self._heard_at = -math.inf
        self._failures = 0
        self._cause: protocol.Outcome = None

    def call(self) -> protocol.Call:
        """Return the request that opens or reopens the stream.

        After the timeout, raises an error instead. The error is DeadlineExceededError if a state of the job was received and no
        attempt has failed since then. Otherwise, it is the error of the last failed attempt, or ServiceUnreachableError if no
        attempt has failed.
        """
        self._check_time()
        self._parser = EventParser()
        left = self._until - time.monotonic() + _SLACK
        return events_call(self._id, min(_SILENCE, left))

    def take(self, chunk: bytes) -> list[Job]:
        """Return the job's states in a chunk of the stream, except each state that equals the state received before it.

        Raises ServiceFailedError if an event cannot be read. After the timeout, raises the same errors as `call`, unless the
        job has ended.
        """
        self._heard_at = time.monotonic()
        changes = []
        for event, data in self._parser.feed(chunk):
            if event not in ("job", "end"):
                continue
            try:
                job = job_from(json.loads(data))
            except protocol.UNREADABLE as error:
                raise ServiceFailedError(
                    f"an event from the service cannot be read ({type(error).__name__}: {error})"
                ) from error
            if job != self._last:
                changes.append(job)
            self._last, self._failures = job, 0
            self.ended = self.ended or event == "end" or job.finished
        if not self.ended:
            self._check_time()
        return changes

    def pause(self, cause: protocol.Outcome) -> float:
        """Return the number of seconds to wait before the stream is reopened.

        `cause` is the error response or the exception that ended the attempt, or None if the service closed the stream
        normally. Raises an error for every error response other than 429 and 503 (busy). Once a state of the job was received,
        other 5xx responses raise no error either. Also raises an error if none of the first TRIES attempts received a state, or
        if a state was received but nothing has arrived for _AWAY seconds. After the timeout, raises the same errors as `call`.
        """
        now, heard = time.monotonic(), self._last is not None
        if now < self._until:
            self._failures, self._cause = self._failures + 1, cause
        self._check_time()
        restarting = protocol.is_busy(cause) or (heard and isinstance(cause, httpx.Response) and cause.status_code >= 500)
        if isinstance(cause, httpx.Response) and not restarting:
            raise protocol.failure(self._url, cause)
        if now > self._heard_at + _AWAY if heard else self._failures >= protocol.TRIES:
            raise protocol.failure(self._url, self._cause)
        return min(max(_LEAST_PAUSE, protocol.pause_seconds(cause, self._failures)), self._until - now)

    def _check_time(self) -> None:
        if time.monotonic() < self._until:
            return
        if self._failures or self._last is None:
            raise protocol.failure(self._url, self._cause)
        raise DeadlineExceededError(
            f"job {self._id} is still {self._last.state} after {self._timeout:g} seconds; the job continues on the service, so "
            "you can wait for it again"
        )
