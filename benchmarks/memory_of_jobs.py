"""Measure a service's memory over many small jobs: resident MiB of the service and of its workers after every --every jobs.

    python benchmarks/memory_of_jobs.py [--jobs 2000] [--rows 5] [--every 100]

Prints one JSON object per line. Every job has different rows, so that all are computed and committed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
from sides import make_model, make_tokenizer, read_pairs

from scoring import SHIPPED

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.service.serving import float32, running, settings_file, token_rows

#: Number of jobs that wait or run at the same time.
_AT_ONCE = 20


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_tokenizer(read_pairs(SHIPPED, 50)).save_pretrained(folder / "model")
        make_model(folder / "model", "tiny")
        file = settings_file(folder, folder / "store", {"ref": float32(folder / "model")})
        with running("--config", file) as service, httpx.Client(base_url=service.url, timeout=60) as client:
            service.worker_ready()
            began = time.monotonic()
            for done in range(0, options.jobs, options.every):
                for first in range(done, done + options.every, _AT_ONCE):
                    run_jobs(client, range(first, min(first + _AT_ONCE, done + options.every)), options.rows)
                sizes = {
                    "service_mib": memory(psutil.Process(service.process.pid)),
                    "worker_mib": [memory(worker) for worker in service.workers()],
                }
                line = {"jobs": done + options.every, **sizes, "seconds": round(time.monotonic() - began, 1)}
                print(json.dumps(line), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--every", type=int, default=100)
    return parser.parse_args()


def run_jobs(client: httpx.Client, numbers: range, rows: int) -> None:
    """Submit jobs, follow each to its end, and fetch its report, result and pages, as callers do."""
    for job in [submit(client, number, rows) for number in numbers]:
        state = "queued"
        while state in ("queued", "running"):
            state = client.get(f"/v1/jobs/{job}", params={"wait": 30}).raise_for_status().json()["state"]
        assert state == "done"
        for path in (f"/v1/jobs/{job}/report", f"/v1/jobs/{job}/result", "/v1/jobs", f"/jobs/{job}", "/metrics"):
            client.get(path).raise_for_status()


def submit(client: httpx.Client, number: int, rows: int) -> str:
    body = "".join(json.dumps(row) + "\n" for row in token_rows(rows, seed=number))
    headers = {"content-type": "application/x-ndjson"}
    answer = client.post("/v1/jobs", params={"reference": "ref"}, content=body, headers=headers)
    return str(answer.raise_for_status().json()["id"])


def memory(process: psutil.Process) -> float:
    return round(process.memory_info().rss / 2**20, 1)


if __name__ == "__main__":
    main()
