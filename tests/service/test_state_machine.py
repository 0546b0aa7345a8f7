"""Random sequences of operations and faults on a real service: values stay right, jobs end, nothing acknowledged is lost.

Hypothesis draws the operations; one sequence is one service with a store, references and datasets of its own. While operations
run, jobs and command lines go on behind them. At the end of a sequence every fault is lifted, and then these must hold:

1. Every row of the store, every result of a job and every answer has the values of a plain float32 forward of the weights that
   its reference id names, for the tokens of the dataset and tokenizer that the job was submitted with.
2. Every job that was acknowledged is done, failed for a reason that was given to it, or cancelled; a cancelled one stays so.
3. /healthz answers as long as the service lives; /readyz says 200 again, and both references can be scored.
4. Every upload and every job that was acknowledged is there.

What a request that got no answer did is open, and allowed to have happened or not. Failing sequences are printed as calls:

    REFLOGP_SEQUENCES=200 REFLOGP_SEQUENCES_SEED=1000 pytest tests/service/test_state_machine.py

runs so many sequences. Each is drawn with a seed of its own, the first with that one, the next with the next number, so that
one of them can be run alone. More variables:

    REFLOGP_SEQUENCES_REPLAY=FILE    run printed calls; an empty line ends a sequence
    REFLOGP_SEQUENCES_FAILURES=N     go on until so many failed (1)
    REFLOGP_SEQUENCES_PATIENCE=S     seconds to recover from faults (120)
    REFLOGP_SEQUENCES_COLD=1         ordinary processes, which start slowly
    REFLOGP_SEQUENCES_NO_MOUNT=1     fill the disk by a limit on files' sizes, as where nothing may be mounted
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from reflogp.store import ReflogpError
from tests.service.world import (
    DATASETS,
    SUM_TOLERANCE,
    TOKEN_ROWS,
    TOKENIZERS,
    VALUE_TOLERANCE,
    WEIGHTS,
    Library,
    Pair,
    Pulse,
    World,
)

SEQUENCES = int(os.environ.get("REFLOGP_SEQUENCES", "4"))
SEED = int(os.environ.get("REFLOGP_SEQUENCES_SEED", "0"))
FAILURES = int(os.environ.get("REFLOGP_SEQUENCES_FAILURES", "1"))
STEPS = 20
#: Seconds after the faults within which jobs must have ended, and a service must be ready. Pauses before a worker is started
#: again grow up to 30 s.
PATIENCE = float(os.environ.get("REFLOGP_SEQUENCES_PATIENCE", "120"))
#: Seconds within which /healthz must answer, on a machine that does much else.
HEALTH_SECONDS = 15
#: Seconds that an operation waits for an answer before the next one begins.
_ASK_SECONDS, _SCORE_SECONDS = 10, 3

FINAL_STATES = ("done", "failed", "cancelled")
#: Fault -> what a job's reason may then say.
REASONS = {
    "weights": r"chang|restart|reference|weights",
    "tokenizer": r"chang|token",
    "dataset": r"chang|being written to",
    "disk": r"space|disk|full|written|write|too large|store",
    "deaths": r"worker|processes that ran",
}
#: What no reason begins with: the name of an exception that nobody foresaw.
UNFORESEEN = re.compile(r"^(the dataset cannot be used: )?[A-Za-z_.]*(Error|Exception|Interrupt|StopIteration)\b|Traceback")

references = st.sampled_from("ab")
versions = st.integers(0, WEIGHTS - 1)
datasets = st.integers(0, DATASETS - 1)
texts = st.integers(len(TOKEN_ROWS), DATASETS - 1)
names = st.sampled_from(["one.jsonl", "two.jsonl"])
lengths = st.sampled_from([None, None, 18, 60])
rows_of_20 = st.integers(0, 19)
ways = st.sampled_from(["rename", "in place", "link"])
pauses = st.sampled_from([0, 0.03, 0.2])


@dataclass
class Seen:
    """A job as its submitter knows it.

    Attributes:
        contents: datasets that it may be about: one, unless an upload was replaced without an answer.
        kinds: tokenizers that lay in the reference's folder since it was submitted.
        faults: that may have made it fail.
        deaths: of workers and services since it was submitted.
        may_be_cancelled: somebody tried to.
        cancelled_at: attempts when its cancellation was acknowledged.
        file: below the root that it reads; None where it reads an upload.
    """

    id: str
    reference: str
    reference_id: str
    contents: set[int]
    kinds: set[tuple[int, int]]
    max_length: int | None
    file: str | None
    faults: set[str] = field(default_factory=set)
    deaths: int = 0
    may_be_cancelled: bool = False
    cancelled_at: int | None = None
    ended: bool = False


@dataclass
class Findings:
    """What all sequences of a run gave."""

    began: float = field(default_factory=time.monotonic)
    sequences: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    jobs: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    slowest_health: float = 0.0
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def told(self) -> str:
        operations = ", ".join(f"{count} {name}" for name, count in sorted(self.operations.items()))
        jobs = ", ".join(f"{count} {name}" for name, count in sorted(self.jobs.items()))
        return (
            f"state machine: seeds from {SEED}, {self.sequences} sequences of {STEPS} operations in "
            f"{time.monotonic() - self.began:.0f} s (mean {np.mean(self.seconds or [0]):.1f} s, longest "
            f"{max(self.seconds, default=0):.1f} s), {len(self.failures)} failed; operations: {operations}; "
            f"jobs: {jobs}; {self.rows:,} stored rows compared; slowest /healthz {self.slowest_health:.2f} s"
        )


def operation(**strategies: Any) -> Any:
    """A rule that is logged and counted."""

    def decorate(function: Any) -> Any:
        @wraps(function)
        def logged(self: Sequence, **arguments: Any) -> None:
            if self.world is None:
                return
            began = time.monotonic()
            call = f"state.{function.__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
            self.findings.operations[function.__name__] += 1
            outcome = function(self, **arguments)
            self.calls.append(f"{call}  # {began - self.began:.1f}-{time.monotonic() - self.began:.1f} s: {outcome}")

        return rule(**strategies)(logged)

    return decorate


class Sequence(RuleBasedStateMachine):
    """One sequence of operations on one world."""

    library: Library
    findings: Findings
    make_world: Any
    #: Hypothesis begins each run with the simplest sequence, and draws from the second on.
    simplest_is_next = False

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        simplest, type(self).simplest_is_next = self.simplest_is_next, False
        if simplest or len(self.findings.failures) >= FAILURES:
            return  # nothing is done in this one
        self.began = time.monotonic()
        self.world = type(self).make_world()
        self.calls: list[str] = []
        self.wrong: list[str] = []
        self.jobs: dict[str, Seen] = {}
        self.uploads: dict[str, tuple[set[int], bool]] = {}  # name -> (contents it may have, whether it is acknowledged)
        self.lines: list[tuple[subprocess.Popen[str], set[str], set[str]]] = []  # process, faults, ids that it may name
        self.scores: list[tuple[Future[Any], str, list[bytes]]] = []
        self.locks: list[threading.Thread] = []
        self.stopped: set[psutil.Process] = set()
        self.full = False
        self.was_locked_long = False
        self.threads = ThreadPoolExecutor(8)
        self.pulse = Pulse(self.world, HEALTH_SECONDS)

    # what people do

    @operation(
        reference=references, dataset=st.integers(0, 4), rows=st.integers(0, 19), write=st.booleans(), read=st.booleans()
    )
    def score(self, reference: str, dataset: int, rows: int, write: bool, read: bool) -> str:
        """Three pairs of a dataset of token ids, or fewer, over HTTP."""
        return self.scored(reference, dataset, rows, write, read)

    @operation(reference=references, name=names, upload=st.booleans(), max_length=lengths, priority=st.integers(0, 1))
    def submit(self, reference: str, name: str, upload: bool, max_length: int | None, priority: int) -> str:
        """A job over an upload or a file below the root."""
        return self.submitted(reference, name, upload, max_length, priority)[1]

    @operation(name=names, dataset=datasets, then=st.none() | datasets, reference=references, pause=pauses)
    def upload_and_submit(self, name: str, dataset: int, then: int | None, reference: str, pause: float) -> str:
        """A job over a new upload, which is then replaced."""
        outcome = [self.uploaded(name, dataset), self.submitted(reference, name, True, None, 0)[1]]
        if then is not None:
            time.sleep(pause)
            outcome.append(self.uploaded(name, then))
        return ", ".join(outcome)

    @operation(reference=references, name=names, dataset=datasets, how=ways, stop=st.booleans())
    def submit_and_swap(self, reference: str, name: str, dataset: int, how: str, stop: bool = False) -> str:
        """A job over a file, which is replaced when the job begins; with `stop`, before its worker gets on."""
        if stop:
            self.paused()
        told, outcome = self.submitted(reference, name, False, None, 0)
        if told is not None:
            self.wait_for_job(told, lambda state: state != "queued", 0.5)
        self.swapped_dataset(name, dataset, how)
        if stop:
            self.continued()
        return outcome

    @operation(name=names, dataset=datasets)
    def upload(self, name: str, dataset: int) -> str:
        return self.uploaded(name, dataset)

    @operation(reference=references, dataset=datasets)
    def command_line(self, reference: str, dataset: int) -> str:
        """`reflogp score` into the service's store, while other things go on."""
        running = [line for line, _, _ in self.lines if line.poll() is None]
        if len(running) == 2:
            return "two are running"
        data = str(self.library.dataset(dataset))
        line = self.world.command_line(
            "score", str(self.world.model(reference)), data, "--store", str(self.world.store), "--dtype", "float32", "--json"
        )
        self.lines.append((line, {"disk"} if self.full else set(), {self.id_of(self.world.weights[reference])}))
        return f"pid {line.pid}"

    @operation(number=st.integers(0, 9))
    def cancel(self, number: int) -> str:
        """One of the jobs, counted from the newest."""
        if not self.jobs:
            return "no job"
        told = list(self.jobs.values())[-1 - number % len(self.jobs)]
        told.may_be_cancelled = True
        answer = self.ask("DELETE", f"/v1/jobs/{told.id}")
        if answer is not None and answer.status_code == 202:
            told.cancelled_at = answer.json()["attempts"]
        return f"{told.id} {said(answer)}"

    @operation(number=st.integers(0, 9))
    def retry(self, number: int) -> str:
        """One of the jobs, counted from the newest."""
        if not self.jobs:
            return "no job"
        told = list(self.jobs.values())[-1 - number % len(self.jobs)]
        before = told.cancelled_at
        told.cancelled_at = None
        self.again(told)
        answer = self.ask("POST", f"/v1/jobs/{told.id}/retry")
        if answer is not None and answer.status_code == 409:
            told.cancelled_at = before
        return f"{told.id} {said(answer)}"

    @operation()
    def compact(self) -> str:
        return self.on_store(lambda table: table.compact())

    @operation()
    def vacuum(self) -> str:
        """Everything that is not needed while nobody else is at the store, else what is older than an hour."""
        others = self.world.pid() or any(orphan.is_running() for orphan in self.world.orphans)
        alone = not others and all(line.poll() is not None for line, _, _ in self.lines)
        return self.on_store(lambda table: table.vacuum(0 if alone else 1, alone=alone))

    @operation(seconds=st.sampled_from([0.05, 0.3, 1.0]))
    def wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return ""

    # what goes wrong, or changes

    @operation()
    def kill_worker(self) -> str:
        return self.signal_workers(signal.SIGKILL, self.world.workers())

    @operation()
    def kill_runner(self) -> str:
        return self.signal_workers(signal.SIGKILL, self.world.runners())

    @operation()
    def stop_worker(self) -> str:
        return self.paused()

    @operation()
    def continue_worker(self) -> str:
        return self.continued()

    @operation(start=st.booleans())
    def kill_service(self, start: bool) -> str:
        """And start it again, now or later."""
        if not self.world.kill_service():
            return "it does not run"
        self.fault("deaths")
        return self.started() if start else "killed"

    @operation()
    def start_service(self) -> str:
        return "it runs" if self.world.pid() else self.started()

    @operation(reference=references, version=versions, how=ways)
    def swap_weights(self, reference: str, version: int, how: str) -> str:
        return self.swapped_weights(reference, version, how)

    @operation(order=st.sampled_from(["ab", "ba"]), version=versions, how=ways, row=rows_of_20)
    def swap_unloaded(self, order: str, version: int, how: str, row: int) -> str:
        """Score with one reference, then with the other, and swap the first one's weights, which are then not loaded."""
        first, second = order
        outcome = [self.scored(name, 1, row, write=True, read=False) for name in (first, second)]
        outcome.append(self.swapped_weights(first, version, how))
        outcome.append(self.scored(first, 3, row, write=True, read=False))
        return ", ".join(outcome)

    @operation(reference=references)
    def swap_back(self, reference: str) -> str:
        """The weights that the service knows."""
        return self.swapped_weights(reference, self.world.served[reference], "rename")

    @operation(reference=references, kind=st.sampled_from(TOKENIZERS))
    def swap_tokenizer(self, reference: str, kind: tuple[int, int]) -> str:
        return self.swapped_tokenizer(reference, kind)

    @operation(reference=references, kind=st.sampled_from(TOKENIZERS), first=texts, second=texts)
    def swap_tokenizer_between_jobs(self, reference: str, kind: tuple[int, int], first: int, second: int) -> str:
        """A job over conversations, and another when the tokenizer was replaced."""
        outcome = [self.uploaded("one.jsonl", first)]
        told, answer = self.submitted(reference, "one.jsonl", True, None, 0)
        if told is not None:
            self.wait_for_job(told, FINAL_STATES.__contains__, 2)
        outcome += [answer, self.swapped_tokenizer(reference, kind), self.uploaded("two.jsonl", second)]
        outcome.append(self.submitted(reference, "two.jsonl", True, None, 0)[1])
        return ", ".join(outcome)

    @operation(name=names, dataset=datasets, how=ways)
    def swap_dataset(self, name: str, dataset: int, how: str) -> str:
        return self.swapped_dataset(name, dataset, how)

    @operation(seconds=st.sampled_from([0.3, 1.0, 6.0, 16.0]))
    def lock_ledger(self, seconds: float) -> str:
        """For a moment; or for longer than anybody waits, once in a sequence."""
        if any(lock.is_alive() for lock in self.locks):
            return "it is locked"
        if seconds > 1:
            if self.was_locked_long:
                return "it was locked for long before"
            self.was_locked_long = True
        self.locks.append(self.world.lock_ledger(seconds))
        return ""

    @operation(left=st.sampled_from([0, 0, 4096, 65536]))
    def fill_disk(self, left: int) -> str:
        self.full = True
        self.fault("disk")
        self.world.disk.fill(left, self.world.pids())
        return ""

    @operation()
    def free_disk(self) -> str:
        self.freed()
        return ""

    # parts of operations

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response | None:
        """None where no answer came: what was asked for may have happened or not."""
        if self.world.service is None or self.world.service.process.poll() is not None:
            return None
        try:
            return httpx.request(method, f"{self.world.service.url}{path}", **{"timeout": _ASK_SECONDS, **more})
        except httpx.HTTPError:
            return None

    def scored(self, reference: str, dataset: int, rows: int, write: bool, read: bool) -> str:
        pairs = self.library.pairs(dataset, TOKENIZERS[0])[rows : rows + 3]
        sequences = [(prompt, completion) for prompt, *completions in pairs for completion in completions]
        if not sequences:
            return "no rows"
        body = {"sequences": [{"prompt_ids": prompt, "completion_ids": completion} for prompt, completion in sequences]}
        query = {"reference": reference, "cache_write": write, "cache_read": read, "deadline_ms": 20_000}
        asked = self.threads.submit(self.ask, "POST", "/v1/score", params=query, json=body, timeout=25)
        keys = [self.library.key(*sequence) for sequence in sequences]
        self.scores.append((asked, self.served_id(reference), keys))
        wait_for_futures([asked], _SCORE_SECONDS)
        return said(asked.result()) if asked.done() else "no answer yet"

    def submitted(
        self, reference: str, name: str, upload: bool, max_length: int | None, priority: int
    ) -> tuple[Seen | None, str]:
        contents = set(self.uploads.get(name, (set(), False))[0]) if upload else {self.world.files[name]}
        kind = self.world.tokenizers[reference]
        dataset = {"upload": name} if upload else {"path": str(self.world.root / name)}
        body = {"reference": reference, "dataset": dataset, "max_length": max_length, "priority": priority}
        answer = self.ask("POST", "/v1/jobs", json=body)
        if answer is None or answer.status_code not in (200, 201):
            return None, said(answer)
        job = answer.json()
        told = self.jobs.get(job["id"])
        if told is None:
            told = Seen(job["id"], reference, job["reference_id"], contents, {kind}, max_length, None if upload else name)
            self.jobs[told.id] = told
        told.contents |= contents
        if job["state"] not in FINAL_STATES:
            told.cancelled_at = None
            self.again(told)
        return told, f"{told.id} {answer.status_code} {job['state']}, datasets {contents}"

    def wait_for_job(self, told: Seen, enough: Callable[[str], bool], seconds: float) -> None:
        """Wait until its state is enough, or for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            answer = self.ask("GET", f"/v1/jobs/{told.id}")
            if answer is None or answer.status_code != 200 or enough(answer.json()["state"]):
                return
            time.sleep(0.01)

    def again(self, told: Seen) -> None:
        """It begins now, or once more: what is in place now counts."""
        told.ended = False
        told.kinds.add(self.world.tokenizers[told.reference])
        if self.world.served.get(told.reference) != self.world.weights[told.reference]:
            told.faults.add("weights")
        if told.reference_id not in map(self.served_id, "ab"):
            told.faults.add("weights")
        if told.file is not None and self.world.files[told.file] not in told.contents:
            told.faults.add("dataset")
        if self.full:
            told.faults.add("disk")
        if self.stopped:
            told.deaths += 1

    def uploaded(self, name: str, dataset: int) -> str:
        content, headers = self.library.dataset(dataset).read_bytes(), {"content-type": "application/octet-stream"}
        answer = self.ask("PUT", f"/v1/uploads/{name}", content=content, headers=headers)
        if answer is not None and answer.status_code in (200, 201):
            self.uploads[name] = {dataset}, True
        elif answer is None or answer.status_code >= 500:
            contents, acknowledged = self.uploads.get(name, (set(), False))
            self.uploads[name] = contents | {dataset}, acknowledged
        return f"upload {said(answer)}"

    def swapped_weights(self, reference: str, version: int, how: str) -> str:
        before = self.world.weights[reference]
        self.fault("weights", reference)
        for _, faults, ids in self.lines:
            faults.add("weights")
            ids.add(self.id_of(version))
        self.world.swap_weights(reference, version, how)
        return f"instead of {before}"

    def swapped_tokenizer(self, reference: str, kind: tuple[int, int]) -> str:
        self.refresh()
        before = self.world.tokenizers[reference]
        for told in self.jobs.values():
            if told.reference == reference and not told.ended:
                told.kinds |= {before, kind, (before[0], kind[1]), (kind[0], before[1])}  # its files change one by one
                told.faults.add("tokenizer")
        self.world.swap_tokenizer(reference, kind)
        return f"instead of {before}"

    def swapped_dataset(self, name: str, dataset: int, how: str) -> str:
        self.fault("dataset")
        before = self.world.files[name]
        self.world.swap_dataset(name, dataset, how)
        return f"instead of {before}"

    def signal_workers(self, number: signal.Signals, workers: list[psutil.Process]) -> str:
        if workers:
            self.fault("deaths")
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(number)
        return f"{[worker.pid for worker in workers]}"

    def paused(self) -> str:
        workers = self.world.workers()  # once: one that begins in between would stay stopped for good
        self.stopped.update(workers)
        return self.signal_workers(signal.SIGSTOP, workers)

    def continued(self) -> str:
        for worker in self.stopped:
            with suppress(psutil.NoSuchProcess):
                worker.resume()
        self.stopped.clear()
        return ""

    def freed(self) -> None:
        self.full = False
        self.world.disk.free(self.world.pids())

    def started(self) -> str:
        """A service that does not start under a fault is started again when it is lifted."""
        try:
            self.world.start()
        except AssertionError as error:
            if not (self.full or any(lock.is_alive() for lock in self.locks)):
                self.wrong.append(f"start: the service does not start: {str(error)[-1500:]}")
            return f"it does not start: {str(error)[-150:]!r}"
        for told in self.jobs.values():
            if told.reference_id not in map(self.served_id, "ab"):
                told.faults.add("weights")
        return "started"

    def on_store(self, work: Any) -> str:
        try:
            return f"{self.world.compact(work)} tables"
        except ReflogpError as error:
            if not self.full:
                self.wrong.append(f"store: {type(error).__name__}: {error}")
            return f"{type(error).__name__}: {error}"[:150]

    def fault(self, name: str, reference: str | None = None) -> None:
        """Something went wrong that jobs which have not ended may fail of."""
        self.refresh()
        for told in self.jobs.values():
            if not told.ended and reference in (None, told.reference):
                told.faults.add(name)
                told.deaths += name == "deaths"
        for _, faults, _ in self.lines:
            faults.add(name)

    def refresh(self) -> None:
        """Note which jobs have ended."""
        if all(told.ended for told in self.jobs.values()) or any(lock.is_alive() for lock in self.locks):
            return
        answer = self.ask("GET", "/v1/jobs", params={"limit": 200}, timeout=3)
        if answer is not None and answer.status_code == 200:
            for job in answer.json()["jobs"]:
                if job["id"] in self.jobs and job["state"] in FINAL_STATES:
                    self.jobs[job["id"]].ended = True

    def id_of(self, version: int) -> str:
        return next(reference_id for reference_id, number in self.library.versions.items() if number == version)

    def served_id(self, reference: str) -> str:
        return self.id_of(self.world.served[reference])

    # the end of a sequence

    def teardown(self) -> None:
        if self.world is None:
            return
        self.findings.sequences += 1
        try:
            self.lift()
            self.check_answers()
            self.check_command_lines()
            self.check_jobs()
            self.check_service()
        except Exception as error:
            self.wrong.append(f"harness: {type(error).__name__}: {error}")
            raise
        finally:
            self.findings.seconds.append(time.monotonic() - self.began)
            if self.wrong:
                calls = "\n".join(f"    {call}" for call in self.calls)
                log = "".join(f"    | {line}" for line in list(self.world.service.log)[-60:]) if self.world.service else ""
                wrong = "\n".join(f"  - {entry}" for entry in self.wrong[:20])
                self.findings.failures.append(
                    f"sequence of seed {SEED + self.findings.sequences - 1}:\n{calls}\n{wrong}\n{log}"
                )
                print(self.findings.failures[-1], file=sys.stderr, flush=True)
            self.pulse.close()
            self.threads.shutdown(wait=False, cancel_futures=True)
            for line, _, _ in self.lines:
                line.kill()
            self.world.close()

    def lift(self) -> None:
        """Take every fault away, once requests that wait for answers have had a moment under them."""
        wait_for_futures([asked for asked, _, _ in self.scores], _SCORE_SECONDS)
        for lock in self.locks:
            lock.join()
        self.freed()
        self.continued()
        for reference, version in self.world.served.items():
            if self.world.weights[reference] != version:
                for _, faults, ids in self.lines:  # one that is reading its model, or has not read it yet
                    faults.add("weights")
                    ids.add(self.id_of(version))
                self.world.swap_weights(reference, version, "rename")
        if not self.world.pid():
            self.started()

    def check_answers(self) -> None:
        """Answers of online scoring have the right values, and both references can be scored now."""
        for reference in "ab":
            stop = time.monotonic() + PATIENCE
            pairs = self.library.pairs(0, TOKENIZERS[0])[:1]
            keys = [self.library.key(pairs[0][0], pairs[0][1])]
            body = {"sequences": [{"prompt_ids": pairs[0][0], "completion_ids": pairs[0][1]}]}
            query = {"reference": reference, "cache_read": False, "deadline_ms": 20_000}
            while True:
                answer = self.ask("POST", "/v1/score", params=query, json=body, timeout=25)
                if answer is not None and answer.status_code == 200:
                    break
                if time.monotonic() > stop:
                    self.wrong.append(f"ready: reference {reference} cannot be scored after the faults: {said(answer)}")
                    break
                time.sleep(0.1)
            self.scores.append((_known(answer), self.served_id(reference), keys))
        for asked, reference_id, keys in self.scores:
            wait_for_futures([asked], PATIENCE)
            answer = asked.result() if asked.done() else None
            if answer is None or answer.status_code != 200:
                continue
            found = answer.json()
            version = self.library.versions.get(found["reference_id"])
            if found["reference_id"] != reference_id and version is None:
                self.wrong.append(f"answer: reference {found['reference_id']} is none of the versions")
                continue
            for key, values, error in zip(keys, found["token_logps"], found["errors"], strict=True):
                if error is not None:
                    self.wrong.append(f"answer: {error}")
                elif np.abs(np.array(values) - self.library.values(version, key)).max() > VALUE_TOLERANCE:
                    self.wrong.append(f"answer: wrong values under version {version}")

    def check_command_lines(self) -> None:
        for line, faults, ids in self.lines:
            try:
                output, errors = line.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                self.wrong.append("command line: it does not end")
                continue
            if "Traceback" in errors:
                self.wrong.append(f"command line: {errors[-800:]}")
            if line.returncode == 0:
                reference_id = json.loads(output.splitlines()[-1])["reference_id"]
                if reference_id not in ids:
                    self.wrong.append(f"command line: scored as {reference_id}, and {ids} were there")
            elif not faults & {"weights", "disk"}:
                self.wrong.append(f"command line: exit code {line.returncode}: {errors[-500:]}")

    def check_jobs(self) -> None:
        """Every job that was acknowledged has ended as it may end."""
        stop = time.monotonic() + PATIENCE
        while True:
            page = self.ask("GET", "/v1/jobs", params={"limit": 1})
            counts = page.json()["counts"] if page is not None and page.status_code == 200 else {"queued": 1}
            if not counts.get("queued") and not counts.get("running"):
                break
            if time.monotonic() > stop:
                self.wrong.append(f"jobs: some do not end within {PATIENCE} s after the faults: {counts}")
                break
            time.sleep(0.1)
        for told in self.jobs.values():
            answer = self.ask("GET", f"/v1/jobs/{told.id}")
            if answer is None or answer.status_code != 200:
                self.wrong.append(f"job {told.id}: it was acknowledged, and now: {said(answer)}")
                continue
            job = answer.json()
            self.findings.jobs[job["state"]] += 1
            if job["state"] not in FINAL_STATES:
                self.wrong.append(f"job {told.id}: it is {job['state']}")
            if told.cancelled_at is not None and job["state"] != "cancelled" and job["attempts"] > told.cancelled_at:
                self.wrong.append(f"job {told.id}: it was cancelled, and began again: {job['state']}")
            if job["state"] == "cancelled" and not told.may_be_cancelled:
                self.wrong.append(f"job {told.id}: nobody cancelled it")
            if job["state"] == "failed":
                self.check_reason(told, job["error"])
            if job["state"] == "done":
                self.check_result(told)

    def check_reason(self, told: Seen, reason: str) -> None:
        allowed = {name for name in told.faults if name != "deaths" or told.deaths >= 3}
        if UNFORESEEN.search(reason) or not any(re.search(REASONS[name], reason) for name in allowed):
            self.wrong.append(f"job {told.id}: failed with {reason!r} after {told.faults or 'nothing'} ({told.deaths} deaths)")

    def check_result(self, told: Seen) -> None:
        answer = self.ask("GET", f"/v1/jobs/{told.id}/result")
        if answer is None or answer.status_code != 200:
            self.wrong.append(f"job {told.id}: it is done and has no result: {said(answer)}")
            return
        with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
            file.write(answer.content)
            file.flush()
            rows = pq.read_table(file.name).to_pylist()
        problems = [
            self.problem_of(told, rows, self.library.pairs(dataset, kind))
            for dataset in sorted(told.contents)
            for kind in sorted(told.kinds)
        ]
        if all(problems):
            datasets, kinds = sorted(told.contents), sorted(told.kinds)
            instead = [
                (dataset, kind)
                for dataset in range(DATASETS)
                for kind in TOKENIZERS
                if not self.problem_of(told, rows, self.library.pairs(dataset, kind))
            ]
            self.wrong.append(
                f"job {told.id}: its result is not of datasets {datasets} by tokenizers {kinds}: {problems[0]}; "
                f"it is of (dataset, tokenizer): {instead[:2] or 'none'}"
            )

    def problem_of(self, told: Seen, rows: list[dict[str, Any]], pairs: list[Pair]) -> str | None:
        """Why a result is not of these pairs."""
        version = self.library.versions[told.reference_id]
        if len(rows) != len(pairs):
            return f"{len(rows)} rows instead of {len(pairs)}"
        for number, (row, (prompt, chosen, rejected)) in enumerate(zip(rows, pairs, strict=True)):
            if told.max_length is not None and len(prompt) >= told.max_length:
                continue  # dropped, as TRL does it
            if row["error"] is not None:
                if told.deaths >= 2 and "the sequence killed two workers" in row["error"]:
                    continue  # it was in hand whenever one was killed
                return f"row {number}: {row['error']}"
            for side, completion in (("chosen", chosen), ("rejected", rejected)):
                key = self.library.key(prompt, completion)
                if row[f"{side}_key"] != key:
                    return f"row {number}: its {side} tokens are others"
                room = None if told.max_length is None else told.max_length - len(prompt)
                if abs(row[f"ref_{side}_logps"] - self.library.values(version, key)[:room].sum()) > SUM_TOLERANCE:
                    return f"row {number}: its {side} sum is wrong"
        return None

    def check_service(self) -> None:
        """The service is ready, has its uploads, ends when it is told to; the store holds nothing but what is right."""
        stop = time.monotonic() + PATIENCE
        while (answer := self.ask("GET", "/readyz")) is None or answer.status_code != 200:
            if time.monotonic() > stop:
                self.wrong.append(f"ready: /readyz after the faults: {said(answer)}")
                break
            time.sleep(0.1)
        answer = self.ask("GET", "/v1/uploads")
        there = {entry["name"]: entry["sha256"] for entry in answer.json()["uploads"]} if answer is not None else {}
        for name, (contents, acknowledged) in self.uploads.items():
            if acknowledged and there.get(name) not in {self.library.digest(dataset) for dataset in contents}:
                self.wrong.append(f"upload {name}: {there.get(name)} is none of datasets {contents}")
        self.findings.slowest_health = max(self.findings.slowest_health, self.pulse.slowest)
        if self.pulse.missed:
            self.wrong.append(f"health: /healthz did not answer {len(self.pulse.missed)} times: {self.pulse.missed[0]}")
        try:
            self.world.service.stop()
        except subprocess.TimeoutExpired:
            self.wrong.append("service: it does not end after SIGTERM")
        if any("Traceback" in line for line in self.world.service.log):
            lines = list(self.world.service.log)
            at = next(number for number, line in enumerate(lines) if "Traceback" in line)
            self.calls.append(f"# the log has: {''.join(lines[max(0, at - 1) : at + 40])}")
        rows, wrong = self.world.wrong_rows()
        self.findings.rows += rows
        self.wrong += [f"store: {entry}" for entry in wrong]


def _known(answer: httpx.Response | None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


def said(answer: httpx.Response | None) -> str:
    """An answer in a few words."""
    if answer is None:
        return "no answer"
    return f"{answer.status_code}" + (f" {answer.text[:600]}" if answer.status_code >= 400 else "")


@pytest.fixture(scope="module")
def library(tmp_path_factory, pair_rows):
    found = Library(tmp_path_factory.mktemp("library"), pair_rows)
    found.know_all()
    return found


@pytest.fixture(scope="module")
def warm(request):
    return None if "REFLOGP_SEQUENCES_COLD" in os.environ else request.getfixturevalue("warm_python")


@pytest.mark.slow
@pytest.mark.timeout(300 + 120 * SEQUENCES)
def test_random_sequences_of_operations(warm, library, tmp_path_factory, record_property):
    class Bound(Sequence):
        pass

    Bound.library, Bound.findings = library, Findings()
    Bound.make_world = staticmethod(lambda: World(tmp_path_factory.mktemp("world"), library, warm))
    if replay := os.environ.get("REFLOGP_SEQUENCES_REPLAY"):
        for calls in Path(replay).read_text().split("\n\n"):
            state = Bound()
            try:
                for call in calls.splitlines():
                    if call.strip().startswith("state."):
                        exec(call.strip(), {"state": state})
            finally:
                state.teardown()
    else:
        drawn = settings(
            max_examples=2,
            stateful_step_count=STEPS,
            phases=[Phase.generate],
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        for number in range(SEED, SEED + SEQUENCES):
            Bound.simplest_is_next = True
            run_state_machine_as_test(seed(number)(Bound), settings=drawn)
    record_property("told", Bound.findings.told())
    print(Bound.findings.told(), file=sys.stderr)
    if Bound.findings.failures:
        pytest.fail("\n\n".join([*Bound.findings.failures, Bound.findings.told()]), pytrace=False)
