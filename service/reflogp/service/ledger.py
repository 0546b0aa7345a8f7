"""Store the service's ledger in an SQLite file in WAL mode.

The ledger records all uploads and all jobs, with each job's state and summary. The progress of a running job is only
in memory until its state changes. A write is on disk when its call returns, so a service that is killed loses no change of a
job's state. The ledger is thread-safe, and belongs to one service at a time. A call that fails raises LedgerError.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reflogp.service.ledger_file import LedgerFile
from reflogp.service.models import UNFINISHED, DatasetSpec, Job, JobProgress, Jobs, JobSettings, JobState
from reflogp.service.problems import Problem
from reflogp.service.runner.order import Claim

#: Version of the schema below. A ledger with a higher version is refused. Version 1 has further columns, which are not used.
_VERSION = 2
_SCHEMA = """
create table if not exists job (
    number integer primary key autoincrement,
    id text not null unique,
    state text not null,
    identity text not null,           -- the submitter and the Idempotency-Key, or else `content`; one job per identity
    content text not null,            -- digest of dataset, reference and settings
    settings text not null,
    dataset text not null,
    source text not null,             -- see Submission.source; has no key `file` until the dataset has been fetched
    reference_id text not null,
    priority integer not null,
    submitted_by text not null,
    created_at text not null,
    started_at text,
    finished_at text,
    attempts integer not null default 0,
    progress text not null default '{}',
    note text,
    error text,
    summary text
) strict;
create unique index if not exists job_identity on job (identity);
create index if not exists job_line on job (state, priority desc, number);
create table if not exists cancellation (job text primary key) strict;  -- running jobs that were cancelled
create table if not exists origin (job text primary key, request text, traceparent text) strict;  -- the submitting request
create table if not exists upload (
    name text primary key, file text not null, bytes integer not null, sha256 text not null, uploaded_at text not null
) strict;
"""
#: SQL condition: the job's dataset is available as a file, so a worker can run the job.
_HAS_FILE = "json_extract(source, '$.file') is not null"


@dataclass(frozen=True)
class Submission:
    """A job that is being submitted. A second submission of the same identity is the same job, unless the data may differ.

    The data may differ if the earlier job is done and the dataset is given by its URI, or if its rows refer to image files,
    which `content` does not cover. Then there is a new job, unless an Idempotency-Key was sent.
    """

    identity: str  # the submitter and the Idempotency-Key, or `content` if no key was sent
    #: SHA-256 digest (hex) of the reference id, the tokenizer, the dataset and the settings except priority and title. The
    #: dataset stands there by its URI, or else by its content's digest and, if the job names a path, by the path without links.
    content: str
    settings: JobSettings
    dataset: DatasetSpec
    #: Describes the dataset for the runner: name, split, and file, digest, path, uri and config where they apply. If there is a
    #: URI, file and digest are added when the dataset has been fetched.
    source: dict[str, str]
    reference_id: str
    submitted_by: str
    lasting: bool = True  # False if no Idempotency-Key was sent and the dataset is given by its URI
    request: str | None = None  # X-Request-Id and W3C trace context of the submitting request
    traceparent: str | None = None


class Ledger(LedgerFile):
    def __init__(self, file: Path, patience_seconds: float = 5.0) -> None:
        super().__init__(file, _SCHEMA, _VERSION, patience_seconds)
        self._running: dict[str, JobProgress] = {}  # the progress of running jobs, by their ids

    def submit(self, asked: Submission, most_queued: int | None = None) -> tuple[Job, bool]:
        """Record a submission. Return its job, and whether the job is new. A job that failed or was cancelled is queued again.

        Raises Problem: 409 if a job with this identity has different content, and 429 if the job would be new, but
        `most_queued` jobs are already queued.
        """
        with self.writing() as db:
            known = db.execute("select id, state, content, summary from job where identity = ?", [asked.identity]).fetchone()
            cancelled = "select 1 from cancellation where job = ?"
            if known is not None and (
                (known["state"] == "done" and not _is_lasting(asked, known["summary"]))
                or (known["state"] == "running" and db.execute(cancelled, [known["id"]]).fetchone())
            ):
                # the new job takes over the identity; identities must be unique, so the old job's id becomes its identity
                db.execute("update job set identity = id where id = ?", [known["id"]])
                known = None
            job = _submit_new(db, asked, most_queued) if known is None else _submit_again(db, asked, known)
            row = db.execute("select * from job where id = ?", [job]).fetchone()
            return _as_job(row, self._running), known is None

    def get(self, job: str) -> Job | None:
        running = dict(self._running)  # before the file is read: a job that has ended meanwhile has its progress there
        row = self._one("select * from job where id = ?", job)
        return _as_job(row, running) if row else None

    def claim_of(self, job: str) -> Claim | None:
        row = self._one("select * from job where id = ?", job)
        return None if row is None else _as_claim(row, None)

    def page(self, state: JobState | None = None, before: str | None = None, limit: int = 50) -> Jobs:
        """Return a page of up to `limit` jobs, newest first; with `before`, only those older than this job."""
        where: list[str] = ["1"]
        values: list[Any] = []
        if state is not None:
            where.append("state = ?")
            values.append(state)
        if before is not None:
            where.append("number < coalesce((select number from job where id = ?), 0)")
            values.append(before)
        query = f"select * from job where {' and '.join(where)} order by number desc limit ?"
        running = dict(self._running)
        rows = self._all(query, *values, limit + 1)
        jobs = [_as_job(row, running) for row in rows[:limit]]
        return Jobs(jobs=jobs, counts=self.counts(), next_before=jobs[-1].id if len(rows) > limit else None)

    def counts(self) -> dict[JobState, int]:
        return {row["state"]: row["n"] for row in self._all("select state, count(*) n from job group by state")}

    def requeue_lost(self, held: Collection[str], note: str) -> int:
        """Queue again all jobs that are recorded as running, except those in `held`, or end those that were cancelled.

        Each call writes to the ledger, so that `trouble` says whether the ledger can be used. Return the number of jobs.
        """
        with self.writing() as db:
            self.probe(db)
            return _requeue(db, f"state = 'running' and id not in ({_marks(held)})", note, *held)

    def highest_queued_priority(self, but: Collection[str] = ()) -> int | None:
        """Return the highest priority among queued jobs that have a dataset file and are not in `but`."""
        ready = f"state = 'queued' and {_HAS_FILE} and id not in ({_marks(but)})"
        row = self._one(f"select priority from job where {ready} order by priority desc, number limit 1", *but)
        return None if row is None else row["priority"]

    def claim(self, loaded: Iterable[str], patience_seconds: float, but: Collection[str] = ()) -> Claim | None:
        """Mark the next job as running and return it, or return None if no queued job can begin.

        The next job is the oldest of the highest priority. If its model is not `loaded` and it was first submitted less than
        `patience_seconds` ago, a younger job of its priority whose model is loaded runs first, so that not every job loads a
        model. Jobs whose dataset has not been fetched yet and jobs in `but` are skipped.
        """
        here = list(loaded)
        ready = f"state = 'queued' and {_HAS_FILE} and id not in ({_marks(but)})"
        query = f"select * from job where {ready} order by priority desc, number limit 1"
        of_loaded = (
            f"select * from job where {ready} and priority = ? and reference_id in ({_marks(here)}) order by number limit 1"
        )
        with self.writing() as db:
            chosen: sqlite3.Row | None = db.execute(query, [*but]).fetchone()
            if chosen is None:
                return None
            waited = (datetime.now(UTC) - datetime.fromisoformat(chosen["created_at"])).total_seconds()
            if here and chosen["reference_id"] not in here and waited < patience_seconds:
                chosen = db.execute(of_loaded, [*but, chosen["priority"], *here]).fetchone() or chosen
            db.execute(
                "update job set state = 'running', started_at = ?, attempts = attempts + 1, error = null where id = ?",
                [_now(), chosen["id"]],
            )
            origin = db.execute("select request, traceparent from origin where job = ?", [chosen["id"]]).fetchone()
            self._running.pop(chosen["id"], None)
            return _as_claim(chosen, origin)

    def cancel(self, job: str) -> JobState | None:
        """Cancel a job. Return the state that it had, or None for an unknown job.

        A queued job ends immediately, a running job when its runner stops or dies. If the runner finishes it first, it ends as
        done or failed.
        """
        with self.writing() as db:
            row = db.execute("select state from job where id = ?", [job]).fetchone()
            state: JobState | None = None if row is None else row["state"]
            if state == "running":
                db.execute("insert or ignore into cancellation values (?)", [job])
            elif state == "queued":
                _finish(db, job, "cancelled", None, None)
            return state

    def progressed(self, job: str, progress: JobProgress) -> None:
        """Keep the latest progress of a running job in memory. It is written when the job's state changes."""
        self._running[job] = progress

    def is_cancelled(self, job: str) -> bool:
        return self._one("select 1 from cancellation where job = ?", job) is not None

    def finish(self, job: str, state: JobState, *, summary: dict[str, Any] | None = None, error: str | None = None) -> bool:
        """End a queued or running job. Return False if the job had already ended."""
        with self._changing(job) as db:
            return _finish(db, job, state, summary, error)

    def to_fetch(self, limit: int, but: Collection[str] = ()) -> list[tuple[str, dict[str, str]]]:
        """Return (job id, source) of the queued jobs whose datasets must be fetched, in the order of the queue."""
        query = f"select id, source from job where state = 'queued' and not ({_HAS_FILE}) and id not in ({_marks(but)})"
        rows = self._all(f"{query} order by priority desc, number limit ?", *but, limit)
        return [(row["id"], json.loads(row["source"])) for row in rows]

    def fetched(self, job: str, source: dict[str, str]) -> None:
        """Record that the dataset of a queued job has been fetched into the file or folder `source["file"]`."""
        with self.writing() as db:
            query = "update job set source = ?, note = null where id = ? and state = 'queued'"
            db.execute(query, [json.dumps(source), job])

    def note(self, job: str, note: str) -> None:
        """Say what a queued job whose dataset must still be fetched is waiting for."""
        with self.writing() as db:
            db.execute(f"update job set note = ? where id = ? and state = 'queued' and not ({_HAS_FILE})", [note, job])

    def give_back(self, job: str, note: str) -> None:
        """Put a running job back into the queue at its previous position, and note why; end it if it was cancelled."""
        with self._changing(job) as db:
            _requeue(db, "id = ? and state = 'running'", note, job)

    def retry(self, job: str) -> bool:
        """Queue a failed or cancelled job again; return False if it is in another state.

        If the dataset was given by its URI, it is fetched again.
        """
        with self.writing() as db:
            return _retry(db, job)

    def files_in_use(self) -> set[str]:
        """Return the names of the dataset files of all uploads, and of all jobs that may run (again) without fetching them."""
        may_run = f"state in {UNFINISHED} or (state <> 'done' and json_extract(source, '$.uri') is null)"
        of_jobs = f"select json_extract(source, '$.file') from job where {_HAS_FILE} and ({may_run})"
        return {Path(row["file"]).name for row in self._all(f"select file from upload union {of_jobs}")}

    def ended_before(self, moment: datetime) -> list[str]:
        """Return the ids of jobs that ended before the given time, which must be in UTC."""
        query = "select id from job where state in ('done', 'failed', 'cancelled') and finished_at < ?"
        return [row["id"] for row in self._all(query, moment.isoformat())]

    def forget(self, jobs: Collection[str]) -> None:
        """Delete those of the given jobs that have ended."""
        with self.writing() as db:
            query = "delete from job where state in ('done', 'failed', 'cancelled') and id = ?"
            db.executemany(query, [[job] for job in jobs])
            db.execute("delete from origin where job not in (select id from job)")

    def put_upload(self, name: str, file: str, size: int, sha256: str) -> None:
        """Record an upload, replacing any earlier upload with the same name."""
        with self.writing() as db:
            db.execute("insert or replace into upload values (?, ?, ?, ?, ?)", [name, file, size, sha256, _now()])

    def uploads(self) -> list[dict[str, Any]]:
        """Return all uploads by name: dicts with the keys name, file, bytes, sha256 and uploaded_at."""
        return [dict(row) for row in self._all("select * from upload order by name")]

    def upload(self, name: str) -> dict[str, Any] | None:
        row = self._one("select * from upload where name = ?", name)
        return dict(row) if row else None

    def delete_upload(self, name: str) -> bool:
        with self.writing() as db:
            return db.execute("delete from upload where name = ?", [name]).rowcount > 0

    @contextmanager
    def _changing(self, job: str) -> Iterator[sqlite3.Connection]:
        """Write a change of a running job's state, together with the progress that the job has made."""
        with self.writing() as db:
            if (progress := self._running.get(job)) is not None:
                values = [progress.model_dump_json(), job]
                db.execute("update job set progress = ? where id = ? and state = 'running'", values)
            yield db
        self._running.pop(job, None)

    def _one(self, query: str, *values: Any) -> sqlite3.Row | None:
        with self.reading() as db:
            found: sqlite3.Row | None = db.execute(query, values).fetchone()
            return found

    def _all(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self.reading() as db:
            return db.execute(query, values).fetchall()


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _marks(values: Collection[str]) -> str:
    return ",".join("?" * len(values))


def _is_lasting(asked: Submission, summary: str | None) -> bool:
    """Return whether a done job with this summary is the answer to a submission of the same identity."""
    names_files = summary is not None and bool(json.loads(summary).get("image_files"))
    return asked.lasting and not (names_files and asked.identity == asked.content)


def _finish(db: sqlite3.Connection, job: str, state: JobState, summary: dict[str, Any] | None, error: str | None) -> bool:
    changed = db.execute(
        "update job set state = ?, finished_at = ?, summary = ?, error = ? where id = ? and state in ('queued', 'running')",
        [state, _now(), None if summary is None else json.dumps(summary), error, job],
    )
    db.execute("delete from cancellation where job = ?", [job])
    return changed.rowcount > 0


def _requeue(db: sqlite3.Connection, condition: str, note: str, *values: str) -> int:
    """Queue again all jobs that match an SQL condition, but end those that were cancelled. Return how many matched."""
    cancelled = "id in (select job from cancellation)"
    query = (
        f"update job set state = case when {cancelled} then 'cancelled' else 'queued' end,"
        f" finished_at = case when {cancelled} then ? end, note = ? where {condition}"
    )
    changed = db.execute(query, [_now(), note, *values])
    db.execute("delete from cancellation where job not in (select id from job where state = 'running')")
    return changed.rowcount


def _retry(db: sqlite3.Connection, job: str) -> bool:
    changed = db.execute(
        "update job set state = 'queued', error = null, finished_at = null where id = ? and state in ('failed', 'cancelled')",
        [job],
    )
    if changed.rowcount:
        _forget_file(db, job)
    return changed.rowcount > 0


def _forget_file(db: sqlite3.Connection, job: str) -> None:
    """If a job's dataset is given by its URI, have it fetched again."""
    db.execute(
        "update job set source = json_remove(source, '$.file', '$.digest')"
        " where id = ? and json_extract(source, '$.uri') is not null",
        [job],
    )


def _submit_new(db: sqlite3.Connection, asked: Submission, most_queued: int | None) -> str:
    queued = db.execute("select count(*) from job where state = 'queued'").fetchone()[0]
    if most_queued is not None and queued >= most_queued:
        raise Problem(429, "too many jobs are queued", "try again when some jobs have finished", {"Retry-After": "60"})
    job = secrets.token_hex(8)
    row = {
        "id": job,
        "state": "queued",
        "identity": asked.identity,
        "content": asked.content,
        "settings": asked.settings.model_dump_json(),
        "dataset": asked.dataset.model_dump_json(),
        "source": json.dumps(asked.source),
        "reference_id": asked.reference_id,
        "priority": asked.settings.priority,
        "submitted_by": asked.submitted_by,
        "created_at": _now(),
    }
    db.execute(f"insert into job ({', '.join(row)}) values ({_marks(row)})", [*row.values()])
    _set_origin(db, job, asked)
    return job


def _submit_again(db: sqlite3.Connection, asked: Submission, known: sqlite3.Row) -> str:
    """Queue an existing job again if it has failed or was cancelled, and return its id."""
    if known["content"] != asked.content:
        detail = f"this Idempotency-Key was already used for a different job ({known['id']})"
        raise Problem(409, detail, "use a new key for each new job")
    job: str = known["id"]
    if known["state"] in ("failed", "cancelled"):
        # the same content may have been submitted as another upload, or by another path to the same file
        place = [asked.dataset.model_dump_json(), json.dumps(asked.source), job]
        db.execute("update job set dataset = ?, source = ? where id = ?", place)
        _set_origin(db, job, asked)
    _retry(db, job)
    return job


def _set_origin(db: sqlite3.Connection, job: str, asked: Submission) -> None:
    db.execute("insert or replace into origin values (?, ?, ?)", [job, asked.request, asked.traceparent])


def _as_claim(row: sqlite3.Row, origin: sqlite3.Row | None) -> Claim:
    return Claim(
        row["id"],
        JobSettings.model_validate_json(row["settings"]),
        json.loads(row["source"]),
        row["reference_id"],
        row["priority"],
        *(origin or (None, None)),
    )


def _as_job(row: sqlite3.Row, running: Mapping[str, JobProgress]) -> Job:
    progress = running.get(row["id"]) if row["state"] == "running" else None
    return Job(
        id=row["id"],
        state=row["state"],
        settings=JobSettings.model_validate_json(row["settings"]),
        dataset=DatasetSpec.model_validate_json(row["dataset"]),
        reference_id=row["reference_id"],
        submitted_by=row["submitted_by"],
        created_at=row["created_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        attempts=row["attempts"],
        progress=progress or JobProgress.model_validate_json(row["progress"]),
        note=row["note"],
        error=row["error"],
        summary=json.loads(row["summary"]) if row["summary"] else None,
    )
