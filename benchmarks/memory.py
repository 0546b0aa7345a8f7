"""Measure the peak memory of a service and its worker under heavy requests: `make bench`.

Every route gets its heaviest requests (tests/service/heavy_requests.py), with the largest body that the default settings allow,
four at a time. The peaks of both processes are reported, with their memory at rest and the bound of the worker.

    python benchmarks/memory.py [--requests 1000] [--only POST/v1/score …] [--seconds 0]
        [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import cpu_and_cores, write_results
from sides import make_model, make_tokenizer, quiet, read_pairs

from reflogp.client import Client
from reflogp.service import bodies
from reflogp.service.routes import lookups, scores
from reflogp.store import Store
from scoring import SHIPPED

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.service.heavy_requests import ROUTES, Bounds, Peak, long_rows, send, settle
from tests.service.serving import running
from tests.store.rows import REFERENCE

MIB = 1 << 20
#: Memory of a worker in addition to its models, for the online requests that may wait for it.
WORKER_BESIDE = 512 * MIB


def main() -> None:
    options = parse()
    quiet()
    with tempfile.TemporaryDirectory() as scratch:
        results = measured(Path(scratch), options)
    if not options.only:
        write_results(options.out, "memory", results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="number of requests of each route, over its cases")
    parser.add_argument(
        "--seconds", type=float, default=0, help="seconds after which the next case begins; 0: send all requests"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="METHOD/PATH", help="measure only these routes, and write no file"
    )
    parser.add_argument("--out", default="benchmarks/results")
    return parser.parse_args()


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    rows = read_pairs(SHIPPED, 50)
    model = folder / "model"
    make_tokenizer(rows).save_pretrained(model)
    make_model(model, "tiny")
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys, values = long_rows(512, 10_000)  # a look-up of as many of them as a request may name answers with 100 MB
    Store(folder / "store").create_table(REFERENCE).append(values)
    size = bodies._MAX_BODY_BYTES
    bounds = Bounds(
        size=size,
        json=bodies._MAX_JSON_BYTES,
        keys=lookups._MAX_KEYS,
        sequences=scores._MAX_SEQUENCES,
        tokens=min(scores._MAX_TOKENS, size // 17),  # 16 bytes each with a mask, and the offsets
    )
    (folder / "service.toml").write_text(f'state = "{folder / "state"}"\npinned = "ref"\n')
    place = ("--store", folder / "store", "--config", folder / "service.toml", "--model", f"ref={model}")
    with running(*place) as service, Client(service.url) as client:
        service.worker_ready()
        job = client.watch(client.submit(data, "ref").id)
        [worker] = service.workers()
        at_rest = {"service": Peak(service.process.pid), "worker": Peak(worker.pid)}
        results: dict[str, Any] = {"machine": cpu_and_cores(), "routes": {}}
        for name, peak in at_rest.items():
            with peak:
                pass
            results[f"{name}_at_rest_mib"] = next(iter(peak.before.values())) // MIB
        results["worker_bound_mib"] = results["worker_at_rest_mib"] + WORKER_BESIDE // MIB
        for (method, path), make in ROUTES.items():
            if options.only and method + path not in options.only:
                continue
            cases = make(bounds, keys[7].as_py(), job.id)
            results["routes"][f"{method} {path}"] = one_route(service, worker.pid, method, cases, options)
            print(json.dumps({f"{method} {path}": results["routes"][f"{method} {path}"]}), flush=True)
        found = results["routes"].values()
        results["service_peak_mib"] = max(route["service_peak_mib"] for route in found)
        results["worker_peak_mib"] = max(route["worker_peak_mib"] for route in found)
        print(json.dumps({name: value for name, value in results.items() if name != "routes"}))
        assert [child.pid for child in service.workers()] == [worker.pid], "a worker was lost"
        return results


def one_route(service: Any, worker: int, method: str, cases: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Send a route's cases; return the peaks over all cases, and the case with the highest peak of the service."""
    each = max(4, -(-options.requests // len(cases)))
    peaks, sent, start = [], 0, time.perf_counter()
    statuses: dict[int, int] = {}
    for name, heavy in cases.items():
        settle(service.process.pid)
        with Peak(service.process.pid, worker) as peak:
            left, began = each, time.perf_counter()
            while left > 0:
                now = left if not options.seconds else min(left, 4)
                for status, count in send(service.url, method, heavy, now).items():
                    assert status in (0, *heavy.statuses), (name, status)
                    statuses[status] = statuses.get(status, 0) + count
                left -= now
                if options.seconds and time.perf_counter() - began > options.seconds:
                    break
            sent += each - left
        peaks.append((peak.bytes[service.process.pid] // MIB, peak.bytes[worker] // MIB, name))
    return {
        "requests": sent,
        "seconds": round(time.perf_counter() - start, 1),
        "statuses": statuses,
        "service_peak_mib": max(peaks)[0],
        "heaviest": max(peaks)[2],
        "worker_peak_mib": max(worker_peak for _, worker_peak, _ in peaks),
    }


if __name__ == "__main__":
    main()
