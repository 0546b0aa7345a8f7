"""Datasets that mean harm, as jobs of a service: none holds a worker or fills a file or an answer; good rows get values."""

import json
import time

import httpx
import pyarrow.parquet as pq
import pytest

from reflogp.client import RequestRefusedError
from reflogp.store.texts import MOST_CHARACTERS
from tests.conftest import save_llama, write_rows
from tests.scoring.hostile_rows import obedient, pair, write_raw
from tests.service.serving import float32, running, settings_file, token_rows, wait_for, wait_until

pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_LONG = "x" * 200_000


@pytest.fixture(scope="module")
def model(place, tokenizer):
    return save_llama(place / "model", obedient(tokenizer), **SMALL)


@pytest.fixture(scope="module")
def service(place, model, warm_python):
    """A row may take ten minutes, so that only being stopped ends one in time."""
    file = settings_file(place, place / "store", {"ref": float32(model)}, row_seconds=600)
    with running("--config", file, warm=warm_python) as found:
        found.worker_ready()
        yield found


def test_a_cancel_acts_while_a_row_hangs(client, service, tmp_path, record_property):
    job = client.submit(write_rows(tmp_path / "rows.jsonl", [pair("good"), pair("power"), pair("loop")]), "ref")
    wait_for(client, job.id, lambda found: found.state == "running")
    wait_until(lambda: any(len(runner.parent().children()) > 1 for runner in service.runners()))  # the runner and the reader
    began = time.monotonic()
    client.cancel(job.id)
    wait_for(client, job.id, lambda found: found.state == "cancelled", timeout=30)
    record_property("told", f"a job whose row hangs was cancelled in {time.monotonic() - began:.2f} s")
    done = client.watch(client.submit(write_rows(tmp_path / "good.jsonl", token_rows(3, seed=1)), "ref").id)
    assert done.state == "done", "the worker is free"


def test_windows_without_a_usable_row(client, tmp_path):
    for bad in ("not JSON", json.dumps({"prompt_ids": [1], "chosen_ids": ["a"], "rejected_ids": [2]})):
        for rows in ([*token_rows(1024, 3, length=3), bad], [bad, bad], [*[bad] * 1024, *token_rows(2, 4, length=3)]):
            if rows == ["not JSON"] * 2:
                continue  # the job fails
            job = client.watch(client.submit(write_raw(tmp_path / "rows.jsonl", rows), "ref", max_length=9).id)
            wrong = [at for at, row in enumerate(rows) if isinstance(row, str)]
            assert (job.state, job.summary["bad_rows"]) == ("done", len(wrong)), job.error
            result = pq.read_table(client.result(job.id, tmp_path / "result.parquet"))
            assert result["row"].to_pylist() == list(range(len(rows)))
            assert [at for at, error in enumerate(result["error"].to_pylist()) if error] == wrong
            reasons = job.summary["bad_row_reasons"]
            assert sum(entry["rows"] for entry in reasons) == len(wrong) and reasons[0]["examples"][0] in wrong
            if len(wrong) < len(rows):
                assert f"<dt>Bad rows</dt><dd>{len(wrong):,}</dd>" in client.report(job.id)
            else:
                with pytest.raises(RequestRefusedError, match="no report: the dataset has no row that can be used"):
                    client.report(job.id)


#: Rows with a long text wherever a row has a place for one.
LONG = {
    "a column": {_LONG: 1},
    "a part": pair([{"type": _LONG, _LONG: _LONG}]),
    "a tool": pair(tools=[_LONG]),
    "kwargs": pair(chat_template_kwargs={_LONG: 1}),
    "an error of the template": pair("speak"),
    "not an object": _LONG,
    "no pair": {"prompt": _LONG, "chosen": None},
    "a number": '{"prompt": ' + "9" * 200_000 + "}",
    "half a character": pair("\ud800" + _LONG),
    "no JSON": "{" + _LONG,
}


def test_no_text_of_a_row_is_kept_whole(client, service, place, tmp_path):
    rows = [pair("good"), *LONG.values(), *[pair("speak")] * 30]
    lines = [row if isinstance(row, str) and row.startswith("{") else json.dumps(row) for row in rows]
    before = len(service.log)
    job = client.watch(client.submit(write_raw(tmp_path / "long.jsonl", lines), "ref", max_length=64).id)
    assert job.state == "done", job.error
    result = pq.read_table(client.result(job.id, tmp_path / "result.parquet"))
    errors = [error for error in result["error"].to_pylist() if error]
    assert len(errors) >= 38 and result["error"][0].as_py() is None
    assert all(len(error) <= MOST_CHARACTERS for error in errors)
    assert len(client.report(job.id)) < 200_000
    for number, name in enumerate(("a column", "no pair")):  # a dataset of nothing else fails, with a short error
        file = write_raw(tmp_path / f"{number}.jsonl", [json.dumps(LONG[name])] * 3)
        failed = client.watch(client.submit(file, "ref", title=name).id)
        assert failed.state == "failed" and len(failed.error) <= MOST_CHARACTERS
    assert len(httpx.get(f"{service.url}/v1/jobs").content) < 50_000
    assert len(httpx.get(f"{service.url}/jobs/{job.id}").content) < 500_000
    assert max(map(len, list(service.log)[before:]), default=0) < 5_000
    kept = [file for file in (place / "state").rglob("*") if file.is_file() and "uploads" not in file.parts]
    assert {file.name: file.stat().st_size for file in kept if file.stat().st_size > 2_000_000} == {}
