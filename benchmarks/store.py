"""Measure a large store: append, open, look up, compact, join; compare the join with a warm start from TRL's own cache.

    python benchmarks/store.py [--rows 1000000 10000000] [--pairs 1000000] [--folder DIR] [--out benchmarks/results]

Rows have 16 to 400 tokens, uniformly distributed (mean 208). Pairs have a prompt and two completions of such lengths. The rows
include the pairs' sequences; all other rows have random keys. Every measurement runs in its own process. The results include
the peak of the process's memory, and its memory without file pages at the end. Needs about 1 GB of disk per million rows, twice
that while compacting, and 2.5 GB per million pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from machine import cpu_and_cores, write_results

from reflogp.store import LogprobTable, Reference, Store, join_logps, sequence_keys
from reflogp.store.schema import shard_table

LEAST, MOST = 16, 400
REFERENCE = Reference("be" * 16, "benchmark", "bfloat16", "bfloat16", ("00" * 32,), {})
#: Number of rows of one append, and number of pairs of one record batch.
APPEND_ROWS, BATCH_PAIRS = 100_000, 10_000
LOOKUPS, ROUNDS = 1_000_000, 3


def main() -> None:
    options = parse()
    if options.phase:
        print(json.dumps(PHASES[options.phase](Path(options.folder), options.count)))
        return
    results: dict[str, Any] = {"machine": cpu_and_cores(), "pairs": options.pairs, "sizes": {}}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        pairs = Path(scratch) / "pairs"
        pairs.mkdir()
        step(results, "make_pairs", "make_pairs", pairs, options.pairs)
        for rows in options.rows:
            folder = Path(scratch) / str(rows)
            folder.mkdir()
            (folder / "pairs.arrow").symlink_to(pairs / "pairs.arrow")
            at = results["sizes"][str(rows)] = {}
            step(at, "append", "append", folder, rows)
            step(at, "look_up_as_appended", "look_up", folder, rows)
            step(at, "compact", "compact_all", folder, rows)
            step(at, "open", "open_store", folder, rows)
            step(at, "look_up", "look_up", folder, rows)
            step(at, "look_up_64", "look_up_few", folder, rows)
            step(at, "join", "join", folder, rows)
            step(at, "join_max_length_300", "join_truncated", folder, rows)
            step(at, "join_for_a_trainer", "join_for_a_trainer", folder, rows)
        results["trl_warm_start"] = {}
        step(results["trl_warm_start"], "trl", "trl_warm_start", pairs, options.pairs)
    write_results(options.out, "store", results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1_000_000, 10_000_000])
    parser.add_argument(
        "--pairs", type=int, default=1_000_000, help="number of pairs; a table has at most half as many pairs as rows"
    )
    parser.add_argument("--folder", help="folder of the data; default: a temporary folder")
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def step(results: dict[str, Any], name: str, phase: str, folder: Path, count: int) -> None:
    """Run one measurement in its own process, store its result, and print it."""
    command = [sys.executable, __file__, "--phase", phase, "--folder", str(folder), "--count", str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    results[name] = json.loads(done.stdout.splitlines()[-1])
    print(f"{count:>12,}  {name:28}", json.dumps(results[name]), flush=True)


def measured(work: Callable[[], Any], rounds: int = 1, **more: Any) -> dict[str, Any]:
    """Return the median seconds of `work`, this process's peak and anonymous memory in MB, and `more`."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    peak, anonymous = (int(status[name].split()[0]) // 1024 for name in ("VmHWM", "RssAnon"))
    return {"seconds": round(statistics.median(seconds), 3), "peak_mb": peak, "anonymous_mb_now": anonymous, **more}


def make_pairs(folder: Path, count: int) -> dict[str, Any]:
    """Write tokenized pairs into one Arrow file, as `datasets` stores them."""

    def work() -> None:
        random = np.random.default_rng(0)
        schema = pa.schema([(name, pa.list_(pa.int32())) for name in ("prompt_ids", "chosen_ids", "rejected_ids")])
        with pa.OSFile(str(folder / "pairs.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for start in range(0, count, BATCH_PAIRS):
                rows = min(BATCH_PAIRS, count - start)
                writer.write_table(pa.table([token_lists(random, rows, pa.int32()) for _ in schema], schema=schema))

    return measured(work)


def token_lists(random: np.random.Generator, rows: int, kind: pa.DataType) -> pa.ListArray:
    return lists_of(random, random.integers(LEAST, MOST + 1, rows), kind)


def lists_of(random: np.random.Generator, lengths: np.ndarray, kind: pa.DataType) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    if pa.types.is_floating(kind):
        values = -random.standard_exponential(offsets[-1], np.float32)
    else:
        values = random.integers(0, 150_000, offsets[-1], np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind))


def sequences_of_pairs(folder: Path, rows: int) -> Iterator[tuple[pa.Array, np.ndarray]]:
    """Yield (keys, completion lengths) of the pairs' sequences, up to `rows` sequences."""
    for batch in pair_batches(folder, rows // 2):
        for side in ("chosen_ids", "rejected_ids"):
            yield sequence_keys(batch["prompt_ids"], batch[side]), batch[side].value_lengths().to_numpy()


def append(folder: Path, rows: int) -> dict[str, Any]:
    """Append rows to a new table, 100,000 per commit; the time to generate them is not counted."""
    random = np.random.default_rng(1)
    table = Store(folder / "store").create_table(REFERENCE)
    seconds, done = 0.0, 0
    source = sequences_of_pairs(folder, rows)
    while done < rows:
        ready: list[tuple[pa.Array, np.ndarray]] = []
        wanted = min(APPEND_ROWS, rows - done)
        while (missing := wanted - sum(len(keys) for keys, _ in ready)) > 0:
            ready.append(next(source, None) or made_up_sequences(random, missing))
        keys = pa.concat_arrays([keys for keys, _ in ready])
        values = lists_of(random, np.concatenate([lengths for _, lengths in ready]), pa.float32())
        lens = np.full(len(keys), 200, np.int32), values.value_lengths().to_numpy().astype(np.int32)
        shard = shard_table(keys, *lens, values, {"engine": "benchmark"})
        start = time.perf_counter()
        table.append(shard)
        seconds += time.perf_counter() - start
        done += len(keys)
    shards, stored, size = table.totals()
    rate = {"rows_per_second": round(stored / seconds), "bytes_per_row": round(size / stored, 1), "shards": shards}
    return measured(lambda: None) | {"seconds": round(seconds, 1)} | rate


def made_up_sequences(random: np.random.Generator, count: int) -> tuple[pa.Array, np.ndarray]:
    keys = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(random.bytes(16 * count))])
    return keys, random.integers(LEAST, MOST + 1, count)


def open_table(folder: Path) -> LogprobTable:
    return Store(folder / "store")[REFERENCE]


def open_store(folder: Path, rows: int) -> dict[str, Any]:
    """Measure the time from the URI to the first lookup, which reads the index into memory."""
    few = random_keys(folder, rows, 10)
    return measured(lambda: open_table(folder).snapshot().stored_lengths(few), ROUNDS)


def random_keys(folder: Path, rows: int, count: int) -> pa.Array:
    """Return keys of the table, from all of its shards, in random order."""
    snapshot, random = open_table(folder).snapshot(), np.random.default_rng(2)
    share = min(1.0, 1.1 * count / rows)
    picked = []
    for shard in snapshot.rows_of:
        keys = open_table(folder).shard(shard).read(["key"])["key"].combine_chunks().cast(pa.binary(16))
        picked.append(keys.take(pa.array(np.flatnonzero(random.random(len(keys)) < share))))
    keys = pa.concat_arrays(picked)
    return keys.take(pa.array(random.permutation(len(keys))[:count]))


def look_up(folder: Path, rows: int) -> dict[str, Any]:
    """Look up a million keys in a snapshot whose index is in memory; `open_seconds` is the time to read the index."""
    keys = random_keys(folder, rows, LOOKUPS)
    snapshot = open_table(folder).snapshot()
    opened = measured(lambda: snapshot.stored_lengths(keys[:10]))
    return measured(lambda: hits(snapshot, keys), ROUNDS, open_seconds=opened["seconds"], keys=len(keys))


def look_up_few(folder: Path, rows: int) -> dict[str, Any]:
    """Look up 64 keys, as many as an online request may have."""
    keys = random_keys(folder, rows, 64)
    snapshot = open_table(folder).snapshot()
    hits(snapshot, keys[:1])
    return measured(lambda: hits(snapshot, keys), 5 * ROUNDS)


def hits(snapshot: Any, keys: pa.Array) -> None:
    found = snapshot.find(keys)
    assert (found.lengths > 0).all()
    assert np.isfinite(found.prefix_sums(found.lengths.astype(np.int64))).all()


def compact_all(folder: Path, rows: int) -> dict[str, Any]:
    """Compact the whole table."""
    table, outcome = open_table(folder), []
    result = measured(lambda: outcome.append(table.compact()))
    return result | {"shards": outcome[0].shards_after, "rows_per_second": round(outcome[0].rows / result["seconds"])}


def join(folder: Path, rows: int, max_length: int | None = None) -> dict[str, Any]:
    """Join the pairs whose two sequences the table has: from token ids in a memory-mapped file to columns."""
    count = min(sum(len(batch) for batch in pair_batches(folder)), rows // 2)

    def work() -> None:
        tables = (pa.table(batch) for batch in pair_batches(folder, count))
        joined = join_logps(tables, open_table(folder).snapshot(), max_length=max_length)
        assert not joined.missing.any() and np.isfinite(joined.logps["ref_rejected_logps"][~joined.dropped]).all()

    return measured(work, ROUNDS, pairs=count)


def join_truncated(folder: Path, rows: int) -> dict[str, Any]:
    """Join under a max_length, which needs token values."""
    return join(folder, rows, max_length=300)


def pair_batches(folder: Path, count: int | None = None) -> Iterator[pa.RecordBatch]:
    """Yield batches of pairs, up to `count` pairs; None for all."""
    with pa.memory_map(str(folder / "pairs.arrow")) as source:
        for batch in pa.ipc.open_stream(source):
            if count is not None:
                batch, count = batch.slice(0, count), count - min(count, len(batch))
            if len(batch):
                yield batch


def join_for_a_trainer(folder: Path, rows: int) -> dict[str, Any]:
    """Join by `join_reference_logps`, in a process with torch and TRL; input and output are `datasets.Dataset`."""
    from datasets import Dataset

    from reflogp.trainer import Reference
    from reflogp.trainer.join import join_reference_logps

    pairs = Dataset.from_file(str(folder / "pairs.arrow"))
    pairs = pairs.select(range(min(len(pairs), rows // 2)))

    def work() -> None:
        source = Reference(folder / "store", model=REFERENCE.reference_id)
        assert "ref_rejected_logps" in join_reference_logps(pairs, source).column_names

    return measured(work, ROUNDS, pairs=len(pairs))


def trl_warm_start(folder: Path, count: int) -> dict[str, Any]:
    """Measure what TRL 1.16 does if its cache file exists: load the reference model, hash it, read the two columns."""
    import torch
    from datasets import Dataset, concatenate_datasets
    from datasets.fingerprint import Hasher
    from sides import make_model
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import hash_module

    make_model(folder / "model", "0.5B")
    columns = {name: np.zeros(count, np.float32) for name in ("ref_chosen_logps", "ref_rejected_logps")}
    with pa.OSFile(str(folder / "cache.arrow"), "wb") as sink:
        table = pa.table(columns)
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    pairs = Dataset.from_file(str(folder / "pairs.arrow"))
    parts: dict[str, float] = {}

    def work() -> None:
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
        parts["load_model"] = round(time.perf_counter() - start, 2)
        start = time.perf_counter()
        Hasher.hash((pairs._fingerprint, hash_module(model)))
        parts["hash_module"] = round(time.perf_counter() - start, 2)
        start = time.perf_counter()
        concatenate_datasets([pairs, Dataset.from_file(str(folder / "cache.arrow"))], axis=1)
        parts["read_cache"] = round(time.perf_counter() - start, 2)

    result = measured(work, ROUNDS, pairs=count)
    return result | {"of_the_last_round": parts}


PHASES: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    phase.__name__: phase
    for phase in (
        make_pairs,
        append,
        look_up,
        compact_all,
        open_store,
        look_up_few,
        join,
        join_truncated,
        join_for_a_trainer,
        trl_warm_start,
    )
}

if __name__ == "__main__":
    main()
