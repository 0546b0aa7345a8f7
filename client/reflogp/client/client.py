"""Call a scoring service over HTTP. The client needs httpx, but not torch."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from datetime import datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias
from urllib.parse import quote

import httpx
import pyarrow as pa

from reflogp.client import files, protocol, tables
from reflogp.client.errors import (
    DeadlineExceededError,
    JobFailedError,
    RequestRefusedError,
    SequencesRefusedError,
    ServiceFailedError,
)
from reflogp.client.models import (
    Format,
    Job,
    JobPage,
    JobState,
    Lookup,
    ReferenceInfo,
    Scores,
    ServicePath,
    ServiceUri,
    Uploaded,
    UploadInfo,
    job_from,
    known,
)
from reflogp.client.protocol import Call, parsed
from reflogp.client.tables import TokenIds
from reflogp.store import UsageError
from reflogp.store.digests import Progress
from reflogp.store.files import write_atomically
from reflogp.store.schema import ARROW_STREAM, stream_bytes
from reflogp.store.texts import hide_secrets
from reflogp.store.windows import TruncationMode

logger = logging.getLogger(__name__)

#: Seconds to wait for a response to `score` if neither a deadline nor a timeout of the client is given. The service may have to
#: load a reference model during this time.
_SCORE_SECONDS = 600.0
#: Number of seconds that `events` asks the service to wait for a job's next change, and how many seconds later a connection
#: without a response counts as lost.
_WAIT_SECONDS, _SILENCE = 5.0, 30.0
#: `events` fails if the service has not responded for this many seconds, even if its timeout is longer. This is long enough for
#: the service to restart.
_AWAY = 600.0
#: Number of seconds between two requests of `events`: _FIRST_PAUSE, doubled after each request, up to _LONGEST_PAUSE.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_ARROW = {"content-type": ARROW_STREAM}

Dataset: TypeAlias = str | Path | ServicePath | ServiceUri | Uploaded


class Client:
    """A client for a scoring service.

    Args:
        url: URL of the service, as `reflogp serve` prints it.
        token: bearer token, or None to use $REFLOGP_TOKEN. Not needed if the service has no tokens in its settings
            (it then listens only on loopback).
        timeout: seconds to wait for the next bytes of a response, or None for 60 seconds (10 minutes in `score`). `events`,
            `watch` and a `score` with a deadline do not use this timeout. Connection attempts time out after at most 5 seconds.

    Methods raise UsageError for invalid arguments, and a subclass of ServiceError (see reflogp.client.errors) if a request
    fails; for an unknown job, RequestRefusedError with the status 404. If the service is busy (status 429 or 503), a request is
    sent again, with increasing pauses. If the connection fails, a request is sent again only if repeating it is safe. Each
    request is sent at most 5 times or, in `score` with a deadline, as often as the deadline allows.

    Examples:
        >>> from reflogp.client import Client
        >>> from reflogp.store import sequence_keys
        >>> with Client("http://127.0.0.1:8311") as client:
        ...     found = client.lookup("sft", sequence_keys([[1, 5, 9]], [[7, 2]]))
        ...     scores = client.score("sft", [[1, 5, 9]], [[7, 2]])
        ...     job = client.watch(client.submit("pairs.jsonl", "sft", max_length=1024).id, check=True)
        ...     file = client.result(job.id, "pairs-logps.parquet")
        ...     [reference] = client.references()
        ...     uploaded = client.upload("pairs.jsonl", "pairs.jsonl")
        >>> scores.token_logps[0].dtype, scores.token_logps[0].shape
        (dtype('float32'), (2,))
        >>> job.state, job.summary["rows"]
        ('done', 32)
        >>> reference
        ReferenceInfo(name='sft', reference_id='...', model='sft-model', dtype='bfloat16', ...)
        >>> found.lengths, found.sums
        (array([-1], dtype=int32), array([nan]))
        >>> uploaded
        UploadInfo(name='pairs.jsonl', bytes=..., sha256='...', uploaded_at=...)
    """

    def __init__(self, url: str, token: str | None = None, timeout: float | None = None) -> None:
        self.url = url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"service {url!r}: the URL must begin with http:// or https://")
        headers = {"user-agent": f"reflogp/{version('reflogp')}"}
        token = (os.environ.get("REFLOGP_TOKEN", "") if token is None else token).strip()
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise UsageError("the token contains characters that are not allowed; use it exactly as `reflogp token` printed it")
        if token:
            headers["authorization"] = f"Bearer {token}"
        seconds = protocol.ANSWER_SECONDS if timeout is None else timeout
        self._timeout = timeout
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(seconds, connect=min(seconds, protocol.CONNECT_SECONDS)),
        )

    def references(self) -> list[ReferenceInfo]:
        """Return all references for which the service has a model or stored values."""
        return parsed(
            self._send(Call("GET", "/v1/references")),
            lambda body: [ReferenceInfo(**known(ReferenceInfo, entry)) for entry in body["references"]],
        )

    def lookup(
        self, reference: str, keys: pa.Array | Sequence[bytes], *, values: bool = False, snapshot: int | None = None
    ) -> Lookup:
        """Look up n keys of 16 bytes each, from `reflogp.store.sequence_keys`, in the service's store.

        Args:
            reference: name or id of the reference.
            values: whether to return each token's log-prob too, as token_logps. Lengths and sums are always returned.
            snapshot: number of the snapshot, or None for the latest. Several requests read one snapshot.
        """
        params: dict[str, Any] = {"reference": reference, "values": str(values).lower()}
        if snapshot is not None:
            params["snapshot"] = snapshot

        def ask(part: pa.Table) -> Lookup:
            found = tables.lookup_of(self._send(Call("POST", "/v1/lookup", dict(params), stream_bytes(part), _ARROW)))
            params["snapshot"] = found.snapshot
            return found

        most = tables.VALUE_KEYS_AT_ONCE if values else tables.KEYS_AT_ONCE
        return tables.joined_lookup(tables.in_parts(tables.key_table(keys), most, ask))

    def score(
        self,
        reference: str,
        prompts: TokenIds,
        completions: TokenIds,
        *,
        temperature: float = 1.0,
        cache_read: bool = True,
        cache_write: bool = False,
        deadline: float | None = None,
        attention_masks: TokenIds | None = None,
    ) -> Scores:
        """Score n sequences immediately, in one or several requests, and return their log-probs.

        Args:
            reference: name or id of the reference.
            prompts: n lists of token ids: Python lists, numpy arrays or an Arrow list array.
            completions: the same for the completions.
            temperature: number that the logits are divided by. Only values at temperature 1 are read from the store or written
                to it.
            cache_read: whether to use stored values.
            cache_write: whether to store the computed values.
            deadline: maximum number of seconds for the whole call, including the wait in the service's queue, the computation,
                and retries with their pauses. If None, each request has the deadline of the service
                (5 minutes), and the client waits for each response for at most its own
                `timeout`, or 10 minutes if `timeout` is None too.
            attention_masks: for rows of padded batches, n lists, each with one entry per token of the row's prompt and
                completion: 0 for padding, 1 for other tokens. Sequences with a mask are scored with their padding, so padding
                tokens in completions get values too. These values are never looked up in the store or written to it.

        Raises:
            SequencesRefusedError: some sequences could not be scored; the error contains the values of the others.
            DeadlineExceededError: the sequences were not scored before the deadline.
            UsageError: the arguments are not lists of integers, or not equally many; or `deadline` is not positive.
        """
        table = tables.sequence_table(prompts, completions, attention_masks)
        if deadline is not None and not deadline > 0:
            raise UsageError(f"deadline {deadline}: must be more than 0 seconds")
        until = None if deadline is None else time.monotonic() + deadline
        params = {
            "reference": reference,
            "temperature": temperature,
            "cache_read": str(cache_read).lower(),
            "cache_write": str(cache_write).lower(),
        }
        errors: list[str | None] = []

        def ask(part: pa.Table) -> Scores:
            # A retry after a lost connection is safe: the store keeps the values that were first stored for a key. After a
            # timeout, there is no retry, because the service may still be computing and a retry would add to its load.
            wait, tries = (self._timeout or _SCORE_SECONDS, protocol.TRIES) if until is None else (None, math.inf)
            body, again = stream_bytes(part), protocol.DROPPED
            call = Call("POST", "/v1/score", params, body, _ARROW, again, wait, tries, until)
            scores, part_errors = tables.scores_of(self._send(call))
            errors.extend(part_errors)
            return scores

        scores = tables.joined_scores(tables.in_parts(table, tables.SEQUENCES_AT_ONCE, ask))
        if problems := {index: error for index, error in enumerate(errors) if error is not None}:
            raise SequencesRefusedError(problems, list(scores.token_logps))
        return scores

    def upload(self, path: str | Path, name: str | None = None, *, progress: Progress | None = None) -> UploadInfo:
        """Upload a dataset file, without loading all of it into memory. A file that the service already has is not sent.

        Args:
            path: a file whose suffix shows its format: .jsonl, .json or .csv (each optionally followed by .gz, .bz2, .zst or
                .lz4), .parquet or .arrow.
            name: name of the file on the service, with one of these suffixes. Default: the first 12 digits of the file's
                digest, a hyphen and the file's own name, so that different files with the same name do not replace each other.
            progress: called with (bytes sent, total bytes).

        Raises UsageError if the file cannot be read or changes while it is being sent, and ServiceFailedError if it arrived
        damaged.
        """
        file = files.local_file(path, name, progress)
        route = f"/v1/uploads/{quote(file.name, safe='')}"
        try:
            there = parsed(self._send(Call("GET", route)), _upload_from)
        except RequestRefusedError as error:
            if error.status != 404:
                raise
        else:
            if (there.bytes, there.sha256) == (file.size, file.sha256):
                if progress is not None:
                    progress(file.size, file.size)
                return there
        headers = {"content-type": "application/octet-stream", "content-length": str(file.size)}
        sent = parsed(self._send(Call("PUT", route, content=file, headers=headers)), _upload_from)
        if sent.sha256 != file.sha256:
            raise ServiceFailedError(
                f"{file.path} arrived with the sha256 digest {sent.sha256} instead of {file.sha256}; upload the file again"
            )
        return sent

    def submit(
        self,
        dataset: Dataset,
        reference: str,
        *,
        split: str = "train",
        idempotency_key: str | None = None,
        format: Format | None = None,
        max_length: int | None = None,
        truncation_mode: TruncationMode = "keep_start",
        ld_alpha: float | None = None,
        priority: int = 0,
        title: str = "",
    ) -> Job:
        """Submit a job that scores a dataset. Submitting the same dataset, reference and settings again returns the same job.

        `priority` and `title` are not compared. If the earlier job failed or was cancelled, it is queued again. If it is done,
        but the data may have changed (a dataset on the Hub or at a URI, or rows that refer to image files), the service creates
        a new job, unless both submissions have the same `idempotency_key`.

        Args:
            dataset: path of a file on this machine, which is uploaded first; URI, or name ("ORGANISATION/NAME") on the Hugging
                Face Hub, of a dataset that the service downloads if its settings allow it; or a ServicePath, ServiceUri or
                Uploaded.
            reference: name or id of the reference.
            split: name of the split to score, if `dataset` is a saved DatasetDict or a dataset on the Hub.
            idempotency_key: a key that identifies the job, or None to identify the job by its dataset, reference and settings.
                A new key creates a new job. The service refuses a key that was already used for a different job.
            format: format of the dataset, or None to detect it from the columns.
            max_length: maximum number of tokens in prompt and completion together, or None for no limit.
            truncation_mode: which tokens to keep of a sequence that exceeds max_length: its start or its end.
            ld_alpha: LD-DPO's weight for tokens beyond the length of the pair's shorter completion, from 0 to 1, or None to
                give all tokens the same weight. The weight is applied to the sums in the job's result.
            priority: from -100 to 100. Jobs with a higher priority run first, and interrupt running jobs with a lower one.
            title: title of the job on the service's pages.

        Raises NotAllowedError if the service's settings do not allow the dataset's path or URI.
        """
        if isinstance(dataset, str | Path):
            uri = files.service_uri(dataset) if isinstance(dataset, str) else None
            dataset = uri or Uploaded(self.upload(dataset).name)
        settings = {
            "reference": reference,
            "format": format,
            "max_length": max_length,
            "truncation_mode": truncation_mode,
            "ld_alpha": ld_alpha,
            "priority": priority,
            "title": title,
        }
        content = json.dumps({**settings, "dataset": files.described(dataset) | {"split": split}}).encode()
        headers = {"content-type": "application/json"}
        if idempotency_key is not None:
            headers["idempotency-key"] = idempotency_key
        # The request is safe to repeat: the service recognizes a job by its key or its content.
        return parsed(self._send(Call("POST", "/v1/jobs", content=content, headers=headers)), job_from)

    def job(self, job: str) -> Job:
        """Return a job in its current state."""
        return parsed(self._send(Call("GET", _path(job))), job_from)

    def jobs(self, state: JobState | None = None, before: str | None = None, limit: int = 50) -> JobPage:
        """Return up to `limit` jobs (1 to 1,000), newest first. For the next page, pass its `next_before` as `before`."""
        params = {name: value for name, value in (("state", state), ("before", before)) if value is not None}
        return parsed(
            self._send(Call("GET", "/v1/jobs", {**params, "limit": limit})),
            lambda body: JobPage([job_from(entry) for entry in body["jobs"]], body["counts"], body["next_before"]),
        )

    def cancel(self, job: str) -> Job:
        """Cancel a job: a queued job immediately, and a running job after its current forward pass.

        The values that the job has already computed stay in the store. Raises RequestRefusedError (409) if the job has ended.
        """
        try:
            return parsed(self._send(Call("DELETE", _path(job))), job_from)
        except RequestRefusedError as error:
            if error.status != 409 or (found := self.job(job)).state != "cancelled":
                raise
            return found  # an attempt whose response was lost has cancelled the job

    def retry(self, job: str) -> Job:
        """Queue a failed or cancelled job again. Raises RequestRefusedError (409) for other jobs."""
        # The request is not sent again if the service may have seen it. If somebody has cancelled the job since then, a second
        # request would queue the job again.
        return parsed(self._send(Call("POST", _path(job, "/retry"), again=protocol.NOT_SENT)), job_from)

    def report(self, job: str) -> str:
        """Return the report on a completed job's values, an HTML page like that of `reflogp report`.

        Raises RequestRefusedError if the job is not done (409) or has no report (404; the error says why).
        """
        return self._send(Call("GET", _path(job, "/report"))).text

    def result(self, job: str, output_path: str | Path) -> Path:
        """Save a completed job's values as a Parquet file, with one row per row of the dataset, in the same order.

        An existing file is replaced only when the new file is complete. Raises RequestRefusedError if the job is not done (409)
        or has no result because no row of its dataset could be read (404), and UsageError if the file cannot be written.
        """
        output = files.check_output(output_path)
        with write_atomically(output) as hidden, hidden.open("wb") as partial:
            self._send(Call("GET", _path(job, "/result"), into=partial))
        return output

    def events(self, job: str, *, timeout: float | None = None) -> Generator[Job, None, None]:
        """Yield the job in its current state, and again after every change, until it is done, failed or cancelled.

        If several changes follow each other within a second, only the last state is yielded, perhaps some seconds later. The
        job's end is yielded within a second. The client keeps waiting if the connection is lost or the service restarts, and
        logs a warning when it begins to wait and when the service is back.

        Args:
            timeout: maximum number of seconds to wait, or None for no maximum. Either way, the client gives up when the service
                has not responded for 10 minutes.

        Raises:
            RequestRefusedError: there is no such job (status 404).
            DeadlineExceededError: the job was not finished within the timeout. The job continues on the service.
            ServiceUnreachableError: the service responded to none of the first 5 attempts, did not respond for 10 minutes, or
                was not responding when the timeout expired.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        last: Job | None = None
        pause = _FIRST_PAUSE
        while True:
            now = time.monotonic()
            wait = 0.0 if last is None else min(_WAIT_SECONDS, max(end - now, 0))
            tries, until = protocol.TRIES if last is None else math.inf, min(end, now + _AWAY)
            call = Call("GET", _path(job), {"wait": wait}, wait=wait + _SILENCE, tries=tries, until=until, polls=True)
            found = parsed(self._send(call), job_from)
            if found != last:
                yield found
            if found.finished:
                return
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineExceededError(
                    f"job {job} is still {found.state} after {timeout:g} seconds; the job continues on the service, so you can "
                    "wait for it again"
                )
            last, pause = found, min(2 * pause, _LONGEST_PAUSE)
            time.sleep(min(pause, left))

    def watch(
        self,
        job: str,
        on_change: Callable[[Job], None] | None = None,
        *,
        timeout: float | None = None,
        check: bool = False,
    ) -> Job:
        """Wait until a job is done, failed or cancelled, and return it. The timeout and the errors are those of `events`.

        Args:
            on_change: a function that is called with the job at the start and after every change.
            check: whether to raise JobFailedError if the job fails or is cancelled.
        """
        for found in self.events(job, timeout=timeout):
            if on_change is not None:
                on_change(found)
        if check and found.state != "done":
            raise JobFailedError(found)
        return found

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _send(self, call: protocol.Call) -> httpx.Response:
        for attempt in count(1):
            answer = self._try(call)
            pause = protocol.pause_after(answer, call, attempt, self.url)
            if pause is None:
                break
            if call.polls and attempt == 1:
                state, why = "away", type(answer).__name__
                if isinstance(answer, httpx.Response):
                    state, why = "busy" if answer.status_code == 429 else "away", f"status {answer.status_code}"
                logger.warning("%s is %s (%s); asking again", hide_secrets(self.url), state, why)
            time.sleep(pause)
        if call.polls and attempt > 1:
            logger.warning("%s answers again", hide_secrets(self.url))
        assert isinstance(answer, httpx.Response)
        return answer

    def _try(self, call: protocol.Call) -> protocol.Outcome:
        body = call.content.chunks() if isinstance(call.content, files.LocalFile) else call.content
        try:
            with self._http.stream(**protocol.arguments(call), content=body) as answer:
                if call.into is None or not answer.is_success:
                    answer.read()
                else:
                    call.into.seek(0)
                    call.into.truncate()  # removes what an earlier attempt wrote
                    for chunk in answer.iter_bytes():
                        call.into.write(chunk)
            return answer
        except httpx.TransportError as error:
            return error


def _path(job: str, more: str = "") -> str:
    return f"/v1/jobs/{quote(job, safe='')}{more}"


def _upload_from(entry: dict[str, Any]) -> UploadInfo:
    return UploadInfo(**known(UploadInfo, entry) | {"uploaded_at": datetime.fromisoformat(entry["uploaded_at"])})
