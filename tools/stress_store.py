"""Run writers, readers, a compactor and kill -9 on one store, and check what they saw.

    python -m tools.stress_store --writers 8 --commits 200 --readers 4 --kills 50 [--s3] [--folder DIR]

Writers append rows of overlapping keys; a row's values encode the writer and the
commit, so values of two writers are never equal by chance. A writer logs each commit in its diary after `append` returned.
Readers look keys up all the time and log every value. At the end, each key of a logged commit must have exactly the value that
every reader saw.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from reflogp.store import Reference, Store, StoreError, sequence_keys
from reflogp.store.maintenance import small_shards_allowed
from reflogp.store.schema import shard_table

REFERENCE = Reference("cd" * 16, "model", "float32", "float32", ("11" * 32,), {"hidden_size": 8})
KEYS, ROWS, TOKENS = 4_000, 20, 4
_ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Account:
    """The totals of a run; the first five must be 0."""

    lost: int
    two_values: int
    readers_failed: int
    writers_failed: int
    damaged: int
    commits: int
    kills: int
    lookups: int
    snapshots: int
    keys: int
    seconds: float

    def is_clean(self) -> bool:
        return not (self.lost or self.two_values or self.readers_failed or self.writers_failed or self.damaged)


def keys_of(numbers: Sequence[int]) -> pa.Array:
    return sequence_keys([[7, n] for n in numbers], [[n, 1, 2, 3] for n in numbers])


def rows_of(numbers: Sequence[int], writer: int, commit: int) -> pa.Table:
    """Return rows whose values encode the writer and the commit; some rows have only their first values."""
    values = [[-float(writer), -float(commit), -float(n), -1.0][: TOKENS - (n + writer) % 2] for n in numbers]
    lens = np.full(len(numbers), 2, np.int32), np.full(len(numbers), TOKENS, np.int32)
    return shard_table(keys_of(numbers), *lens, pa.array(values, pa.list_(pa.float32())), {"writer": writer})


def write(uri: str, folder: Path, writer: int, commits: int) -> None:
    """Append until the diary has `commits` entries."""
    diary = folder / f"diary-{writer}.jsonl"
    done = len(diary.read_text().splitlines()) if diary.exists() else 0
    table = Store(uri).create_table(REFERENCE)
    allowed = small_shards_allowed()
    with diary.open("a") as pages:
        for commit in range(done, commits):
            numbers = random.Random(writer * 100_003 + commit).sample(range(KEYS), ROWS)
            table.append(rows_of(numbers, writer, commit))
            pages.write(json.dumps(numbers) + "\n")
            pages.flush()
            os.fsync(pages.fileno())
            table.compact_if_many(allowed)


def read(uri: str, folder: Path, reader: int) -> None:
    """Look keys up until told to stop, also in old snapshots. Later values of a key must begin with the values seen before."""
    seen: dict[int, tuple[float, ...]] = {}
    source, lookups = random.Random(-reader), 0
    old = None
    while not (folder / "stop").exists():
        table = Store(uri)[REFERENCE.reference_id]
        for _ in range(5):
            snapshot = table.snapshot()
            numbers = source.sample(range(KEYS), 500)
            asked = [snapshot] if old is None else [snapshot, old]
            answers = [at.token_logps(keys_of(numbers)) for at in asked]
            for at, values in zip(numbers, answers[0], strict=True):
                before = seen.get(at, ())
                now = () if values is None else tuple(values.tolist())
                assert now[: len(before)] == before, f"key {at}: {before} became {now}"
                seen[at] = now
            if old is not None:
                again = table.snapshot(old.number).token_logps(keys_of(numbers))
                assert [v is None or v.tolist() for v in again] == [v is None or v.tolist() for v in answers[1]]
            lookups += len(numbers) * len(asked)
        old = table.snapshot() if source.random() < 0.2 else old
    (folder / f"seen-{reader}.json").write_text(json.dumps({"lookups": lookups, "seen": seen}))


def tidy(uri: str, folder: Path) -> None:
    """Compact everything and vacuum (with a retention) in a loop."""
    while not (folder / "stop").exists():
        table = Store(uri)[REFERENCE.reference_id]
        table.compact()
        table.vacuum(retention_hours=1)
        time.sleep(2)


def run(uri: str, folder: Path, writers: int, commits: int, readers: int, kills: int, environment: dict[str, str]) -> Account:
    """Run all processes; kill random writers or the compactor, and start them again."""
    Store(uri).create_table(REFERENCE)
    started = time.monotonic()
    logs = (folder / "log").open("w")

    def start(*words: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tools.stress_store", "--as", *map(str, words), "--uri", uri, "--folder", str(folder)]
        return subprocess.Popen(command, cwd=_ROOT, env=os.environ | environment, stderr=logs)

    reading = [start("read", i, 0) for i in range(readers)]
    roles: list[tuple[object, ...]] = [("write", i, commits) for i in range(1, writers + 1)] + [("tidy", 0, 0)]
    running = [start(*role) for role in roles]
    killed = failed = 0
    least = max(1.0, kills / 25)
    while any(process.poll() is None for process in running[:-1]):
        time.sleep(random.uniform(0, 0.5))
        alive = [i for i, process in enumerate(running) if process.poll() is None]
        if killed < kills and alive and time.monotonic() - started > least:
            victim = random.choice(alive)
            running[victim].send_signal(signal.SIGKILL)
            running[victim].wait()
            killed += 1
            running[victim] = start(*roles[victim])
        for i, process in enumerate(running):
            if process.poll() not in (None, 0):
                failed += 1
                running[i] = start(*roles[i])
    (folder / "stop").touch()
    readers_failed = sum(process.wait(timeout=120) != 0 for process in reading)
    failed += running[-1].wait(timeout=120) != 0
    return _account(uri, folder, readers_failed, failed, killed, time.monotonic() - started)


def _account(uri: str, folder: Path, readers_failed: int, writers_failed: int, kills: int, seconds: float) -> Account:
    table = Store(uri)[REFERENCE.reference_id]
    snapshot = table.snapshot()
    final = snapshot.token_logps(keys_of(range(KEYS)))
    diaries = [json.loads(line) for diary in folder.glob("diary-*.jsonl") for line in diary.read_text().splitlines()]
    noted = {number for numbers in diaries for number in numbers}
    lost = sum(final[number] is None for number in noted)
    values: dict[int, set[tuple[float, ...]]] = {}
    for path in snapshot.rows_of:
        for logps in table.shard(path).read(["token_logps"])["token_logps"].to_pylist():
            values.setdefault(int(-logps[2]), set()).add(tuple(logps))
    two = sum(any(a[:3] != b[:3] for a in found for b in found) for found in values.values())
    lookups = 0
    for file in folder.glob("seen-*.json"):
        diary = json.loads(file.read_text())
        lookups += diary["lookups"]
        for number, seen in diary["seen"].items():
            now = final[int(number)]
            two += bool(seen) and (now is None or now.tolist()[: len(seen)] != seen)
    return Account(
        lost=lost,
        two_values=two,
        readers_failed=readers_failed,
        writers_failed=writers_failed,
        damaged=len(table.verify()),
        commits=len(diaries),
        kills=kills,
        lookups=lookups,
        snapshots=snapshot.number,
        keys=len(noted),
        seconds=seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("writers", 8), ("commits", 200), ("readers", 4), ("kills", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--s3", action="store_true", help="use an S3 server that this script starts")
    parser.add_argument("--folder", help="folder of the diaries and, without --s3, of the store; default: a temporary folder")
    parser.add_argument("--as", dest="role", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--uri", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, number, commits = options.role[0], int(options.role[1]), int(options.role[2])
        folder = Path(options.folder)
        try:
            if role == "write":
                write(options.uri, folder, number, commits)
            elif role == "read":
                read(options.uri, folder, number)
            else:
                tidy(options.uri, folder)
        except StoreError as error:
            sys.exit(f"{role} {number}: {error}")
        return
    with ExitStack() as stack:
        folder = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        environment: dict[str, str] = {}
        uri = str(folder / "store")
        if options.s3:
            from tests.store.s3 import environment_of, s3_server

            environment = stack.enter_context(s3_server())
            stack.enter_context(environment_of(environment))
            uri = "s3://logps/store"
        account = run(uri, folder, options.writers, options.commits, options.readers, options.kills, environment)
        print((folder / "log").read_text()[-3000:], file=sys.stderr)
        print(json.dumps(asdict(account)))
        sys.exit(
            bool(account.lost or account.two_values or account.readers_failed or account.writers_failed or account.damaged)
        )


if __name__ == "__main__":
    main()
