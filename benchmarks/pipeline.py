"""Measure how long a device waits for the host, with a simulated device that only waits.

    python benchmarks/pipeline.py [--seconds 1.5 0.15] [--pairs 6000] [--sides score job ray] [--online] [--json]

The engine is the torch engine, with its packing and its preparation of the next pass, but passes are not computed. The device
takes --seconds for 65,536 tokens, asynchronously, as a GPU would (1.5 s is about a model of 7B parameters on one H100, 0.15 s a
model of 0.5B). Everything else is real: reading, tokenizing, keys, lookups, shards, commits. A side's `idle_share` is the share
of the time from the start of the first pass to the end of the last pass in which the device had no pass.

With --online, requests of 16 sequences of 200 tokens are sent one after the other while the job runs, with pauses of 0.2 s, and
the seconds until each response are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sides import make_tokenizer, quiet, read_pairs

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.tokenize import TokenizedDataset, load_tokenizer
from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.runs.pipeline import EngineScheduler
from reflogp.scoring.runs.scheduler import Scheduler
from reflogp.scoring.runs.score import score_dataset
from reflogp.scoring.runs.units import VisionCache
from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.scoring.torch_engine.flow import InFlight, Unit
from reflogp.service.confined_paths import digest_below
from reflogp.service.models import JobSettings
from reflogp.service.runner.devices import LentWorkers
from reflogp.service.runner.job import run_job
from reflogp.service.runner.order import Claim, JobContext, JobOrder
from reflogp.service.settings import ReferenceSettings
from reflogp.service.worker.engine_loop import Answer, EngineLoop, Engines, OnlineRequest
from reflogp.service.worker.units import UnitServer
from reflogp.store import Store, describe_reference

_ANSWER_SECONDS = 60.0
#: Number of tokens of the pass whose time is given.
PASS_TOKENS = 65_536
#: File to which simulated engines write a line "start end tokens" for each pass that they began, in monotonic seconds.
LOG, SECONDS = "REFLOGP_CLOCKED_LOG", "REFLOGP_CLOCKED_SECONDS"


class ClockedEngine(TorchEngine):
    """The torch engine on a simulated device that computes nothing and waits as long as a pass would take."""

    def __init__(self, model: str, seconds: float, log: Path) -> None:
        super().__init__(model, "float32", "cpu", PASS_TOKENS, compile_layers=False)
        self._seconds, self._log, self._free_at = seconds, log, 0.0

    def _launch(self, unit: Unit, temperature: float) -> InFlight | None:
        begins = max(time.monotonic(), self._free_at)
        self._free_at = begins + self._seconds * unit.tokens / PASS_TOKENS
        with self._log.open("a") as file:
            print(begins, self._free_at, unit.tokens, file=file)
        values = torch.full((sum(len(where) for _, where in unit.members),), -1.0)
        return InFlight(unit, values, _Mark(begins), _Mark(self._free_at))

    def provenance(self) -> dict[str, Any]:
        return {"engine": "clock"}


class _Mark:
    """A moment of the simulated device; has the methods of device.Mark."""

    def __init__(self, moment: float) -> None:
        self.moment = moment

    def has_passed(self) -> bool:
        return time.monotonic() >= self.moment

    def wait(self) -> None:
        time.sleep(max(0.0, self.moment - time.monotonic()))

    def seconds_since(self, earlier: _Mark) -> float:
        return self.moment - earlier.moment


def clocked(model: str) -> ClockedEngine:
    """Return the engine. The seconds and the log of the device come from environment variables, which workers inherit."""
    return ClockedEngine(model, float(os.environ[SECONDS]), Path(os.environ[LOG]))


class World:
    """A model's folder (a tokenizer and a tiny model), a dataset of distinct pairs, and a new store for each run."""

    def __init__(self, folder: Path, file: Path, pairs: int) -> None:
        self.folder = folder
        rows = read_pairs(file, pairs)
        self.model = folder / "model"
        make_tokenizer(rows).save_pretrained(self.model)
        _save_model(self.model)
        self.data = folder / "pairs.jsonl"
        self.data.write_text("".join(json.dumps(_numbered(rows[n % len(rows)], n)) + "\n" for n in range(pairs)))
        self.reference = describe_reference(str(self.model), "float32")

    def store(self) -> Store:
        return Store(tempfile.mkdtemp(dir=self.folder))

    def dataset(self) -> TokenizedDataset:
        return TokenizedDataset(RowSource(str(self.data)), lambda: load_tokenizer(str(self.model)))


def _numbered(row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the row with its number at the start of the prompt, so that no two prompts share a prefix."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return {**row, "prompt": f"{number}: {prompt}"}
    return {**row, "prompt": [{**prompt[0], "content": f"{number}: {prompt[0]['content']}"}, *prompt[1:]]}


def _save_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(**size, vocab_size=32_000, max_position_embeddings=1 << 17)
    LlamaForCausalLM(config).save_pretrained(folder)


def score(world: World, online: bool) -> dict[str, Any]:
    """Score as `reflogp score` does."""
    table = world.store().values_table(world.reference)
    return asdict(score_dataset(world.dataset(), table, EngineScheduler(lambda: clocked(str(world.model)))))


def job(world: World, online: bool) -> dict[str, Any]:
    """Run a job as a service does, but in this process alone; with `online`, send online requests meanwhile."""
    store = world.store()
    state = Path(tempfile.mkdtemp(dir=world.folder))
    answers: dict[str, tuple[threading.Event, list[Answer]]] = {}

    def answered(answer: Answer) -> None:
        event, kept = answers[answer.request.id]
        kept.append(answer)
        event.set()

    engines = Engines(lambda _: clocked(str(world.model)), 1, None, lambda ids: None, lambda name: None)
    loop = EngineLoop(engines, lambda ids: None, answered, 0.005)
    reference_id = world.reference.reference_id
    order = _order(world, state, store.uri)
    table = store.create_table(world.reference)
    address = str(state / "worker")
    UnitServer(address, loop, lambda _: table, lambda _: VisionCache(str(world.model), False), 30.0).start()
    workers = LentWorkers(reference_id, lambda: None)
    workers.lend(0, address)
    running = threading.Thread(target=loop.run, daemon=True)
    running.start()
    found: dict[str, Any] = {}

    def work() -> None:
        found.update(run_job(order, workers, lambda progress, committed: None, lambda: None))

    at_work = threading.Thread(target=work)
    at_work.start()
    waits: list[float] = []
    draw = np.random.default_rng(0)
    while online and at_work.is_alive():
        if not Path(os.environ[LOG]).exists():
            time.sleep(0.05)
            continue
        sequences = [Sequence(*draw.integers(0, 30_000, (2, 100))) for _ in range(16)]
        request = OnlineRequest(str(len(waits)), reference_id, sequences, 1.0, False)
        answers[request.id] = (threading.Event(), [])
        began = time.monotonic()
        loop.ask(request)
        if not answers[request.id][0].wait(_ANSWER_SECONDS):
            raise SystemExit("an online request got no answer")
        waits.append(time.monotonic() - began)
        time.sleep(0.2)
    at_work.join()
    loop.close()
    running.join()
    if waits:
        found["online"] = {f"p{p}_s": float(np.percentile(waits, p)) for p in (50, 99)} | {"requests": len(waits)}
    return found


def _order(world: World, state: Path, store: str) -> JobOrder:
    source = {"name": "", "file": str(world.data), "digest": digest_below(world.folder, world.data)[1], "split": "train"}
    claim = Claim("job", JobSettings(reference="ref"), source, world.reference.reference_id, 0)
    model = ReferenceSettings(model=str(world.model), dtype=world.reference.dtype)
    context = JobContext(store, state, state / "tokens", 1 << 30, 10.0, 64 << 30)
    return JobOrder(claim, world.reference, model, None, context)


def ray(world: World, online: bool) -> dict[str, Any]:
    """Score as `reflogp score --ray` does with one worker."""
    from clocked_worker import ClockedWorker
    from ray.cluster_utils import Cluster

    import reflogp.scoring.on_ray.workers as workers

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    workers.NodeWorker = ClockedWorker  # type: ignore[misc]
    try:
        with workers.connected(cluster.address):
            found = workers.ClusterWorkers(str(world.model), None, world.reference, EngineChoice("torch", "cpu"), 1)
            on_ray = Scheduler(workers=found)
            try:
                return asdict(score_dataset(world.dataset(), world.store().values_table(world.reference), on_ray))
            finally:
                on_ray.close()
    finally:
        cluster.shutdown()


SIDES = {"score": score, "job": job, "ray": ray}


def idle_share(log: Path) -> dict[str, float]:
    """Return the number of passes, their tokens, the seconds and the idle share, from the device's log."""
    passes = sorted(tuple(map(float, line.split())) for line in log.read_text().splitlines())
    whole = passes[-1][1] - passes[0][0]
    busy = sum(end - begin for begin, end, _ in passes)
    return {
        "passes": len(passes),
        "tokens": sum(tokens for *_, tokens in passes),
        "seconds": whole,
        "idle_share": 1 - busy / whole,
    }


def main() -> None:
    options = parse()
    quiet()
    results: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "pairs": options.pairs}
    with tempfile.TemporaryDirectory() as scratch:
        world = World(Path(scratch), Path(options.data), options.pairs)
        for seconds in options.seconds:
            for name in options.sides:
                log = Path(tempfile.mkdtemp(dir=scratch)) / "passes"
                os.environ[LOG], os.environ[SECONDS] = str(log), str(seconds)
                summary = SIDES[name](world, options.online and name == "job")
                found = {**idle_share(log), "run_seconds": summary["seconds"], "scored": summary["scored"]}
                found |= {"online": summary["online"]} if "online" in summary else {}
                results.setdefault(f"{seconds:g} s a pass", {})[name] = found
                print(f"{seconds:g} s, {name}: {found}", file=sys.stderr, flush=True)
    print(json.dumps(results) if options.json else json.dumps(results, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wider = os.environ.get("REFLOGP_TEST_DATA")
    parser.add_argument("--data", default=f"{wider}/ultrafeedback_1k.jsonl.gz" if wider else None, required=wider is None)
    parser.add_argument("--pairs", type=int, default=6000)
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.5, 0.15], help="of 65,536 tokens")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--online", action="store_true", help="send online requests while the job runs")
    parser.add_argument("--json", action="store_true", help="one line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
