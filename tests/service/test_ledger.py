"""The ledger of jobs, on its own."""

import asyncio
import sqlite3
from contextlib import closing

import pytest

from reflogp.service.ledger import Ledger, Submission
from reflogp.service.models import DatasetSpec, JobSettings
from reflogp.service.problems import Problem
from reflogp.store import UsageError


@pytest.fixture
def ledger(tmp_path):
    found = Ledger(tmp_path / "jobs.sqlite")
    yield found
    found.close()


def put(ledger, identity, *, priority=0, reference="a", most_queued=None, **source):
    settings, source = JobSettings(reference="ref", priority=priority), {"file": f"/{identity}.jsonl", **source}
    asked = Submission(identity, identity, settings, DatasetSpec(upload="a.jsonl"), source, reference, "me")
    return ledger.submit(asked, most_queued)


def test_priority_then_age_then_what_is_loaded(ledger):
    jobs = {name: put(ledger, name, priority=p, reference=r)[0].id for name, p, r in [
        ("old", 0, "a"), ("loaded", 0, "b"), ("urgent", 5, "c"), ("last", 0, "a")
    ]}  # fmt: skip
    order = [ledger.claim(["b"], patience_seconds=60).id for _ in range(4)]
    assert order == [jobs[name] for name in ("urgent", "loaded", "old", "last")]
    assert ledger.claim([], 60) is None
    for job in order:
        ledger.give_back(job, "why")
    assert [ledger.claim(["b"], patience_seconds=0).id for _ in range(2)] == [jobs["urgent"], jobs["old"]]


def test_a_full_queue_refuses_new_jobs_and_finds_known_ones(ledger):
    first, _ = put(ledger, "one", most_queued=1)
    with pytest.raises(Problem, match="too many jobs"):
        put(ledger, "two", most_queued=1)
    assert put(ledger, "one", most_queued=1) == (first, False)
    ledger.claim([], 0)
    ledger.finish(first.id, "failed", error="why")
    again, new = put(ledger, "one", most_queued=1)  # a failed job is put in line again by submitting it
    assert (again.id, again.state, again.error, new) == (first.id, "queued", None, False)
    assert not ledger.retry(first.id)


def test_a_job_that_is_submitted_after_its_cancellation_runs(ledger):
    """While the worker still stops the first one."""
    first, _ = put(ledger, "one")
    ledger.claim([], 0)
    assert ledger.cancel(first.id) == "running"
    second, new = put(ledger, "one")
    assert new and second.id != first.id
    assert put(ledger, "one") == (second, False)
    ledger.finish(first.id, "cancelled")
    assert ledger.claim([], 0).id == second.id
    assert ledger.retry(first.id)


def test_a_newer_ledger_and_what_is_none_are_refused_in_one_sentence(tmp_path):
    file = tmp_path / "jobs.sqlite"
    ledger = Ledger(file)
    for number in range(100):
        put(ledger, str(number))
    ledger.close()
    whole = file.read_bytes()
    with closing(sqlite3.connect(file)) as database:
        database.execute("pragma user_version = 3")
    with pytest.raises(UsageError, match="newer version of reflogp"):
        Ledger(file)
    quarter = len(whole) // 4
    file.write_bytes(whole[:quarter] + b"\xff" * quarter + whole[2 * quarter :])
    with pytest.raises(UsageError, match=r"is damaged \(.*mkdir -p .* && mv .*jobs\.sqlite\* "):
        Ledger(file)
    file.write_bytes(b"no database at all" * 1000)
    with pytest.raises(UsageError, match=r"jobs\.sqlite\) is damaged \(file is not a database\)"):
        Ledger(file)


def test_cancelled_jobs_end_cancelled_whatever_happens_to_them(ledger):
    ends = {
        "requeue": lambda job: ledger.requeue_lost([], "why"),
        "give_back": lambda job: ledger.give_back(job, "why"),
        "finish": lambda job: ledger.finish(job, "cancelled"),
    }
    for name, end in ends.items():
        job = put(ledger, name)[0].id
        assert ledger.claim([], 0).id == job
        assert ledger.cancel(job) == "running" and ledger.get(job).state == "running"
        end(job)
        found = ledger.get(job)
        assert (found.state, found.finished_at is not None, ledger.claim([], 0)) == ("cancelled", True, None), name
        assert ledger.retry(job) and ledger.claim([], 0).id == job  # the wish ended with the job
        ledger.give_back(job, "why")
        assert ledger.get(job).state == "queued", name
        assert ledger.cancel(job) == "queued"
    assert ledger.cancel("none") is None and ledger.cancel(job) == "cancelled"


def test_a_task_that_fails_is_started_again(monkeypatch, caplog):
    from reflogp.service import supervision

    monkeypatch.setattr(supervision, "_PAUSE", 0.001)
    runs = []

    async def work():
        runs.append(1)
        if len(runs) < 4:
            raise ValueError("a defect")

    asyncio.run(supervision.supervise("some work", work))
    assert len(runs) == 4 and 'the task "some work" failed and will be restarted' in caplog.text
