"""The ledger when SQLite fails: every statement of every call fails once, or for a while, and nothing is lost."""

import asyncio
import sqlite3
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime

import pytest

from reflogp.service.errors import LedgerDamagedError, LedgerError, LedgerUnavailableError
from reflogp.service.ledger import Ledger
from reflogp.service.pending_writes import PendingWrites
from reflogp.store import UsageError
from tests.service.faults import ERRORS, call_sites, install
from tests.service.test_ledger import put

NOW = datetime(2100, 1, 1, tzinfo=UTC)
UPLOAD = ("a.jsonl", "file", 3, "0" * 64)


def waiting(ledger):
    return put(ledger, "first")[0].id


def running(ledger):
    job = waiting(ledger)
    assert ledger.claim([], 0).id == job
    return job


def ended(ledger):
    job = running(ledger)
    ledger.finish(job, "failed", error="why")
    return job


def uploaded(ledger):
    ledger.put_upload(*UPLOAD)
    return UPLOAD[0]


#: A method -> what it needs, and the call.
CALLS = {
    "submit": (lambda ledger: None, lambda ledger, _: put(ledger, "new")[1]),
    "get": (waiting, lambda ledger, job: ledger.get(job).id == job),
    "page": (waiting, lambda ledger, job: [found.id for found in ledger.page().jobs] == [job]),
    "claim_of": (ended, lambda ledger, job: ledger.claim_of(job).id == job),
    "counts": (waiting, lambda ledger, job: ledger.counts()),
    "requeue_running": (running, lambda ledger, job: ledger.requeue_running() in (0, 1)),
    "highest_queued_priority": (waiting, lambda ledger, job: ledger.highest_queued_priority()),
    "claim": (waiting, lambda ledger, job: ledger.claim([], 0) is not None),
    "cancel": (running, lambda ledger, job: ledger.cancel(job)),
    "forget_deaths": (running, lambda ledger, job: ledger.forget_deaths(job)),
    "finish": (running, lambda ledger, job: ledger.finish(job, "done", summary={"rows": 1}) in (True, False)),
    "to_fetch": (waiting, lambda ledger, job: ledger.to_fetch(5)),
    "fetched": (waiting, lambda ledger, job: ledger.fetched(job, {"file": "/there"})),
    "fetch_again": (running, lambda ledger, job: ledger.fetch_again(job, "gone")),
    "note": (waiting, lambda ledger, job: ledger.note(job, "why")),
    "give_back": (running, lambda ledger, job: ledger.give_back(job, "why")),
    "died": (running, lambda ledger, job: ledger.died(job, "why", 3)),
    "retry": (ended, lambda ledger, job: ledger.retry(job) in (True, False)),
    "files_in_use": (waiting, lambda ledger, job: ledger.files_in_use()),
    "ended_before": (ended, lambda ledger, job: ledger.ended_before(NOW) == [job]),
    "forget": (ended, lambda ledger, job: ledger.forget([job])),
    "put_upload": (lambda ledger: None, lambda ledger, _: ledger.put_upload(*UPLOAD)),
    "uploads": (uploaded, lambda ledger, name: len(ledger.uploads())),
    "upload": (uploaded, lambda ledger, name: ledger.upload(name)["bytes"]),
    "delete_upload": (uploaded, lambda ledger, name: ledger.delete_upload(name) in (True, False)),
}
SITES = call_sites(Ledger)


def test_every_call_is_tested():
    assert set(SITES) == set(CALLS)


def content(file) -> list:
    """What a ledger holds, but for times and ids."""
    with sqlite3.connect(file) as db:
        db.row_factory = sqlite3.Row
        changing = {"id", "created_at", "started_at", "finished_at", "uploaded_at", "job"}
        return [
            sorted(item for item in dict(row).items() if item[0] not in changing)
            for table in ("job", "cancellation", "upload")
            for row in db.execute(f"select * from {table}")
        ]


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES)
def test_each_statement_of_each_call_fails_once(site, tmp_path, monkeypatch):
    prepare, call = CALLS[site]
    faults = install(monkeypatch, Ledger)

    def run(folder, plan=None):
        folder.mkdir()
        ledger = Ledger(folder / "jobs.sqlite", patience_seconds=5)
        try:
            prepared = prepare(ledger)
            faults.statements.clear()
            if plan is not None:
                faults.fail(site, **plan)
            result = call(ledger, prepared)
            assert not faults.armed(), plan
            assert ledger.trouble is None
            return result, content(folder / "jobs.sqlite")
        finally:
            ledger.close()

    expected = run(tmp_path / "good")
    statements = faults.statements[site]
    assert statements
    plans = [{"kind": kind, "after": at} for at in range(statements) for kind in ERRORS]
    if faults.commits[site]:  # a transaction, whose commit may succeed and be reported as failed
        plans.append({"kind": "disk", "committed": True})
    for number, plan in enumerate(plans):
        found = run(tmp_path / str(number), plan)
        if plan.get("committed") and site in (
            "claim",
            "died",
            "submit",
            "cancel",
            "retry",
            "delete_upload",
            "finish",
        ):
            continue  # run twice, as it must bear: see below
        assert found == expected, plan


def test_what_was_done_and_reported_as_failed_is_done_once(tmp_path, monkeypatch):
    faults = install(monkeypatch, Ledger)
    ledger = Ledger(tmp_path / "jobs.sqlite")

    def reported_as_failed(site, call):
        faults.fail(site, "disk", committed=True)
        result = call()
        assert not faults.armed()
        return result

    job = reported_as_failed("submit", lambda: put(ledger, "one"))[0].id
    assert ledger.counts() == {"queued": 1}
    assert reported_as_failed("claim", lambda: ledger.claim([], 0)) is None  # the first attempt has it
    assert ledger.counts() == {"running": 1}
    assert ledger.requeue_running("lost") == 1  # as the service does after a claim that failed
    assert ledger.claim([], 0).id == job
    assert reported_as_failed("died", lambda: ledger.died(job, "why", 3)) == 1
    assert ledger.claim([], 0).deaths == 1
    reported_as_failed("cancel", lambda: ledger.cancel(job))
    reported_as_failed("finish", lambda: ledger.finish(job, "cancelled"))
    assert ledger.counts() == {"cancelled": 1}
    reported_as_failed("retry", lambda: ledger.retry(job))
    assert ledger.counts() == {"queued": 1}
    ledger.close()


@pytest.mark.parametrize("kind", ERRORS)
def test_a_call_that_fails_for_long_is_told_in_a_sentence_and_works_again(tmp_path, monkeypatch, kind):
    faults = install(monkeypatch, Ledger)
    ledger = Ledger(tmp_path / "jobs.sqlite", patience_seconds=0.1)
    job = running(ledger)
    faults.fail("finish", kind, times=1000)
    with pytest.raises(LedgerUnavailableError) as caught:
        ledger.finish(job, "done", summary={})
    assert str(caught.value).startswith("the ledger of jobs (jobs.sqlite)")
    assert ledger.trouble is not None
    faults.clear()
    assert ledger.finish(job, "done", summary={})
    ledger.probe()
    assert ledger.trouble is None
    ledger.close()


def test_a_lock_that_another_process_holds(tmp_path):
    file = tmp_path / "jobs.sqlite"
    ledger = Ledger(file, patience_seconds=0.3)
    job = running(ledger)
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


def test_a_full_disk(tmp_path):
    """On a file system of 2 MB, where this user may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        ledger = Ledger(place / "jobs.sqlite", patience_seconds=0.1)
        job = running(ledger)
        with (place / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="space"):
            while filler.write(bytes(1 << 12)):
                pass
        with pytest.raises(LedgerUnavailableError, match=r"full|fails"):
            for number in range(2000):  # the log has some room of its own
                put(ledger, f"another {number}")
        assert ledger.get(job).state == "running"
        with pytest.raises(LedgerError):
            ledger.finish(job, "done", summary={"text": "x" * 100_000})
        (place / "filler").unlink()
        assert ledger.finish(job, "done", summary={"text": "x" * 100_000})
        assert ledger.trouble is None
        ledger.close()
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_damaged_pages_are_told_at_the_start_and_while_it_runs(tmp_path):
    file = tmp_path / "jobs.sqlite"
    ledger = Ledger(file, patience_seconds=0.1)
    damage(ledger, file)
    with pytest.raises(LedgerDamagedError, match=r"is damaged .*mkdir .*jobs\.sqlite\*") as caught:
        before = None
        while (page := ledger.page(before=before, limit=500)).next_before:
            before = page.next_before
    ledger.probe()
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
    ledger._file.write(
        lambda db: db.executemany(
            "insert into job (id, state, identity, content, settings, dataset, source, reference_id, priority, submitted_by,"
            f" created_at) values (?, 'done', ?, 'c', '{settings}', '{{\"upload\": \"a\"}}', '{{}}', 'r', 0, 'me', '2020')",
            rows,
        )
    )
    ledger._file._db.execute("pragma wal_checkpoint(truncate)").fetchall()
    size = file.stat().st_size
    with file.open("r+b") as raw:
        for place in range(size // 4, size * 3 // 4, 4096):
            raw.seek(place)
            raw.write(b"\xff" * 2000)


def test_cancelled_jobs_end_cancelled_whatever_happens_to_them(tmp_path):
    ledger = Ledger(tmp_path / "jobs.sqlite")
    ends = {
        "requeue": lambda job: ledger.requeue_running(),
        "give_back": lambda job: ledger.give_back(job, "why"),
        "died": lambda job: ledger.died(job, "why", 3),
        "died often": lambda job: ledger.died(job, "why", 1),
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


def test_writes_wait_for_the_ledger_in_order_and_are_done_once(tmp_path):
    file = tmp_path / "jobs.sqlite"
    ledger = Ledger(file, patience_seconds=0.1)
    jobs = [put(ledger, str(number))[0].id for number in range(3)]
    for _ in jobs:
        ledger.claim([], 0)
    said = []

    async def work():
        pending = PendingWrites(ledger)
        flusher = asyncio.create_task(pending.run())
        release = threading.Event()
        holder = threading.Thread(target=hold, args=(file, release))
        holder.start()
        await asyncio.sleep(0.3)
        await pending.put(
            jobs[0], lambda: ledger.finish(jobs[0], "done", summary={"n": 1}), lambda changed: said.append(changed)
        )
        await pending.put(jobs[1], lambda: ledger.give_back(jobs[1], "why"))
        await pending.put(jobs[2], lambda: 1 / 0)  # a defect holds nobody up
        assert pending.jobs == set(jobs) and len(pending) == 3
        release.set()
        holder.join()
        while len(pending):
            await asyncio.sleep(0.05)
        flusher.cancel()

    asyncio.run(work())
    assert said[-1] is True and said.count(True) == 1
    assert [ledger.get(job).state for job in jobs] == ["done", "queued", "running"]
    ledger.close()


def hold(file, release: threading.Event) -> None:
    with locked(file):
        release.wait(30)


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
