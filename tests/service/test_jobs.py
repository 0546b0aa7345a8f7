"""Jobs over HTTP, as they run: a service's process, a worker's process, a store on disk."""

import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.client import Client, RequestRefusedError, ServicePath
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.tokenize import load_tokenizer, tokenize_dataset
from reflogp.store import Store, UsageError, sequence_keys
from tests.conftest import plain_token_logps, write_rows
from tests.scoring.deadly import deadly_model
from tests.service.serving import float32, running, settings_file, token_rows, wait_for, wait_until


@pytest.fixture(scope="module")
def service(place, reference_folder, warm_python):
    (place / "data").mkdir()
    file = settings_file(place, place / "store", {"ref": float32(reference_folder)}, dataset_roots=[str(place / "data")])
    with running("--config", file, warm=warm_python) as found:
        found.worker_ready()
        yield found


@pytest.mark.slow
def test_two_references_with_the_same_weights_have_their_own_templates(tmp_path, reference_folder, pair_rows, warm_python):
    other = Path(shutil.copytree(reference_folder, tmp_path / "other"))
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("{%", "Hm. {%", 1))
    references = {"ref": float32(reference_folder), "other": float32(other)}
    file = write_rows(tmp_path / "rows.jsonl", pair_rows[:3])
    service_file = settings_file(tmp_path, tmp_path / "store", references)
    with running("--config", service_file, warm=warm_python) as service, Client(service.url) as client:
        for name, folder in (("ref", reference_folder), ("other", other)):
            job = client.watch(client.submit(file, name).id)
            result = pq.read_table(client.result(job.id, tmp_path / f"{name}.parquet"))
            [window] = tokenize_dataset(RowSource(str(file)), load_tokenizer(str(folder)))
            expected = sequence_keys(window.table["prompt_ids"], window.table["chosen_ids"])
            assert result["chosen_key"].to_pylist() == expected.to_pylist()
        assert {known.name for known in client.references()} == {"ref", "other"}


@pytest.mark.slow
def test_a_job_scores_a_dataset_and_gives_it_back_in_order(client, tmp_path, reference_folder):
    rows = token_rows(30, seed=1)
    rows[7] = {**rows[7], "chosen_ids": []}
    rows[8] = {**rows[8], "rejected_ids": [1, 100_000]}
    rows[20] = rows[3]
    job = client.watch(client.submit(write_rows(tmp_path / "rows.jsonl", rows), "ref", title="first").id)
    assert (job.state, job.error) == ("done", None)
    assert (job.summary["rows"], job.summary["bad_rows"], job.summary["duplicates"]) == (30, 2, 2)
    assert job.progress.done == job.summary["sequences"] == 59
    assert job.progress.tokens_per_second == job.summary["tokens_per_second"] > 0
    result = pq.read_table(client.result(job.id, tmp_path / "result.parquet"))
    assert result["row"].to_pylist() == list(range(30))
    assert [at for at, error in enumerate(result["error"].to_pylist()) if error] == [7, 8]
    assert "empty" in result["error"][7].as_py() and "vocabulary" in result["error"][8].as_py()
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32).eval()
    for at in (0, 3, 20, 29):
        row, found = rows[at], result.slice(at, 1).to_pylist()[0]
        for side in ("chosen", "rejected"):
            expected = sum(plain_token_logps(model, row["prompt_ids"], row[f"{side}_ids"]))
            assert found[f"ref_{side}_logps"] == pytest.approx(expected, abs=2e-3)
            assert found[f"ref_{side}_tokens"] == len(row[f"{side}_ids"])
            assert found[f"{side}_key"] == sequence_keys([row["prompt_ids"]], [row[f"{side}_ids"]])[0].as_py()
    assert [(entry["rows"], entry["examples"]) for entry in job.summary["bad_row_reasons"]] == [(1, [7]), (1, [8])]
    report = client.report(job.id)
    assert "30 rows, 28 pairs with values" in report and "Exact duplicates of an earlier pair</dt><dd>1</dd>" in report
    margins = pc.subtract(result["ref_chosen_logps"], result["ref_rejected_logps"]).drop_null()
    assert f"<dd>{np.median(margins):+.2f}</dd>".replace("-", "−") in report


def test_a_report_is_written_when_it_is_first_asked_for(client, place):
    file = write_rows(place / "data" / "reported.jsonl", token_rows(6, seed=60))
    job, other = (client.watch(client.submit(ServicePath(str(file)), "ref", max_length=size).id).id for size in (50, 60))
    assert not [*place.glob(f"**/{job}.report.html"), *place.glob(f"**/{other}.report.html")]
    with ThreadPoolExecutor(3) as pool:
        pages = list(pool.map(lambda _: client.report(job), range(3)))
    assert pages[0] == pages[1] == pages[2] and "6 rows, 6 pairs with values" in pages[0]
    write_rows(file, token_rows(7, seed=61))
    assert client.report(job) == pages[0]
    with pytest.raises(RequestRefusedError, match=r"the job has no report: .*reported\.jsonl.* changed"):
        client.report(other)
    file.unlink()
    with pytest.raises(RequestRefusedError, match=r"the job has no report: (its dataset has been deleted|.*no such)"):
        client.report(other)
    assert "report`" in httpx.get(f"{client.url}/v1/jobs/{other}/report").json()["next_step"]


def test_the_same_job_twice_is_one_job(client, service, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(4, seed=2))
    first, second = client.submit(file, "ref"), client.submit(file, "ref")
    assert first.id == second.id
    assert client.submit(file, "ref", max_length=9).id != first.id
    keyed = client.submit(file, "ref", idempotency_key="monday")
    assert keyed.id not in (first.id,) and client.submit(file, "ref", idempotency_key="monday").id == keyed.id
    with pytest.raises(RequestRefusedError, match="Idempotency-Key was already used for a different job"):
        client.submit(file, "ref", max_length=9, idempotency_key="monday")
    assert client.watch(keyed.id).summary["scored"] + client.watch(first.id).summary["scored"] == 8


SLOW = {"token_budget": 128, "commit_seconds": 0.1}


@pytest.fixture
def slow(serve):
    """A service whose passes are small, so that a job takes a while, and which commits all the time."""
    with serve(**SLOW) as found:
        found.worker_ready()
        yield found


@pytest.mark.slow
def test_cancel_takes_effect_at_once_and_keeps_what_is_computed(slow, tmp_path):
    with Client(slow.url) as client:
        running_job = client.submit(write_rows(tmp_path / "long.jsonl", token_rows(3000, seed=5, length=60)), "ref")
        waiting = client.submit(write_rows(tmp_path / "next.jsonl", token_rows(5, seed=6)), "ref")
        wait_for(client, running_job.id, lambda job: job.progress.scored > 20)
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(httpx.get, f"{slow.url}/v1/jobs/{waiting.id}", params={"wait": 50}, timeout=60)
            time.sleep(0.5)
            assert not asked.done()
            assert client.cancel(waiting.id).state == "cancelled"
            assert asked.result(2).json()["state"] == "cancelled"
        client.cancel(running_job.id)
        began = time.monotonic()
        ended = client.watch(running_job.id)
        assert (ended.state, time.monotonic() - began < 2) == ("cancelled", True)
        table = Store(tmp_path / "store")[ended.reference_id]
        assert table.totals()[1] >= ended.progress.scored > 20
        client.retry(waiting.id)
        assert client.watch(waiting.id).state == "done"


@pytest.mark.slow
def test_a_more_urgent_job_goes_first_and_the_other_goes_on(slow, tmp_path):
    with Client(slow.url) as client:
        long = client.submit(write_rows(tmp_path / "long.jsonl", token_rows(600, seed=7)), "ref")
        wait_for(client, long.id, lambda job: job.progress.scored > 20)
        assert re.search(r'reflogp_memory_bytes{process="jobs"} [1-9]', httpx.get(f"{slow.url}/metrics").text)
        urgent = client.watch(client.submit(write_rows(tmp_path / "urgent.jsonl", token_rows(5, seed=8)), "ref", priority=5).id)
        assert urgent.state == "done"
        assert client.job(long.id).state in ("queued", "running")
        ended = client.watch(long.id)
        assert (ended.state, ended.attempts) == ("done", 2)
        assert ended.summary["hits"] > 0 and ended.summary["hits"] + ended.summary["scored"] == 1200


def stored(store) -> int:
    """How many sequences a store of one reference has; 0 where there is none yet."""
    try:
        [reference] = Store(store).references()
        return Store(store)[reference.reference_id].totals()[1]
    except (UsageError, ValueError):
        return 0


@pytest.mark.slow
def test_killed_workers_and_services_lose_nothing(serve, tmp_path, reference_folder):
    rows = token_rows(1000, seed=9)
    with serve(**SLOW) as service, Client(service.url) as client:
        job = client.submit(write_rows(tmp_path / "rows.jsonl", rows), "ref").id
        wait_until(lambda: stored(tmp_path / "store") > 50)  # committed, however fast the machine scores
        [worker] = service.workers()
        worker.send_signal(signal.SIGKILL)
        before = client.job(job).progress.scored
        wait_for(client, job, lambda found: found.progress.scored > before + 20)
        service.kill()
    with serve(**SLOW) as service, Client(service.url) as client:
        ended = client.watch(job)
        assert (ended.state, ended.attempts) == ("done", 2)
        assert ended.summary["hits"] > 50
        result = pq.read_table(client.result(job, tmp_path / "result.parquet"))
    assert result["error"].null_count == 1000
    assert stored(tmp_path / "store") == 2000  # no sequence committed twice
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32).eval()
    for at in (0, 199, 399):
        expected = sum(plain_token_logps(model, rows[at]["prompt_ids"], rows[at]["chosen_ids"]))
        assert result["ref_chosen_logps"][at].as_py() == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
def test_sigterm_commits_and_the_next_service_goes_on(serve, tmp_path):
    settings = SLOW | {"commit_seconds": 600}
    with serve(**settings) as service, Client(service.url) as client:
        job = client.submit(write_rows(tmp_path / "rows.jsonl", token_rows(2000, seed=10)), "ref").id
        wait_for(client, job, lambda found: found.progress.scored > 200)
        waiting = client.submit(write_rows(tmp_path / "next.jsonl", token_rows(5, seed=11)), "ref").id
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(httpx.get, f"{service.url}/v1/jobs/{waiting}", params={"wait": 50}, timeout=60)
            time.sleep(0.5)
            assert not asked.done()
            assert service.stop() in (0, -signal.SIGTERM)  # uvicorn sends the signal on when all is done
            assert asked.result(1).json()["state"] == "queued"
    assert stored(tmp_path / "store") > 200
    with serve(**settings) as service, Client(service.url) as client:
        ended = client.watch(job)
        assert (ended.state, ended.attempts) == ("done", 2)
        assert ended.summary["hits"] > 200


@pytest.mark.slow
def test_two_services_do_not_share_a_state_folder(slow, serve):
    with pytest.raises(AssertionError, match="another service uses the state folder"), serve(**SLOW):
        pass


@pytest.mark.slow
def test_three_workers_that_cannot_load_the_model_fail_the_job_with_the_reason(serve, tmp_path, reference_folder):
    model = deadly_model(reference_folder, tmp_path / "deadly", on_load=True)
    with serve(model) as service, Client(service.url) as client:
        ended = client.watch(client.submit(write_rows(tmp_path / "rows.jsonl", token_rows(3, seed=12)), "ref").id)
        assert ended.state == "failed"
        assert "3 workers in a row were lost before they were ready" in ended.error and "SIGKILL" in ended.error
        wait_until(lambda: httpx.get(f"{service.url}/readyz").status_code == 200)  # the next job may be a good one


def test_a_worker_that_takes_too_much_memory_is_ended_and_the_job_says_so(tmp_path, reference_folder):
    file = settings_file(tmp_path, tmp_path / "store", {"ref": float32(reference_folder)}, max_worker_bytes=50 << 20)
    with running("--config", file) as service, Client(service.url) as client:
        client.submit(write_rows(tmp_path / "rows.jsonl", token_rows(3, seed=13)), "ref")
        wait_until(lambda: any("more than max_worker_bytes" in line for line in list(service.log)), 240)
