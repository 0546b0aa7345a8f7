"""The ledger of jobs on its own: who goes next, what is the same job, how a cancelled one ends."""

import asyncio
import sqlite3

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


def put(ledger, identity, *, priority=0, reference="a", most_queued=None):
    asked = Submission(
        identity=identity,
        content=identity,
        settings=JobSettings(reference="ref", priority=priority),
        dataset=DatasetSpec(upload="a.jsonl"),
        source={"file": f"/{identity}.jsonl", "digest": "0", "split": "train"},
        reference_id=reference,
        submitted_by="me",
    )
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


def test_a_failed_job_is_put_in_line_again_by_submitting_it(ledger):
    job, _ = put(ledger, "one")
    ledger.claim([], 0)
    ledger.finish(job.id, "failed", error="why")
    again, new = put(ledger, "one")
    assert (again.id, again.state, again.error, new) == (job.id, "queued", None, False)
    assert not ledger.retry(job.id)


def test_a_full_queue_refuses_new_jobs_and_finds_known_ones(ledger):
    first, _ = put(ledger, "one", most_queued=1)
    with pytest.raises(Problem, match="too many jobs"):
        put(ledger, "two", most_queued=1)
    assert put(ledger, "one", most_queued=1) == (first, False)


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
    newer, damaged = tmp_path / "newer.sqlite", tmp_path / "damaged.sqlite"
    Ledger(newer).close()
    with sqlite3.connect(newer) as database:
        database.execute("pragma user_version = 3")
    damaged.write_bytes(b"no database at all" * 1000)
    with pytest.raises(UsageError, match="newer version of reflogp"):
        Ledger(newer)
    with pytest.raises(UsageError, match=r"damaged\.sqlite\) is damaged \(file is not a database\)"):
        Ledger(damaged)
    ledger = Ledger(tmp_path / "pages.sqlite")
    for number in range(100):
        put(ledger, str(number))
    ledger.close()
    content = bytearray((tmp_path / "pages.sqlite").read_bytes())
    content[len(content) // 4 : len(content) // 2] = b"\xff" * (len(content) // 2 - len(content) // 4)
    (tmp_path / "pages.sqlite").write_bytes(content)
    with pytest.raises(UsageError, match=r"is damaged \(.*mkdir -p .* && mv .*pages\.sqlite\* "):
        Ledger(tmp_path / "pages.sqlite")


def test_cancelled_jobs_end_cancelled_whatever_happens_to_them(tmp_path):
    ledger = Ledger(tmp_path / "jobs.sqlite")
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
    ledger.close()


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
