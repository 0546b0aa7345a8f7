"""The ledger of jobs on its own: who goes next, what is the same job, what a kill leaves."""

import sqlite3

import pytest

from reflogp.service.ledger import DifferentContentError, Ledger, Submission
from reflogp.service.models import DatasetSpec, JobProgress, JobSettings
from reflogp.store import UsageError


@pytest.fixture
def ledger(tmp_path):
    found = Ledger(tmp_path / "jobs.sqlite")
    yield found
    found.close()


def put(ledger, identity, *, content=None, priority=0, reference="a", lasting=True, most_queued=None):
    asked = Submission(
        identity=identity,
        content=content or identity,
        settings=JobSettings(reference="ref", priority=priority),
        dataset=DatasetSpec(upload="a.jsonl"),
        source={"file": f"/{identity}.jsonl", "digest": "0", "split": "train"},
        reference_id=reference,
        submitted_by="me",
        lasting=lasting,
    )
    return ledger.submit(asked, most_queued)


def test_the_same_identity_is_one_job_and_another_content_is_refused(ledger):
    first, new = put(ledger, "one")
    again, anew = put(ledger, "one")
    assert (first.id, new, anew) == (again.id, True, False)
    with pytest.raises(DifferentContentError):
        put(ledger, "one", content="other")


def test_what_lies_somewhere_is_only_the_same_job_until_it_is_done(ledger):
    first, _ = put(ledger, "uri", lasting=False)
    assert put(ledger, "uri", lasting=False) == (first, False)
    ledger.claim([], 0)
    ledger.finish(first.id, "done", summary={})
    second, new = put(ledger, "uri", lasting=False)
    assert new and second.id != first.id
    assert ledger.get(first.id).state == "done"


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


def test_deaths_count_until_something_is_committed(ledger):
    job = put(ledger, "one")[0].id
    for expected in (1, 2):
        ledger.claim([], 0)
        assert ledger.died(job, "note", 3) == expected
    assert ledger.claim([], 0).deaths == 2
    ledger.forget_deaths(job)
    assert ledger.died(job, "note", 3) == 1


def test_another_ledger_on_the_same_file_goes_on(ledger, tmp_path):
    job = put(ledger, "one")[0].id
    ledger.claim([], 0)
    again = Ledger(tmp_path / "jobs.sqlite")
    assert again.requeue_running() == 1
    assert again.claim([], 0).id == job
    assert again.files_in_use() == {"one.jsonl"}
    again.finish(job, "done", summary={"rows": 1})
    assert (again.get(job).summary, again.files_in_use()) == ({"rows": 1}, set())
    again.close()


def test_pages_go_back_in_time_with_the_latest_progress(ledger):
    ids = [put(ledger, str(n))[0].id for n in range(5)]
    first = ledger.claim([], 0).id
    ledger.progressed(first, JobProgress(scored=7))
    assert ledger.get(first).progress.scored == 7
    page = ledger.page(limit=2)
    assert [job.id for job in page.jobs] == ids[:2:-1]
    assert [job.id for job in ledger.page(before=page.next_before, limit=9).jobs] == ids[2::-1]
    assert page.counts == {"queued": 4, "running": 1}
    assert [job.id for job in ledger.page(state="running").jobs] == [first]


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


def test_as_many_deaths_as_the_limit_fail_the_job(ledger):
    job = put(ledger, "one")[0].id
    for expected, state in ((1, "queued"), (2, "queued"), (3, "failed")):
        ledger.claim([], 0)
        assert ledger.died(job, "its process ended: killed by SIGKILL", 3) == expected
        assert ledger.get(job).state == state
    assert "3 processes that ran the job ended" in ledger.get(job).error and "SIGKILL" in ledger.get(job).error
