"""The ledger of jobs: what was asked, what state it is in, how it ended. SQLite in WAL mode: a killed service forgets nothing.

Knows jobs' states and who goes next. Does not know workers, files or HTTP. Safe to call from several threads; one process owns
it.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock
from typing import Any

from reflogp_service.server.models import DatasetSpec, Job, JobProgress, Jobs, JobSettings, JobState
from reflogp_store import UsageError

#: Points of a job's throughput that are kept; when there are more, every second one is dropped.
THROUGHPUT_POINTS = 200

#: Number of the schema below. A ledger of a higher number is refused.
_VERSION = 1
_SCHEMA = """
create table if not exists job (
    number integer primary key autoincrement,
    id text not null unique,
    state text not null,
    identity text not null,           -- Idempotency-Key of a token, else digest of the content: one job for one identity
    content text not null,            -- digest of what was asked
    settings text not null,
    dataset text not null,
    source text not null,             -- what the worker reads: {"file": …} or {"uri": …}
    reference_id text not null,
    priority integer not null,
    submitted_by text not null,
    created_at text not null,
    started_at text,
    finished_at text,
    attempts integer not null default 0,
    deaths integer not null default 0,
    suspects text not null default '[]',
    poison text not null default '{}',
    progress text not null default '{}',
    throughput text not null default '[]',
    note text,
    error text,
    summary text
) strict;
create unique index if not exists job_identity on job (identity);
create index if not exists job_line on job (state, priority desc, number);
create table if not exists upload (
    name text primary key, file text not null, bytes integer not null, sha256 text not null, uploaded_at text not null
) strict;
"""


@dataclass(frozen=True)
class Submission:
    """A job as it comes in.

    Attributes:
        identity: two submissions with the same one are the same job.
        content: digest of dataset content, reference id and settings.
        lasting: False where the content is only known by where it lies, which may hold another one later: a job that is done
            is then no answer to the same submission.
        source: what the worker will read.
    """

    identity: str
    content: str
    settings: JobSettings
    dataset: DatasetSpec
    source: dict[str, str]
    reference_id: str
    submitted_by: str
    lasting: bool = True


@dataclass(frozen=True)
class Claim:
    """A job that a worker shall begin.

    Attributes:
        deaths: of workers, since the job last got on.
        suspects: keys (hex) among which one may have killed a worker: they are scored in ever smaller groups.
        poison: keys (hex) that did, each with the reason: they are not scored again.
    """

    id: str
    settings: JobSettings
    source: dict[str, str]
    reference_id: str
    priority: int
    deaths: int = 0
    suspects: list[str] = field(default_factory=list)
    poison: dict[str, str] = field(default_factory=dict)


class Ledger:
    """Jobs in one SQLite file.

    Args:
        file: created where it is not there.

    Raises:
        UsageError: a newer reflogp wrote it, or it is no ledger.
    """

    def __init__(self, file: Path) -> None:
        self._db = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._lock = RLock()
        try:
            self._run("pragma journal_mode = wal")
            self._run("pragma synchronous = full")
            if self._all("pragma user_version")[0][0] > _VERSION:
                raise UsageError(f"{file} was written by a newer reflogp: upgrade, or name another state folder")
            self._db.executescript(_SCHEMA)
            self._run(f"pragma user_version = {_VERSION}")
        except sqlite3.DatabaseError as error:
            raise UsageError(f"{file} is no ledger of jobs ({error}): move it away, or name another state folder") from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def submit(self, asked: Submission) -> tuple[Job, bool]:
        """(the job, whether it is new). One of the same identity that failed or was cancelled is put in line again."""
        with self._lock:
            known = self._one("select id, state, content from job where identity = ?", asked.identity)
            if known is not None and known["state"] == "done" and not asked.lasting:
                self._run("update job set identity = id where id = ?", known["id"])
                known = None
            if known is not None:
                if known["content"] != asked.content:
                    raise DifferentContentError(known["id"])
                if known["state"] in ("failed", "cancelled"):
                    self.retry(known["id"])
                return self._job(known["id"]), False
            job = secrets.token_hex(8)
            self._run(
                "insert into job (id, state, identity, content, settings, dataset, source, reference_id, priority,"
                " submitted_by, created_at) values (?, 'queued', ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                job,
                asked.identity,
                asked.content,
                asked.settings.model_dump_json(),
                asked.dataset.model_dump_json(),
                json.dumps(asked.source),
                asked.reference_id,
                asked.settings.priority,
                asked.submitted_by,
                _now(),
            )
            return self._job(job), True

    def get(self, job: str) -> Job | None:
        with self._lock:
            row = self._one("select * from job where id = ?", job)
        return _as_job(row) if row else None

    def page(self, state: JobState | None = None, before: str | None = None, limit: int = 50) -> Jobs:
        """Up to `limit` jobs, the newest first, of one state or all; `before` is a job's id: only older ones."""
        with self._lock:
            where: list[str] = ["1"]
            values: list[str] = []
            if state is not None:
                where.append("state = ?")
                values.append(state)
            if before is not None:
                where.append("number < coalesce((select number from job where id = ?), 0)")
                values.append(before)
            query = f"select * from job where {' and '.join(where)} order by number desc limit ?"
            rows = self._all(query, *values, limit + 1)
            counts = {row["state"]: row["n"] for row in self._all("select state, count(*) n from job group by state")}
        jobs = [_as_job(row) for row in rows[:limit]]
        return Jobs(jobs=jobs, counts=counts, next_before=jobs[-1].id if len(rows) > limit else None)

    def requeue_running(self) -> int:
        """Put jobs that were running when the last service ended back in line; how many there were."""
        with self._lock:
            query = "update job set state = 'queued', note = 'the service ended' where state = 'running'"
            return self._run(query).rowcount

    def waiting(self) -> int:
        """Jobs in line."""
        with self._lock:
            row = self._one("select count(*) n from job where state = 'queued'")
        return int(row["n"]) if row else 0

    def highest_waiting(self) -> int | None:
        """Priority of the first job in line."""
        with self._lock:
            row = self._one("select max(priority) p from job where state = 'queued'")
        return None if row is None else row["p"]

    def claim(self, loaded: Iterable[str], patience_seconds: float) -> Claim | None:
        """The job that goes next, now running; None when nothing waits.

        The highest priority first, of these the oldest; but one whose reference is `loaded` may pass an older one that has
        not waited for `patience_seconds`, so that models are not loaded and unloaded for every job.
        """
        with self._lock:
            first = self._one("select * from job where state = 'queued' order by priority desc, number limit 1")
            if first is None:
                return None
            chosen, here = first, list(loaded)
            waited = (datetime.now(UTC) - datetime.fromisoformat(first["created_at"])).total_seconds()
            if here and first["reference_id"] not in here and waited < patience_seconds:
                marks = ",".join("?" * len(here))
                query = f"select * from job where state = 'queued' and priority = ? and reference_id in ({marks})"
                chosen = self._one(f"{query} order by number limit 1", first["priority"], *here) or first
            self._run(
                "update job set state = 'running', started_at = ?, attempts = attempts + 1, throughput = '[]', error = null"
                " where id = ?",
                _now(),
                chosen["id"],
            )
        return Claim(
            chosen["id"],
            JobSettings.model_validate_json(chosen["settings"]),
            json.loads(chosen["source"]),
            chosen["reference_id"],
            chosen["priority"],
            chosen["deaths"],
            json.loads(chosen["suspects"]),
            json.loads(chosen["poison"]),
        )

    def progressed(self, job: str, progress: JobProgress, committed: bool) -> None:
        """Note how far a running job is; `committed`: since the last time some of its work became durable."""
        with self._lock:
            row = self._one("select throughput from job where id = ? and state = 'running'", job)
            if row is None:
                return
            points = json.loads(row["throughput"])
            points.append((round(progress.seconds, 2), round(progress.tokens_per_second, 1)))
            if len(points) > THROUGHPUT_POINTS:
                points = points[::2]
            self._run(
                "update job set progress = ?, throughput = ?, deaths = case when ? then 0 else deaths end where id = ?",
                progress.model_dump_json(),
                json.dumps(points),
                committed,
                job,
            )

    def finish(self, job: str, state: JobState, *, summary: dict[str, Any] | None = None, error: str | None = None) -> None:
        """A running or queued job ends: done with a summary, failed with the reason, or cancelled."""
        with self._lock:
            self._run(
                "update job set state = ?, finished_at = ?, summary = ?, error = ?, deaths = 0, suspects = '[]'"
                " where id = ? and state in ('queued', 'running')",
                state,
                _now(),
                None if summary is None else json.dumps(summary),
                error,
                job,
            )

    def fetched(self, job: str, source: dict[str, str]) -> None:
        """A job's dataset has been fetched: later attempts read the file."""
        with self._lock:
            self._run("update job set source = ? where id = ?", json.dumps(source), job)

    def give_back(self, job: str, note: str) -> None:
        """A running job goes back in line, at its old place; the note says why."""
        with self._lock:
            self._run("update job set state = 'queued', note = ? where id = ? and state = 'running'", note, job)

    def died(self, job: str, suspects: list[str], poison: dict[str, str], note: str, narrowed: bool = False) -> int:
        """A job's worker died: back in line, with what is known about why.

        Args:
            narrowed: the search for what kills its workers got on by this, so that deaths count from here.

        Returns:
            How many died since the job last got on.
        """
        with self._lock:
            self._run(
                "update job set state = 'queued', deaths = case when ? then 0 else deaths + 1 end, suspects = ?, poison = ?,"
                " note = ? where id = ? and state = 'running'",
                narrowed,
                json.dumps(suspects),
                json.dumps(poison),
                note,
                job,
            )
            row = self._one("select deaths from job where id = ?", job)
        return int(row["deaths"]) if row else 0

    def retry(self, job: str) -> bool:
        """Put a failed or cancelled job in line again; False when it is neither. What was poison is tried once more."""
        with self._lock:
            changed = self._run(
                "update job set state = 'queued', error = null, finished_at = null, deaths = 0, suspects = '[]', poison = '{}'"
                " where id = ? and state in ('failed', 'cancelled')",
                job,
            )
        return changed.rowcount > 0

    def files_in_use(self) -> set[str]:
        """Files of jobs that are not done: a failed or cancelled one may be retried."""
        with self._lock:
            rows = self._all("select source from job where state <> 'done'")
        return {file for row in rows if (file := json.loads(row["source"]).get("file"))}

    def forget_before(self, moment: datetime) -> list[str]:
        """Delete jobs that ended before a moment; their ids."""
        with self._lock:
            query = "delete from job where state in ('done', 'failed', 'cancelled') and finished_at < ? returning id"
            return [row["id"] for row in self._all(query, moment.isoformat())]

    def put_upload(self, name: str, file: str, size: int, sha256: str) -> None:
        """An upload has arrived; one of the same name is replaced."""
        with self._lock:
            self._run("insert or replace into upload values (?, ?, ?, ?, ?)", name, file, size, sha256, _now())

    def uploads(self) -> list[dict[str, Any]]:
        """name, file, bytes, sha256, uploaded_at of every upload, by name."""
        with self._lock:
            return [dict(row) for row in self._all("select * from upload order by name")]

    def upload(self, name: str) -> dict[str, Any] | None:
        with self._lock:
            row = self._one("select * from upload where name = ?", name)
        return dict(row) if row else None

    def delete_upload(self, name: str) -> bool:
        with self._lock:
            return self._run("delete from upload where name = ?", name).rowcount > 0

    def _job(self, job: str) -> Job:
        found = self.get(job)
        assert found is not None
        return found

    def _run(self, query: str, *values: Any) -> sqlite3.Cursor:
        return self._db.execute(query, values)

    def _one(self, query: str, *values: Any) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._db.execute(query, values).fetchone()
        return row

    def _all(self, query: str, *values: Any) -> list[sqlite3.Row]:
        return self._db.execute(query, values).fetchall()


class DifferentContentError(Exception):
    """An Idempotency-Key came with another content than the first time. `args[0]` is the job's id."""


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _as_job(row: sqlite3.Row) -> Job:
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
        progress=JobProgress.model_validate_json(row["progress"]),
        throughput=json.loads(row["throughput"]),
        note=row["note"],
        error=row["error"],
        summary=json.loads(row["summary"]) if row["summary"] else None,
    )
