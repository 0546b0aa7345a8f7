"""Reading, computing and committing side by side: what fails in one of them, and what is kept."""

import signal
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.scoring.data.read import RowSource, batched
from reflogp.scoring.data.tokenize import TokenizedDataset
from reflogp.scoring.errors import DatasetError, EngineError
from reflogp.scoring.runs.pipeline import EngineScheduler
from reflogp.scoring.runs.score import score_dataset
from reflogp.scoring.torch_engine import TorchEngine
from reflogp.store import LogprobTable, Store, StoreUnavailableError, describe_reference, sequence_keys
from tests.conftest import largest_error, write_rows
from tests.scoring.test_engine import random_sequences
from tests.scoring.watching import Watching
from tests.service.serving import token_rows

ROWS = 60


@pytest.fixture
def run(reference_folder, tmp_path):
    """run(file, engine=None, **options) -> summary of a run into `run.store`, by an engine that makes many passes."""

    def run(file, engine=None, watcher=None, **options):
        made = engine or TorchEngine(str(reference_folder), "float32", token_budget=200)
        scheduler = EngineScheduler(lambda: made, **options)
        table = run.store.values_table(run.reference)
        return score_dataset(TokenizedDataset(RowSource(str(file)), lambda: None), table, scheduler, watcher=watcher)

    run.store, run.reference = Store(tmp_path / "store"), describe_reference(str(reference_folder), "float32")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("stage", ["read", "engine", "commit", "watcher", "engine and commit"])
def test_what_fails_ends_the_others_and_what_was_computed_is_kept(stage, at, run, reference_folder, tmp_path, monkeypatch):
    """The first error is the one that is raised."""
    file = write_rows(tmp_path / "rows.jsonl", token_rows(ROWS, seed=at))
    first, _, then = stage.partition(" and ")
    error = {
        "read": DatasetError("the disk is gone"),
        "engine": EngineError("CUDA error: an illegal memory access was encountered"),
        "commit": StoreUnavailableError("the disk is full"),
        "watcher": KeyboardInterrupt(),
    }[first]
    counts, append = Counter(), LogprobTable.append

    def count(event):
        counts[event] += 1
        if event == first and counts[event] == at:
            raise error
        if event == then and counts[first] >= at:
            raise StoreUnavailableError("the disk is full")

    def windows(source, size):
        for window in batched(source, 8):
            yield window
            count("read")

    class Engine(TorchEngine):
        def _launch(self, unit, temperature):
            count("engine")
            return super()._launch(unit, temperature)

    class Watched(Watching):
        def advance(self, sequences, tokens):
            super().advance(sequences, tokens)
            count("watcher")

    def failing_append(table, rows):
        count("commit")
        return append(table, rows)

    monkeypatch.setattr("reflogp.scoring.data.tokenize.batched", windows)
    monkeypatch.setattr(LogprobTable, "append", failing_append)
    watching, engine = Watched(), Engine(str(reference_folder), "float32", token_budget=200)
    with pytest.raises(type(error), match=str(error) or None):
        run(file, engine, watching, commit_sequences=4096 if then else 16)
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("reflogp-")}
    assert threads <= {"reflogp-pack"}, "a thread goes on"
    stored = run.store[run.reference.reference_id].totals()[1]
    assert "commit" in stage or stored >= watching.done, "what was told as scored is stored"
    monkeypatch.undo()
    again = run(file)
    assert (again.hits, again.scored) == (stored, 2 * ROWS - stored)


def test_a_stop_does_not_wait_for_a_pass_that_hangs(run, reference_folder, tmp_path, monkeypatch):
    """What was computed before it is committed."""
    monkeypatch.setattr("reflogp.scoring.runs.pipeline._LAST_SECONDS", 1.0)
    gate = threading.Event()

    class Hanging(TorchEngine):
        passes = 0

        def _launch(self, unit, temperature):
            self.passes += 1
            if self.passes == 5:
                threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
                gate.wait(60)
            return super()._launch(unit, temperature)

    watching, before = Watching(), signal.signal(signal.SIGINT, signal.default_int_handler)
    file = write_rows(tmp_path / "rows.jsonl", token_rows(ROWS, seed=7))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(file, Hanging(str(reference_folder), "float32", token_budget=200), watching)
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 30
    assert run.store[run.reference.reference_id].totals()[1] >= watching.done > 0
    gate.set()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_groups_that_come_and_do_not_come(seed, reference_folder):
    """Any groups, with pauses, too little memory, and passes that become short: each value comes once, and is right."""
    draw = np.random.default_rng(seed)
    sequences, groups = random_sequences(40, 90, 30, seed), []
    while sum(map(len, groups)) < len(sequences):
        at = sum(map(len, groups))
        groups.append(sequences[at : at + int(draw.choice([0, 0, 1, 5, 17]))])
    most = int(draw.integers(60, 200))

    class Small(TorchEngine):
        def _launch(self, unit, temperature):
            return None if unit.tokens > most else super()._launch(unit, temperature)

    engine = Small(str(reference_folder), "float32", token_budget=int(draw.choice([100, 500])))
    values, empty = {}, 0
    for number, landed in enumerate(engine.flow(iter(groups))):
        engine.pass_seconds = [None, 1e-9][number % 2]
        empty += not landed
        for place, logps in landed:
            assert place not in values
            values[place] = logps
    assert values.keys() == set(range(40)) and empty <= groups.count([])
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    assert largest_error([values[place] for place in range(40)], model, sequences) <= 1e-4


def test_the_snapshot_of_a_run_has_the_values_that_another_run_commits_meanwhile(run, tmp_path, monkeypatch):
    """The last rows are scored by another run after the first commit of this one, which then commits nothing more."""
    rows = token_rows(8, seed=6)

    def windows(source, size):
        for number, window in enumerate(batched(source, 4)):
            if number == 1 and len(source.files) and source.files[0].name == "rows.jsonl":
                while not len(run.store[run.reference].snapshot()):
                    time.sleep(0.05)
                run(write_rows(tmp_path / "last.jsonl", rows[4:]))
            yield window

    monkeypatch.setattr("reflogp.scoring.data.tokenize.batched", windows)
    file = write_rows(tmp_path / "rows.jsonl", [*rows[:4], *(rows[:1] * 40), *rows[4:]])
    monkeypatch.setattr("reflogp.scoring.runs.pipeline.COMMIT_SECONDS", 0.01)
    summary = run(file)
    assert (summary.scored, summary.sequences) == (8, 2 * 48), "this run has scored only its first rows"
    prompts = [row["prompt_ids"] for row in rows] * 2
    keys = sequence_keys(prompts, [row["chosen_ids"] for row in rows] + [row["rejected_ids"] for row in rows])
    assert (run.store[run.reference].snapshot(summary.snapshot).stored_lengths(keys) > 0).all()


def test_the_first_values_are_committed_sooner_than_later_ones(run, tmp_path, monkeypatch):
    monkeypatch.setattr("reflogp.scoring.runs.pipeline.FIRST_COMMIT_SECONDS", 0.0)
    watching = Watching()
    monkeypatch.setattr("reflogp.scoring.runs.pipeline.COMMIT_SECONDS", 600.0)
    run(write_rows(tmp_path / "rows.jsonl", token_rows(40, seed=7)), watcher=watching)
    assert watching.commits == 2  # after the first pass of many, and at the end
