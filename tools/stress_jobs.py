"""Run many jobs while the service and its workers are killed at random, and count errors: `python -m tools.stress_jobs`.

Every job must end in the state `done`, no sequence may be stored twice, and each job's result must have the values of an
independent plain forward pass.
"""

import argparse
import json
import random
import signal
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from reflogp.client import Client, ServiceError
from reflogp.store import Store, sequence_keys
from tests.conftest import plain_token_logps
from tests.service.serving import Service, float32, settings_file, token_rows


def make_model(folder: Path) -> Path:
    """Save a Llama with random weights. Rows are token ids, so its tokenizer is only used to decode outliers."""
    from reflogp.cli.demo_model import train_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=1024, max_position_embeddings=512, **sizes)).save_pretrained(folder)
    train_tokenizer(["some text to learn from"] * 4, 300).save_pretrained(folder)
    return folder


def stress(folder: Path, jobs: int, kills: int, seed: int = 0, rows: int = 60) -> dict:
    """Run the jobs while processes are killed; return the counts of jobs, kills, sequences and errors."""
    chance = random.Random(seed)
    model = make_model(folder / "model")
    file = settings_file(folder, folder / "store", {"ref": float32(model)}, token_budget=160, commit_seconds=0.2)
    shared = token_rows(rows * 4, seed=1)
    datasets = [token_rows(rows // 2, seed=100 + n) + chance.sample(shared, rows // 2) for n in range(jobs)]
    service, killed, ids = Service("--config", file), {"worker": 0, "service": 0}, []
    client = Client(service.url)
    began = time.monotonic()

    def finished() -> bool:
        return httpx.get(f"{service.url}/v1/jobs", params={"limit": 1}).json()["counts"].get("done", 0) == jobs

    for data in datasets:
        body = "".join(json.dumps(row) + "\n" for row in data)
        headers = {"content-type": "application/x-ndjson"}
        answer = httpx.post(f"{service.url}/v1/jobs", params={"reference": "ref"}, content=body, headers=headers, timeout=60)
        ids.append(answer.json()["id"])
    while sum(killed.values()) < kills:
        time.sleep(chance.uniform(1.0, 12.0))
        target = chance.choice(["worker", "worker", "service"])
        if target == "worker":
            if not (workers := service.workers()):
                continue
            workers[0].send_signal(signal.SIGKILL)
        else:
            service.kill()
            service = Service("--config", file)
            client = Client(service.url)
        killed[target] += 1
    before_end = httpx.get(f"{service.url}/v1/jobs", params={"limit": 1}).json()["counts"]
    while not finished():
        counts = httpx.get(f"{service.url}/v1/jobs", params={"limit": 1}).json()["counts"]
        if counts.get("failed") or time.monotonic() - began > 3000:
            break
        time.sleep(0.2)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    states, wrong, values = [], 0, {}
    for number, (job, data) in enumerate(zip(ids, datasets, strict=True)):
        found = client.job(job)
        states.append(found.state)
        if found.state != "done":
            continue
        try:
            result = pq.read_table(client.result(job, folder / "result.parquet"))
        except ServiceError:
            wrong += 1
            continue
        for side in ("chosen", "rejected"):
            keys, logps = result[f"{side}_key"].to_pylist(), result[f"ref_{side}_logps"].to_pylist()
            wrong += sum(values.setdefault(key, value) != value for key, value in zip(keys, logps, strict=True))
            wrong += keys != sequence_keys([r["prompt_ids"] for r in data], [r[f"{side}_ids"] for r in data]).to_pylist()
        at = number % len(data)
        expected = sum(plain_token_logps(plain, data[at]["prompt_ids"], data[at]["chosen_ids"]))
        wrong += not np.isclose(result["ref_chosen_logps"][at].as_py(), expected, atol=1e-3)
    [reference] = Store(folder / "store").references()
    stored = Store(folder / "store")[reference.reference_id].totals()[1]
    client.close()
    service.stop()
    distinct = {(*r["prompt_ids"], side) for data in datasets for r in data for side in ("chosen", "rejected")}
    return {
        "jobs": jobs,
        "done": states.count("done"),
        "failed": states.count("failed"),
        "kills": killed,
        "done_when_the_last_kill_came": before_end.get("done", 0),
        "sequences": len(distinct),
        "stored": stored,
        "wrong": int(wrong),
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rows", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(stress(Path(place), options.jobs, options.kills, rows=options.rows)))
