"""The ledger of jobs on its own: who goes next, what is the same job, what a kill leaves."""

import asyncio
import sqlite3
import subprocess
import sys
import time

import pytest

from reflogp.service.ledger import Ledger, Submission
from reflogp.service.ledger_file import LedgerDamagedError, LedgerUnavailableError
from reflogp.service.models import DatasetSpec, JobProgress, JobSettings
from reflogp.service.problems import Problem
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
    with pytest.raises(Problem, match="already used for a different job"):
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


def test_another_ledger_on_the_same_file_goes_on(ledger, tmp_path):
    job = put(ledger, "one")[0].id
    ledger.claim([], 0)
    again = Ledger(tmp_path / "jobs.sqlite")
    assert again.requeue_lost([], "why") == 1
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


def test_a_lock_that_another_process_holds(tmp_path):
    file = tmp_path / "jobs.sqlite"
    ledger = Ledger(file, patience_seconds=0.3)
    job = put(ledger, "one")[0].id
    ledger.claim([], 0)
    with locked(file):
        began = time.monotonic()
        with pytest.raises(LedgerUnavailableError, match="another process has locked the file"):
            ledger.finish(job, "done", summary={})
        assert ledger.get(job).state == "running"  # it can be read
        with pytest.raises(LedgerUnavailableError):
            ledger.retry(job)
        assert time.monotonic() - began < 5
        with pytest.raises(UsageError, match="another process has locked the file"):
            Ledger(file, patience_seconds=0.2)
    assert ledger.finish(job, "done", summary={}) and ledger.trouble is None
    ledger.close()


class locked:
    """A write lock that another process holds."""

    def __init__(self, file) -> None:
        program = (
            "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)\n"
            "db.execute('begin immediate'); print('locked', flush=True); sys.stdin.read()"
        )
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-c", program, str(file)], stdin=pipe, stdout=pipe)

    def __enter__(self) -> None:
        assert self._process.stdout.readline() == b"locked\n"

    def __exit__(self, *_) -> None:
        self._process.communicate()


def test_damaged_pages_are_told_at_the_start_and_while_it_runs(tmp_path):
    file = tmp_path / "jobs.sqlite"
    ledger = Ledger(file, patience_seconds=0.1)
    damage(ledger, file)
    with pytest.raises(LedgerDamagedError, match=r"is damaged .*mkdir .*jobs\.sqlite\*") as caught:
        before = None
        while (page := ledger.page(before=before, limit=500)).next_before:
            before = page.next_before
    ledger.requeue_lost([], "why")
    assert isinstance(ledger.trouble, LedgerDamagedError)  # a write elsewhere does not make it whole
    ledger.close()
    with pytest.raises(UsageError, match=r"is damaged "):
        Ledger(file, patience_seconds=0.1)
    command = str(caught.value).partition("`")[2].partition("`")[0]
    subprocess.run(command, shell=True, check=True)
    ledger = Ledger(file, patience_seconds=0.1)
    assert ledger.counts() == {} and len(list((tmp_path / "damaged").iterdir())) >= 1
    ledger.close()


def damage(ledger, file) -> None:
    """Write more rows than SQLite keeps in memory, and then rubbish over half of their pages."""
    rows = [(f"{number:016}", str(number)) for number in range(8000)]
    settings = '{"reference": "ref", "title": "' + "x" * 190 + '"}'
    with ledger.writing() as db:
        db.executemany(
            "insert into job (id, state, identity, content, settings, dataset, source, reference_id, priority, submitted_by,"
            f" created_at) values (?, 'done', ?, 'c', '{settings}', '{{\"upload\": \"a\"}}', '{{}}', 'r', 0, 'me', '2020')",
            rows,
        )
    ledger._writer.execute("pragma wal_checkpoint(truncate)").fetchall()
    size = file.stat().st_size
    with file.open("r+b") as raw:
        for place in range(size // 4, size * 3 // 4, 4096):
            raw.seek(place)
            raw.write(b"\xff" * 2000)


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


def test_a_job_that_has_to_be_fetched_is_passed_over_until_it_has_a_file(tmp_path):
    ledger = Ledger(tmp_path / "jobs.sqlite")
    uri = put(ledger, "uri", priority=9)[0].id
    with sqlite3.connect(tmp_path / "jobs.sqlite") as db:
        db.execute('update job set source = \'{"uri": "https://h/a.jsonl", "name": "n", "split": "train"}\'')
    file = put(ledger, "file")[0].id
    assert [job for job, _ in ledger.to_fetch(5)] == [uri]
    assert ledger.highest_queued_priority() == 0 and ledger.claim([], 0).id == file and ledger.claim([], 0) is None
    ledger.note(uri, "being fetched")
    assert ledger.get(uri).note == "being fetched"
    ledger.fetched(uri, {"uri": "https://h/a.jsonl", "file": "/f", "digest": "d"})
    assert ledger.get(uri).note is None and ledger.to_fetch(5) == []
    assert ledger.claim([], 0).id == uri
    ledger.fetch_again(uri, "gone")
    assert [job for job, _ in ledger.to_fetch(5)] == [uri]
    ledger.fetched(uri, {"uri": "https://h/a.jsonl", "file": "/f", "digest": "d"})
    assert ledger.claim([], 0).id == uri
    assert ledger.files_in_use() == {"f", "file.jsonl"}
    ledger.finish(uri, "failed", error="why")
    assert ledger.files_in_use() == {"file.jsonl"}
    assert ledger.retry(uri) and [job for job, _ in ledger.to_fetch(5)] == [uri]
    ledger.close()


def test_a_task_that_fails_is_started_again(monkeypatch, caplog):
    from reflogp.service import supervision

    monkeypatch.setattr(supervision, "_FIRST_PAUSE", 0.001)
    runs = []

    async def work():
        runs.append(1)
        if len(runs) < 4:
            raise ValueError("a defect")

    asyncio.run(supervision.supervise("some work", work))
    assert len(runs) == 4 and 'the task "some work" failed and will be restarted' in caplog.text
