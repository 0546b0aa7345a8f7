"""Random sequences of operations and faults on a real service: values stay right, jobs end, nothing acknowledged is lost.

Hypothesis draws the operations; one sequence is one service with a store, references and datasets of its own. While operations
run, jobs and command lines go on behind them. At the end of a sequence every fault is lifted, and then these must hold:

1. Every row of the store, every result of a job and every answer has the values of a plain float32 forward of the weights that
   its reference id names, for the tokens of the dataset and tokenizer that the job was submitted with.
2. Every job that was acknowledged is done, failed for a reason that was given to it, or cancelled; a cancelled one stays so.
3. /healthz answers as long as the service lives; /readyz says 200 again, and both references can be scored.
4. Every upload and every job that was acknowledged is there.

What a request that got no answer did is open, and allowed to have happened or not. A failing sequence is printed as calls.

    REFLOGP_SEQUENCES=200 REFLOGP_SEQUENCES_SEED=1000 pytest tests/service/test_state_machine.py

runs so many sequences, drawn with that seed.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from reflogp.store import ReflogpError, Store
from tests.service.world import DATASETS, TOKEN_ROWS, TOKENIZERS, VALUE_TOLERANCE, WEIGHTS, Library, Pair, World

SEQUENCES = int(os.environ.get("REFLOGP_SEQUENCES", "4"))
SEED = int(os.environ.get("REFLOGP_SEQUENCES_SEED", "0"))
STEPS = 20
#: Seconds after the faults within which jobs must have ended, and a service must be ready. Pauses before a worker is started
#: again grow up to 30 s.
PATIENCE = 120
#: Largest difference of a sum of values.
SUM_TOLERANCE = 10 * VALUE_TOLERANCE
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
kinds = st.sampled_from(TOKENIZERS)
ways = st.sampled_from(["rename", "in place", "link"])


@dataclass
class Seen:
    """A job as its submitter knows it."""

    id: str
    reference: str
    reference_id: str
    contents: set[int]  # datasets that it may be about: one, unless an upload was replaced without an answer
    kinds: set[tuple[int, int]]  # tokenizers that lay in the reference's folder since it was submitted
    max_length: int | None
    file: str | None  # below the root that it reads; None where it reads an upload
    faults: set[str] = field(default_factory=set)  # that may have made it fail
    deaths: int = 0  # of workers and services since it was submitted
    may_be_cancelled: bool = False  # somebody tried to
    cancelled_at: int | None = None  # attempts when its cancellation was acknowledged
    ended: bool = False


def operation(**strategies: Any) -> Any:
    """A rule whose calls and outcomes are kept. Operations call others, too."""

    def decorate(function: Any) -> Any:
        @wraps(function)
        def logged(self: Sequence, **arguments: Any) -> None:
            outcome = function(self, **arguments)
            call = f"state.{function.__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
            self.calls.append(f"{call}  # until {time.monotonic() - self.began:.1f} s: {outcome or ''}")

        return rule(**strategies)(logged)

    return decorate


class Sequence(RuleBasedStateMachine):
    """One sequence of operations on one world."""

    library: Library
    make_world: Callable[[], World]

    def __init__(self) -> None:
        super().__init__()
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

    # what people do

    @operation(reference=references, dataset=st.integers(0, 4), row=st.integers(0, 19), write=st.booleans(), read=st.booleans())
    def score(self, reference: str, dataset: int, row: int, write: bool, read: bool) -> str:
        """Three pairs of a dataset of token ids, or fewer, over HTTP."""
        pairs = self.library.pairs(dataset, TOKENIZERS[0])[row : row + 3]
        sequences = [(prompt, completion) for prompt, *completions in pairs for completion in completions]
        if not sequences:
            return "no rows"
        asked = self.threads.submit(self.ask_for_scores, reference, sequences, write, read)
        self.scores.append((asked, self.served_id(reference), [self.library.key(*sequence) for sequence in sequences]))
        wait_for_futures([asked], _SCORE_SECONDS)
        return said(asked.result()) if asked.done() else "no answer yet"

    @operation(
        reference=references,
        name=names,
        upload=st.booleans(),
        max_length=st.sampled_from([None, None, 18, 60]),
        priority=st.integers(0, 1),
    )
    def submit(self, reference: str, name: str, upload: bool, max_length: int | None, priority: int) -> None:
        """A job over an upload or a file below the root."""
        self.submitted(reference, name, upload, max_length, priority)

    @operation(name=names, dataset=datasets)
    def upload(self, name: str, dataset: int) -> str:
        content, headers = self.library.dataset(dataset).read_bytes(), {"content-type": "application/octet-stream"}
        answer = self.ask("PUT", f"/v1/uploads/{name}", content=content, headers=headers)
        if answer is not None and answer.status_code in (200, 201):
            self.uploads[name] = {dataset}, True
        elif answer is None or answer.status_code >= 500:
            contents, acknowledged = self.uploads.get(name, (set(), False))
            self.uploads[name] = contents | {dataset}, acknowledged
        return said(answer)

    @operation(
        name=names, dataset=datasets, then=st.none() | datasets, reference=references, pause=st.sampled_from([0, 0.03, 0.2])
    )
    def upload_and_submit(self, name: str, dataset: int, then: int | None, reference: str, pause: float) -> None:
        """A job over a new upload, which is then replaced."""
        self.upload(name=name, dataset=dataset)
        self.submitted(reference, name, upload=True)
        if then is not None:
            time.sleep(pause)
            self.upload(name=name, dataset=then)

    @operation(reference=references, name=names, dataset=datasets, how=ways, stop=st.booleans())
    def submit_and_swap(self, reference: str, name: str, dataset: int, how: str, stop: bool) -> None:
        """A job over a file, which is replaced when the job begins; with `stop`, before its worker gets on."""
        if stop:
            self.stop_workers()
        told = self.submitted(reference, name, upload=False)
        self.wait_for_job(told, lambda state: state != "queued", 0.5)
        self.swap_dataset(name=name, dataset=dataset, how=how)
        if stop:
            self.continue_workers()

    @operation(reference=references, dataset=datasets)
    def command_line(self, reference: str, dataset: int) -> str:
        """`reflogp score` into the service's store, while other things go on."""
        if sum(line.poll() is None for line, _, _ in self.lines) == 2:
            return "two are running"
        model, data, store = self.world.model(reference), self.library.dataset(dataset), self.world.store
        line = self.world.command_line("score", str(model), str(data), "--store", str(store), "--dtype", "float32", "--json")
        self.lines.append((line, {"disk"} if self.full else set(), {self.library.ids[self.world.weights[reference]]}))
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
        before, told.cancelled_at = told.cancelled_at, None
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
        others = self.world.service.pid or any(orphan.is_running() for orphan in self.world.orphans)
        alone = not others and all(line.poll() is not None for line, _, _ in self.lines)
        return self.on_store(lambda table: table.vacuum(0 if alone else 1, alone=alone))

    @operation(seconds=st.sampled_from([0.05, 0.3, 1.0]))
    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    # what goes wrong, or changes

    @operation()
    def kill_workers(self) -> str:
        return self.signal(signal.SIGKILL, self.world.service.workers())

    @operation()
    def kill_runners(self) -> str:
        return self.signal(signal.SIGKILL, self.world.service.runners())

    @operation()
    def stop_workers(self) -> str:
        workers = self.world.service.workers()  # once: one that begins in between would stay stopped for good
        self.stopped.update(workers)
        return self.signal(signal.SIGSTOP, workers)

    @operation()
    def continue_workers(self) -> None:
        for worker in self.stopped:
            with suppress(psutil.NoSuchProcess):
                worker.resume()
        self.stopped.clear()

    @operation(start=st.booleans())
    def kill_service(self, start: bool) -> None:
        """And start it again, now or later."""
        if self.world.kill_service():
            self.fault("deaths")
            if start:
                self.start_service()

    @operation()
    def start_service(self) -> str:
        """One that does not start under a fault is started again when it is lifted."""
        if self.world.service.pid:
            return "it runs"
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

    @operation(reference=references, version=versions, how=ways)
    def swap_weights(self, reference: str, version: int, how: str) -> None:
        self.fault("weights", reference)
        for _, _, ids in self.lines:
            ids.add(self.library.ids[version])
        self.world.swap_weights(reference, version, how)

    @operation(reference=references)
    def swap_back(self, reference: str) -> None:
        """The weights that the service knows."""
        self.swap_weights(reference=reference, version=self.world.served[reference], how="rename")

    @operation(order=st.sampled_from(["ab", "ba"]), version=versions, how=ways, row=st.integers(0, 19))
    def swap_unloaded(self, order: str, version: int, how: str, row: int) -> None:
        """Score with one reference, then with the other, and swap the first one's weights, which are then not loaded."""
        for reference in order:
            self.score(reference=reference, dataset=1, row=row, write=True, read=False)
        self.swap_weights(reference=order[0], version=version, how=how)
        self.score(reference=order[0], dataset=3, row=row, write=True, read=False)

    @operation(reference=references, kind=kinds)
    def swap_tokenizer(self, reference: str, kind: tuple[int, int]) -> None:
        self.refresh()
        before = self.world.tokenizers[reference]
        for told in self.jobs.values():
            if told.reference == reference and not told.ended:
                told.kinds |= {before, kind, (before[0], kind[1]), (kind[0], before[1])}  # its files change one by one
                told.faults.add("tokenizer")
        self.world.swap_tokenizer(reference, kind)

    @operation(reference=references, kind=kinds, first=texts, second=texts)
    def swap_tokenizer_between_jobs(self, reference: str, kind: tuple[int, int], first: int, second: int) -> None:
        """A job over conversations, and another when the tokenizer was replaced."""
        self.upload(name="one.jsonl", dataset=first)
        told = self.submitted(reference, "one.jsonl", upload=True)
        self.wait_for_job(told, FINAL_STATES.__contains__, 2)
        self.swap_tokenizer(reference=reference, kind=kind)
        self.upload(name="two.jsonl", dataset=second)
        self.submitted(reference, "two.jsonl", upload=True)

    @operation(name=names, dataset=datasets, how=ways)
    def swap_dataset(self, name: str, dataset: int, how: str) -> None:
        self.fault("dataset")
        self.world.swap_dataset(name, dataset, how)

    @operation(seconds=st.sampled_from([0.3, 1.0, 6.0, 16.0]))
    def lock_ledger(self, seconds: float) -> None:
        """For a moment; or for longer than anybody waits, once in a sequence."""
        if any(lock.is_alive() for lock in self.locks) or (seconds > 1 and self.was_locked_long):
            return
        self.was_locked_long |= seconds > 1
        self.locks.append(self.world.lock_ledger(seconds))

    @operation(left=st.sampled_from([0, 0, 4096, 65536]))
    def fill_disk(self, left: int) -> None:
        self.full = True
        self.fault("disk")
        self.world.disk.fill(left, self.world.pids())

    @operation()
    def free_disk(self) -> None:
        self.full = False
        self.world.disk.free(self.world.pids())

    # parts of operations

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response | None:
        """None where no answer came: what was asked for may have happened or not."""
        try:
            return httpx.request(method, f"{self.world.service.url}{path}", **{"timeout": _ASK_SECONDS, **more})
        except httpx.HTTPError:
            return None

    def ask_for_scores(self, reference: str, sequences: list, write: bool, read: bool) -> httpx.Response | None:
        body = {"sequences": [{"prompt_ids": prompt, "completion_ids": completion} for prompt, completion in sequences]}
        query = {"reference": reference, "cache_write": write, "cache_read": read, "deadline_ms": 20_000}
        return self.ask("POST", "/v1/score", params=query, json=body, timeout=25)

    def submitted(
        self, reference: str, name: str, upload: bool, max_length: int | None = None, priority: int = 0
    ) -> Seen | None:
        """The job, if it was acknowledged."""
        contents = set(self.uploads.get(name, (set(), False))[0]) if upload else {self.world.files[name]}
        kind = self.world.tokenizers[reference]
        dataset = {"upload": name} if upload else {"path": str(self.world.root / name)}
        body = {"reference": reference, "dataset": dataset, "max_length": max_length, "priority": priority}
        answer = self.ask("POST", "/v1/jobs", json=body)
        self.calls.append(f"#   job: {said(answer)}")
        if answer is None or answer.status_code not in (200, 201):
            return None
        job = answer.json()
        new = Seen(job["id"], reference, job["reference_id"], contents, {kind}, max_length, None if upload else name)
        told = self.jobs.setdefault(job["id"], new)
        told.contents |= contents
        if job["state"] not in FINAL_STATES:
            told.cancelled_at = None
            self.again(told)
        self.calls.append(f"#   {told.id} {job['state']}, datasets {contents}")
        return told

    def wait_for_job(self, told: Seen | None, enough: Callable[[str], bool], seconds: float) -> None:
        """Wait until its state is enough, or for so long."""
        end = time.monotonic() + seconds
        while told is not None and time.monotonic() < end:
            answer = self.ask("GET", f"/v1/jobs/{told.id}")
            if answer is None or answer.status_code != 200 or enough(answer.json()["state"]):
                return
            time.sleep(0.01)

    def again(self, told: Seen) -> None:
        """It begins now, or once more: what is in place now counts."""
        told.ended = False
        told.kinds.add(self.world.tokenizers[told.reference])
        if self.world.served[told.reference] != self.world.weights[told.reference]:
            told.faults.add("weights")
        if told.reference_id not in map(self.served_id, "ab"):
            told.faults.add("weights")
        if told.file is not None and self.world.files[told.file] not in told.contents:
            told.faults.add("dataset")
        if self.full:
            told.faults.add("disk")
        if self.stopped:
            told.deaths += 1

    def signal(self, number: signal.Signals, processes: list[psutil.Process]) -> str:
        if processes:
            self.fault("deaths")
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return f"{[process.pid for process in processes]}"

    def on_store(self, work: Callable[[Any], object]) -> str:
        """Call `work` with every table of the store."""
        if not any(self.world.store.glob("*/reference.json")):  # written last: there is no store yet
            return "no store"
        try:
            store = Store(self.world.store)
            for reference in store.references():
                work(store[reference.reference_id])
            return "done"
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

    def served_id(self, reference: str) -> str:
        return self.library.ids[self.world.served[reference]]

    # the end of a sequence

    def teardown(self) -> None:
        try:
            self.lift()
            self.check_answers()
            self.check_command_lines()
            self.check_jobs()
            self.check_service()
            assert not self.wrong, self.told()
        finally:
            self.threads.shutdown(wait=False, cancel_futures=True)
            for line, _, _ in self.lines:
                line.kill()
            self.world.close()

    def told(self) -> str:
        """The calls, what is wrong after them, and the end of the log."""
        wrong = [f"- {entry}" for entry in self.wrong[:20]]
        log = [f"| {line.rstrip()}" for line in list(self.world.service.log)[-60:]]
        return "\n".join(["", *self.calls, *wrong, *log])

    def lift(self) -> None:
        """Take every fault away, once requests that wait for answers have had a moment under them."""
        wait_for_futures([asked for asked, _, _ in self.scores], _SCORE_SECONDS)
        for lock in self.locks:
            lock.join()
        self.free_disk()
        self.continue_workers()
        for reference, version in self.world.served.items():
            if self.world.weights[reference] != version:
                for _, faults, ids in self.lines:  # one that is reading its model, or has not read it yet
                    faults.add("weights")
                    ids.add(self.library.ids[version])
                self.world.swap_weights(reference, version, "rename")
        self.start_service()

    def until(self, what: str, ask: Callable[[], httpx.Response | None], enough: Callable[[Any], bool]) -> Any:
        """Ask until the answer is 200 and enough."""
        stop = time.monotonic() + PATIENCE
        while (answer := ask()) is None or answer.status_code != 200 or not enough(answer.json()):
            if time.monotonic() > stop:
                self.wrong.append(f"{what}, {PATIENCE} s after the faults: {said(answer)}")
                break
            time.sleep(0.1)
        return answer

    def check_answers(self) -> None:
        """Answers of online scoring have the right values, and both references can be scored now."""
        prompt, completion, _ = self.library.pairs(0, TOKENIZERS[0])[0]
        for reference in "ab":
            answer: Future[Any] = Future()
            ask = lambda: self.ask_for_scores(reference, [(prompt, completion)], True, False)  # noqa: B023, E731
            answer.set_result(self.until(f"reference {reference} cannot be scored", ask, bool))
            self.scores.append((answer, self.served_id(reference), [self.library.key(prompt, completion)]))
        for asked, reference_id, keys in self.scores:
            wait_for_futures([asked], PATIENCE)
            answer = asked.result() if asked.done() else None
            if answer is None or answer.status_code != 200:
                continue
            found = answer.json()
            version = self.library.versions.get(found["reference_id"])
            if version is None:
                self.wrong.append(f"answer: reference {found['reference_id']} is none of the versions, nor {reference_id}")
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

        def ended(page: dict[str, Any]) -> bool:
            return not page["counts"].get("queued") and not page["counts"].get("running")

        self.until("some jobs do not end", lambda: self.ask("GET", "/v1/jobs", params={"limit": 1}), ended)
        for told in self.jobs.values():
            answer = self.ask("GET", f"/v1/jobs/{told.id}")
            if answer is None or answer.status_code != 200:
                self.wrong.append(f"job {told.id}: it was acknowledged, and now: {said(answer)}")
                continue
            job = answer.json()
            if job["state"] not in FINAL_STATES:
                self.wrong.append(f"job {told.id}: it is {job['state']}")
            if told.cancelled_at is not None and job["state"] != "cancelled" and job["attempts"] > told.cancelled_at:
                self.wrong.append(f"job {told.id}: it was cancelled, and began again: {job['state']}")
            if job["state"] == "cancelled" and not told.may_be_cancelled:
                self.wrong.append(f"job {told.id}: nobody cancelled it")
            if job["state"] == "failed":
                allowed = {name for name in told.faults if name != "deaths" or told.deaths >= 3}
                reason = job["error"]
                if UNFORESEEN.search(reason) or not any(re.search(REASONS[name], reason) for name in allowed):
                    after = f"{told.faults or 'nothing'} ({told.deaths} deaths)"
                    self.wrong.append(f"job {told.id}: failed with {reason!r} after {after}")
            if job["state"] == "done":
                self.check_result(told)

    def check_result(self, told: Seen) -> None:
        answer = self.ask("GET", f"/v1/jobs/{told.id}/result")
        if answer is None or answer.status_code != 200:
            self.wrong.append(f"job {told.id}: it is done and has no result: {said(answer)}")
            return
        rows = pq.read_table(io.BytesIO(answer.content)).to_pylist()
        problems = {
            (dataset, kind): self.problem_of(told, rows, self.library.pairs(dataset, kind))
            for dataset in told.contents
            for kind in told.kinds
        }
        if all(problems.values()):
            self.wrong.append(f"job {told.id}: its result is of none of these (dataset, tokenizer): {problems}")

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
        self.until("the service is not ready", lambda: self.ask("GET", "/readyz"), bool)
        answer = self.ask("GET", "/v1/uploads")
        there = {entry["name"]: entry["sha256"] for entry in answer.json()["uploads"]} if answer is not None else {}
        for name, (contents, acknowledged) in self.uploads.items():
            if acknowledged and there.get(name) not in {self.library.digest(dataset) for dataset in contents}:
                self.wrong.append(f"upload {name}: {there.get(name)} is none of datasets {contents}")
        self.wrong += [f"/healthz: {entry}" for entry in self.world.missed]
        try:
            self.world.service.stop()
        except subprocess.TimeoutExpired:
            self.wrong.append("service: it does not end after SIGTERM")
        self.wrong += self.world.wrong_rows()


def said(answer: httpx.Response | None) -> str:
    """An answer in a few words."""
    if answer is None:
        return "no answer"
    return f"{answer.status_code}" + (f" {answer.text[:600]}" if answer.status_code >= 400 else "")


@pytest.mark.slow
@pytest.mark.timeout(300 + 120 * SEQUENCES)
def test_random_sequences_of_operations(warm_python, tmp_path_factory, pair_rows):
    class Bound(Sequence):
        library = Library(tmp_path_factory.mktemp("library"), pair_rows)
        make_world = staticmethod(lambda: World(tmp_path_factory.mktemp("world"), Bound.library, warm_python))

    drawn = settings(
        max_examples=SEQUENCES + 1,  # the first is the simplest of all
        stateful_step_count=STEPS,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(SEED)(Bound), settings=drawn)
