"""A service whose reference vLLM computes: a job that outlives vLLM, and online requests beside it."""

import os
import signal
import threading
import time

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from reflogp.client import Client, RequestRefusedError
from tests.conftest import plain_token_logps, write_rows
from tests.service.serving import running, settings_file, token_rows
from tests.vllm.conftest import VLLM_PYTHON

pytestmark = pytest.mark.vllm


def test_a_job_outlives_vllm_and_online_requests_are_answered_beside_it(model, plain_model, tmp_path, monkeypatch):
    monkeypatch.setenv("REFLOGP_VLLM_PYTHON", str(VLLM_PYTHON))
    reference = {"model": model, "dtype": "float32", "engine": "vllm"}
    file = settings_file(tmp_path, tmp_path / "store", {"sft": reference}, pinned="sft", commit_seconds=0.2)
    rows = token_rows(1500, seed=5)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    with running("--config", file) as service, Client(service.url) as client:
        service.worker_ready(timeout=240)

        def vllm_processes():
            below = psutil.Process(service.process.pid).children(recursive=True)
            return [child for child in below if "reflogp.scoring.vllm_engine.process" in child.cmdline()]

        [first] = vllm_processes()
        job = client.submit(data, "sft", format="tokens")

        def kill_when_some_are_scored():
            while not client.job(job.id).progress.scored:
                time.sleep(0.05)
            os.kill(first.pid, signal.SIGKILL)

        killing = threading.Thread(target=kill_when_some_are_scored)
        killing.start()
        scores = client.score("sft", [[5, 6, 7]], [[8, 9]])
        assert np.abs(scores.token_logps[0] - plain_token_logps(plain_model, [5, 6, 7], [8, 9])).max() <= 1e-5
        with pytest.raises(RequestRefusedError, match=r"temperature 0\.7: the engine of 'sft' supports only temperature 1"):
            client.score("sft", [[5, 6, 7]], [[8, 9]], temperature=0.7)
        done = client.watch(job.id)
        killing.join()
        assert done.state == "done", done.error
        assert done.summary["provenance"]["engine"] == "vllm"
        assert not psutil.pid_exists(first.pid)
        client.result(job.id, tmp_path / "values.parquet")
        deaths = [line for line in service.log if "worker 0 ended" in line]
        assert not deaths, "the worker started vLLM again by itself"
    values = pq.read_table(tmp_path / "values.parquet").to_pydict()
    assert values["row"] == list(range(1500))
    for at in range(0, 1500, 10):
        row = rows[at]
        plain = sum(plain_token_logps(plain_model, row["prompt_ids"], row["chosen_ids"]))
        assert abs(values["ref_chosen_logps"][at] - plain) <= 1e-4
    assert not vllm_left(first)


def vllm_left(process: psutil.Process) -> list[psutil.Process]:
    """vLLM's processes that outlived their service by more than a moment."""
    stop = time.monotonic() + 30
    while time.monotonic() < stop:
        left = [
            p for p in psutil.process_iter(["cmdline"]) if "reflogp.scoring.vllm_engine.process" in (p.info["cmdline"] or [])
        ]
        left = [p for p in left if p.ppid() == 1 or p.pid == process.pid]
        if not left:
            return []
        time.sleep(0.5)
    return left
