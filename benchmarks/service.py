"""Measure the speed of the service and of what it is compared with, on this machine in one run: `make bench`.

Steps: a job over HTTP and `reflogp score`; a job with only cache hits; lookups; the time of online requests in addition to the
engine's time; eight callers and one offline stream of packs; online requests while a job runs; idle connections and a long
queue of jobs.

    python benchmarks/service.py [--data FILE] [--rows N] [--shape tiny] [--rounds 3] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from machine import cpu_and_cores, write_results
from shapes import SHAPES
from sides import make_model, make_tokenizer, quiet, read_pairs, tokenize

from reflogp.client import Client, Job
from reflogp.scoring.data.tokenize import load_tokenizer
from reflogp.scoring.torch_engine import Sequence, TorchEngine
from scoring import SHIPPED

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.service.serving import Service, running

_COMMAND = [sys.executable, "-c", "from reflogp.cli import main; main()"]
#: An online request, with the sequences of one training step.
SEQUENCES, TOKENS = 16, 200


def main() -> None:
    options = parse()
    quiet()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = folder / "model"
        rows = read_pairs(Path(options.data), options.rows)
        data = folder / "pairs.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        make_tokenizer(rows).save_pretrained(model)
        parameters = make_model(model, options.shape)
        results: dict[str, Any] = {
            "machine": cpu_and_cores() if not torch.cuda.is_available() else torch.cuda.get_device_name(),
            "model": f"Qwen2 shape, {parameters / 1e6:.1f}M parameters, random weights, bfloat16",
            "data": f"{Path(options.data).name.split('.')[0]}, {len(rows)} pairs",
        }
        for name, step in STEPS.items():
            if not options.only or name in options.only:
                results[name] = step(folder, model, data, options.rounds)
                print(json.dumps({name: results[name]}), flush=True)
    if not options.only:
        write_results(options.out, "service", results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wider = os.environ.get("REFLOGP_TEST_DATA")
    parser.add_argument("--data", default=f"{wider}/ultrafeedback_1k.jsonl.gz" if wider else str(SHIPPED))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], metavar="STEP", help="run only these steps and write no file")
    parser.add_argument("--out", default="benchmarks/results")
    return parser.parse_args()


@contextmanager
def serving(folder: Path, model: Path, settings: str = "") -> Iterator[Service]:
    """Run a service with its own store and state, and lines of a settings file; yield it when its worker is ready."""
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "service.toml").write_text(f'state = "{place / "state"}"\n{settings}')
    model_options = ("--model", f"ref={model}", "--dtype", "bfloat16")
    with running("--store", place / "store", "--config", place / "service.toml", *model_options) as service:
        service.worker_ready()
        yield service


def seconds_of(job: Job) -> float:
    assert job.state == "done", job.error
    return (job.finished_at - job.started_at).total_seconds()


def job_beside_command(folder: Path, model: Path, data: Path, rounds: int) -> dict[str, Any]:
    """Compare a job's tokens per second, from its start to its end, with those of `reflogp score`; the sides alternate."""
    command, job, engine_command, engine_job = [], [], [], []
    for _ in range(rounds):
        store = tempfile.mkdtemp(dir=folder)
        line = [*_COMMAND, "score", str(model), str(data), "--store", store, "--json"]
        summary = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        command.append(summary["tokens"] / summary["seconds"])
        engine_command.append(summary["tokens_per_second"])
        with serving(folder, model) as service, Client(service.url) as client:
            done = client.watch(client.submit(data, "ref").id)
            job.append(done.summary["tokens"] / seconds_of(done))
            engine_job.append(done.summary["tokens_per_second"])
    return {
        "command_tokens_per_second": statistics.median(command),
        "job_tokens_per_second": statistics.median(job),
        "ratio": statistics.median(job) / statistics.median(command),
        "engine_ratio": statistics.median(engine_job) / statistics.median(engine_command),
    }


def all_hits(folder: Path, model: Path, data: Path, rounds: int) -> dict[str, Any]:
    """Measure the sequences per second of a job whose sequences are all stored, from its start to its end."""
    with serving(folder, model) as service, Client(service.url) as client:
        client.watch(client.submit(data, "ref").id)
        rates = []
        for number in range(2 * rounds + 1):
            job = client.watch(client.submit(data, "ref", idempotency_key=str(number)).id)
            assert job.summary["scored"] == 0
            rates.append(job.summary["sequences"] / seconds_of(job))
        return {"sequences": job.summary["sequences"], "sequences_per_second": statistics.median(rates)}


def lookups(folder: Path, model: Path, data: Path, rounds: int) -> dict[str, Any]:
    """Measure the keys per second of lookups on loopback: 100,000 random keys, which the store lacks, without token values."""
    with serving(folder, model) as service, Client(service.url) as client:
        client.watch(client.submit(data, "ref").id)
        keys = [bytes(row) for row in np.random.default_rng(0).integers(0, 256, (100_000, 16), np.uint8)]
        times = []
        for _ in range(5 * rounds):
            start = time.perf_counter()
            client.lookup("ref", keys)
            times.append(time.perf_counter() - start)
        return {"keys_per_second": len(keys) / statistics.median(times)}


def request(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    draw = np.random.default_rng(seed)
    half = TOKENS // 2
    return draw.integers(10, 9000, (SEQUENCES, half)).tolist(), draw.integers(10, 9000, (SEQUENCES, half)).tolist()


def timed(client: Client, count: int, first: int) -> tuple[list[float], list[float]]:
    """Send requests one after the other; return their seconds in addition to the engine's, and their total seconds."""
    beyond, whole = [], []
    for number in range(count):
        asked = request(first + number)
        start = time.perf_counter()
        scores = client.score("ref", *asked)
        whole.append(time.perf_counter() - start)
        beyond.append(whole[-1] - scores.engine_seconds)
    return beyond, whole


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{p}_ms": 1000 * float(np.percentile(seconds, p)) for p in (50, 99)}


def online(folder: Path, model: Path, data: Path, rounds: int) -> dict[str, Any]:
    """Measure the time of one caller's requests in addition to the engine's time."""
    with serving(folder, model, 'pinned = "ref"') as service, Client(service.url) as client:
        timed(client, 20, 0)
        beyond, _ = timed(client, 100 * rounds, 1000)
        return {"sequences": SEQUENCES, "tokens_each": TOKENS, "requests": len(beyond), **percentiles(beyond)}


def eight_callers(folder: Path, model: Path, data: Path, rounds: int) -> dict[str, Any]:
    """Compare the tokens per second of eight callers with those of one offline stream of packs of the same sequences."""
    each = 12
    asked = [request(5000 + n) for n in range(8 * each)]
    sequences = [Sequence(p, c) for prompts, completions in asked for p, c in zip(prompts, completions, strict=True)]
    offline, callers = [], []
    for _ in range(rounds):
        engine = TorchEngine(str(model), "bfloat16")
        engine.score(sequences[:64])
        start = time.perf_counter()
        engine.score(sequences)
        offline.append(len(sequences) * TOKENS / (time.perf_counter() - start))
        del engine

        def caller(client: Client, number: int) -> None:
            for at in range(each):
                client.score("ref", *asked[number * each + at])

        with (
            serving(folder, model, 'pinned = "ref"') as service,
            Client(service.url) as client,
            ThreadPoolExecutor(8) as threads,
        ):
            client.score("ref", *request(1))
            start = time.perf_counter()
            list(threads.map(partial(caller, client), range(8)))
            callers.append(len(sequences) * TOKENS / (time.perf_counter() - start))
    rates = {"offline_tokens_per_second": statistics.median(offline), "callers_tokens_per_second": statistics.median(callers)}
    return {**rates, "ratio": rates["callers_tokens_per_second"] / rates["offline_tokens_per_second"]}


def pack_seconds(model: Path, data: Path, count: int = 40) -> list[float]:
    """Return the seconds of the first packs of this data after the very first pack, on an idle machine."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    pairs = tokenize(data.name, rows, load_tokenizer(str(model)))
    passes, took = TorchEngine(str(model), "bfloat16").passes(pairs.sequences()), []
    for _ in range(count):
        start = time.perf_counter()
        if next(passes, None) is None:
            break
        took.append(time.perf_counter() - start)
    return took[1:]


def online_beside_job(folder: Path, model: Path, data: Path, rounds: int) -> dict[str, Any]:
    """Measure how much longer online requests take while a job runs, and how long one of the job's packs takes."""
    with serving(folder, model, 'pinned = "ref"') as service, Client(service.url) as client:
        timed(client, 10, 0)
        _, alone = timed(client, 30 * rounds, 20_000)
        job = client.submit(data, "ref").id
        while client.job(job).progress.scored < 10:
            time.sleep(0.1)
        _, beside = timed(client, 10 * rounds, 30_000)
        assert client.job(job).state == "running", "the job ended too soon: give more --rows"
        client.cancel(job)
        client.watch(job)
    packs = pack_seconds(model, data)
    grown = float(np.percentile(beside, 99) - np.percentile(alone, 99))
    return {
        "alone": percentiles(alone),
        "beside_a_job": percentiles(beside),
        "p99_grown_by_seconds": grown,
        "median_pack_seconds": statistics.median(packs),
        "longest_pack_seconds": max(packs),
    }


def memory(folder: Path, model: Path, data: Path, rounds: int) -> dict[str, Any]:
    """Measure the memory of the service's own process with 500 idle connections and 10,000 queued jobs."""
    with serving(folder, model) as service, httpx.Client(base_url=service.url) as http:
        watched = psutil.Process(service.process.pid)
        first = watched.memory_info().rss
        host, port = service.url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(500)]
        connected = watched.memory_info().rss
        http.put("/v1/uploads/rows.jsonl", content=data.read_bytes(), headers={"content-type": "application/octet-stream"})
        body = {"reference": "ref", "dataset": {"upload": "rows.jsonl"}}
        start = time.perf_counter()
        for number in range(10_000):
            answer = http.post("/v1/jobs", json=body, headers={"idempotency-key": str(number)})
            assert answer.status_code == 201, answer.text
        took = time.perf_counter() - start
        listing = time.perf_counter()
        http.get("/v1/jobs?limit=1000")
        listed = time.perf_counter() - listing
        full = watched.memory_info().rss
        for connection in idle:
            connection.close()
    return {
        "at_start_mb": first / 1e6,
        "with_500_connections_mb": connected / 1e6,
        "with_10000_jobs_mb": full / 1e6,
        "submissions_per_second": 10_000 / took,
        "list_1000_jobs_seconds": listed,
    }


STEPS = {
    "job_beside_command": job_beside_command,
    "all_hits": all_hits,
    "lookups": lookups,
    "online": online,
    "eight_callers": eight_callers,
    "online_beside_job": online_beside_job,
    "memory": memory,
}


if __name__ == "__main__":
    main()
