"""One job on both workers of a service, and its runner: real processes, which are really killed."""

import os
import random
import re
import signal
import time
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from reflogp.client import Client, ServicePath
from reflogp.scoring import EngineChoice, score
from reflogp.scoring.errors import EngineError
from reflogp.scoring.runs.pipeline import Miss
from reflogp.scoring.runs.scheduler import Scheduler
from reflogp.scoring.torch_engine import Sequence
from tests.conftest import write_rows
from tests.scoring.deadly import POISON, deadly_model
from tests.scoring.stored_rows import rows_of, same_rows
from tests.service.serving import token_rows, wait_until

SMALL = {"devices": ["cpu", "cpu"], "token_budget": 256, "commit_seconds": 0.5, "pinned": "ref"}


@pytest.fixture
def service(serve):
    with serve(**SMALL) as service:
        yield service


def lent(service):
    """Lines of the log that say that another worker was lent to a running job."""
    return [line for line in list(service.log) if re.search(r"lent worker \d to the job as well", line)]


def values_are_those_of_one_engine(file, folder, tmp_path):
    engine = EngineChoice("torch", "cpu", 256)
    summary = score(str(folder), str(file), tmp_path / "here", dtype="float32", engine=engine)
    same_rows(rows_of(tmp_path / "here", summary.reference_id), rows_of(tmp_path / "store", summary.reference_id))


@pytest.mark.slow
def test_an_idle_worker_helps_with_a_job_and_its_values_are_the_same(service, client, tmp_path, reference_folder):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(1800, seed=1))
    job = client.watch(client.submit(file, "ref").id)
    assert (job.state, job.summary["scored"], job.summary["workers"]) == ("done", 3600, 2), "".join(service.log)
    assert lent(service)
    values_are_those_of_one_engine(file, reference_folder, tmp_path)


@pytest.mark.slow
def test_workers_that_are_killed_in_a_shared_job_lose_nothing(service, client, tmp_path, reference_folder):
    """Helpers and the job's own worker, at random moments."""
    file = write_rows(tmp_path / "rows.jsonl", token_rows(1800, seed=3))
    moments = random.Random(4)
    killed: list[int] = []
    job = client.submit(file, "ref")

    def ended():
        return client.job(job.id).state not in ("queued", "running")

    while not ended() and len(killed) < 3:
        wait_until(lambda: len(lent(service)) > len(killed) or ended())
        time.sleep(moments.random())
        if alive := service.workers():
            killed.append(moments.choice(alive).pid)
            os.kill(killed[-1], signal.SIGKILL)
    job = client.watch(job.id)
    assert job.state == "done" and job.summary["bad_rows"] == 0, "".join(service.log)
    assert len(killed) > 1
    values_are_those_of_one_engine(file, reference_folder, tmp_path)


@pytest.mark.slow
def test_a_job_in_line_takes_a_helper_away(service, client, tmp_path, reference_folder):
    rows = token_rows(3600, seed=5)
    first, second = write_rows(tmp_path / "a.jsonl", rows[:3200]), write_rows(tmp_path / "b.jsonl", rows[3200:])
    few = [token_rows(4, seed=seed) for seed in (8, 9)]
    few_jobs = [client.submit(write_rows(tmp_path / f"{n}.jsonl", part), "ref").id for n, part in enumerate(few)]
    assert [client.watch(job).state for job in few_jobs] == ["done"] * 2  # the first job of a worker starts later
    one = client.submit(first, "ref")
    wait_until(lambda: lent(service))
    two = client.watch(client.submit(second, "ref").id)
    state = client.job(one.id).state
    one = client.watch(one.id)
    assert (one.state, two.state, state) == ("done", "done", "running"), "".join(service.log)
    everything = [*rows, *few[0], *few[1]]
    values_are_those_of_one_engine(write_rows(tmp_path / "all.jsonl", everything), reference_folder, tmp_path)


ILLEGAL = "CUDA error: an illegal memory access was encountered"
KILLED = "the sequence killed two workers (killed by SIGKILL"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "more", "says"), [(1, {}, KILLED), (1, {"raises": ILLEGAL}, ILLEGAL), (2, {"raises": ILLEGAL}, ILLEGAL)]
)
def test_a_row_that_ends_workers_costs_that_row_only(serve, tmp_path, reference_folder, devices, more, says):
    """Whether the process is killed or says why it ends: its job goes on, and the row is searched for in the same way."""
    model = deadly_model(reference_folder, tmp_path / "lost", **more)
    rows = token_rows(300, seed=9)
    rows[200]["rejected_ids"][4:8] = POISON
    with serve(model, **SMALL | {"devices": ["cpu"] * devices}) as service, Client(service.url) as client:
        job = client.watch(client.submit(write_rows(tmp_path / "rows.jsonl", rows), "ref").id)
        errors = pq.read_table(client.result(job.id, tmp_path / "result.parquet"))["error"].to_pylist()
    summary = job.summary  # of the last attempt
    assert (job.state, job.attempts, summary["bad_row_numbers"]) == ("done", 1, [200]), "".join(service.log)
    assert summary["hits"] + summary["scored"] == 599 and summary["failed"] == 1
    [reason] = summary["bad_row_reasons"]
    assert says in reason["reason"] and (reason["rows"], reason["examples"]) == (1, [200])
    assert [at for at, error in enumerate(errors) if error] == [200] and says in errors[200]


@pytest.mark.slow
def test_a_runner_that_is_killed_loses_nothing_and_takes_no_worker_along(service, client, tmp_path, reference_folder):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(1800, seed=11))
    moments = random.Random(5)
    wait_until(lambda: len(service.workers()) == 2)
    workers = service.workers()
    job = client.submit(file, "ref")
    for count in (1, 2):
        wait_until(lambda: len(service.started_runners()) == count)  # noqa: B023
        committed = client.job(job.id).progress
        wait_until(lambda: client.job(job.id).progress.scored > committed.scored)  # noqa: B023
        time.sleep(moments.random() / 2)
        os.kill(service.started_runners()[-1], signal.SIGKILL)
    job = client.watch(job.id)
    assert (job.state, job.summary["bad_rows"], job.attempts) == ("done", 0, 3), "".join(service.log)
    assert service.workers() == workers
    values_are_those_of_one_engine(file, reference_folder, tmp_path)


@pytest.mark.slow
def test_a_job_whose_file_is_touched_fails_and_goes_on_when_it_is_tried_again(serve, tmp_path, reference_folder):
    """Its content is the same."""
    file = write_rows(tmp_path / "rows.jsonl", token_rows(6000, seed=13))
    with serve(**SMALL, dataset_roots=[str(tmp_path)]) as service, Client(service.url) as client:
        job = client.submit(ServicePath(str(file)), "ref")
        wait_until(lambda: client.job(job.id).progress.scored > 20)
        os.utime(file, (1, 1))
        job = client.watch(job.id)
        assert job.state == "failed" and "changed" in job.error, "".join(service.log)
        client.retry(job.id)
        job = client.watch(job.id)
    assert (job.state, job.summary["bad_rows"], job.summary["hits"] > 0) == ("done", 0, True), "".join(service.log)
    values_are_those_of_one_engine(file, reference_folder, tmp_path)


@pytest.mark.slow
def test_a_job_goes_on_when_its_only_worker_could_not_be_started_for_a_while(serve, tmp_path, reference_folder):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(1800, seed=14))
    with serve(**SMALL | {"devices": ["cpu"]}) as service, Client(service.url) as client:
        job = client.submit(file, "ref")
        wait_until(lambda: client.job(job.id).progress.scored > 20)
        while sum("worker 0 ended" in line for line in list(service.log)) < 6:
            for worker in service.workers():
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
        job = client.watch(job.id)
    assert (job.state, job.attempts, job.summary["bad_rows"]) == ("done", 1, 0), "".join(service.log)
    values_are_those_of_one_engine(file, reference_folder, tmp_path)


@pytest.mark.slow
def test_a_runner_that_dies_each_time_fails_its_job(service, client, tmp_path):
    """For example because the machine has too little memory for the dataset."""
    job = client.submit(write_rows(tmp_path / "rows.jsonl", token_rows(20_000, seed=12)), "ref")
    for count in (1, 2, 3):
        wait_until(lambda: len(service.started_runners()) == count)  # noqa: B023
        os.kill(service.started_runners()[-1], signal.SIGKILL)
    job = client.watch(job.id)
    assert job.state == "failed" and "3 processes that ran the job ended" in job.error and "SIGKILL" in job.error


def came_to(value) -> Future:
    future = Future()
    future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)
    return future


def worker_that(loads):
    """A worker whose engine cannot be loaded, or scores one sequence."""
    calls = {"stop": lambda: came_to(None), "progress": lambda: None, "end": lambda: None}
    scored = {"token_counts": (3, 3), "problems": {}, "snapshot": 1}
    return SimpleNamespace(place="there", prepare=lambda: came_to(loads), score=lambda content, again: came_to(scored), **calls)


def score_one_sequence(*workers) -> list[str]:
    """What a job of these workers comes to."""
    lent, events = list(workers), []
    source = SimpleNamespace(count=2, open=lambda table: None)
    source.begin = lambda have, is_any_placed: [lent.pop(0) for _ in list(lent)]
    scheduler = Scheduler(workers=source)
    scheduler.open(None, events.append)
    scheduler.put([Miss(bytes(16), Sequence(np.array([1, 2]), np.array([3])), 1, [0])], 0)
    scheduler.finish()
    return [type(event).__name__ for event in events]


def test_a_worker_that_cannot_load_the_model_leaves_the_job_to_the_others():
    error = EngineError("the GPU has no memory left")
    with pytest.warns(UserWarning, match="has no memory left"):
        assert score_one_sequence(worker_that(error), worker_that({})) == ["Scored", "Committed"]
    with pytest.raises(EngineError, match="there: the GPU has no memory left"):
        score_one_sequence(worker_that(error))
