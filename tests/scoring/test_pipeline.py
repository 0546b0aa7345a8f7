"""Reading, computing and committing side by side: what fails in one of them, and what is kept."""

import dataclasses
import itertools
import signal
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.scoring.data.read import RowSource, batched
from reflogp.scoring.data.tokenized import TokenizedDataset
from reflogp.scoring.errors import DatasetError, EngineError, OutOfMemoryError
from reflogp.scoring.runs.prefetch import Prefetch
from reflogp.scoring.runs.scheduler import Scheduler
from reflogp.scoring.runs.score import score_dataset
from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.scoring.torch_engine.flow import Prepared, Unit
from reflogp.scoring.torch_engine.sequences import TokenCounts
from reflogp.service.worker.engine_loop import EngineLoop, Engines, ModelUnloadedError, OnlineRequest
from reflogp.store import LogprobTable, Store, StoreUnavailableError, describe_reference, sequence_keys
from tests.conftest import plain_token_logps, write_rows
from tests.scoring.watching import Watching
from tests.service.serving import token_rows

ROWS = 60


def random_sequences(count: int, seed: int = 0) -> list[Sequence]:
    draw = np.random.default_rng(seed)
    return [Sequence(*(draw.integers(1, 90, int(draw.integers(1, 30))) for _ in range(2))) for _ in range(count)]


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("reflogp-")}


class Failing(TokenizedDataset):
    """A dataset whose reading fails behind its first windows."""

    at = None

    def __iter__(self):
        for number, window in enumerate(super().__iter__()):
            if number == self.at:
                raise DatasetError("the disk is gone")
            yield window


class Slow(TorchEngine):
    """An engine that fails, or is interrupted, at a pass."""

    at, error = None, None

    def _launch(self, unit, temperature):
        self.at = None if self.at is None else self.at - 1
        if self.at == 0:
            raise self.error
        return super()._launch(unit, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("stage", ["read", "engine", "commit", "watcher"])
def test_what_fails_ends_the_others_and_what_was_computed_is_kept(stage, at, reference_folder, tmp_path, monkeypatch):
    file = write_rows(tmp_path / "rows.jsonl", token_rows(ROWS, seed=at))
    reference = describe_reference(str(reference_folder), "float32")
    monkeypatch.setattr("reflogp.scoring.data.tokenize.batched", lambda source, size, own=batched: own(source, 8))
    engine = Slow(str(reference_folder), "float32", token_budget=200)
    appends = []
    error = {
        "read": DatasetError("the disk is gone"),
        "engine": EngineError("CUDA error: an illegal memory access was encountered"),
        "commit": StoreUnavailableError("the disk is full"),
        "watcher": KeyboardInterrupt(),
    }[stage]
    append = LogprobTable.append

    def failing_append(table, rows):
        appends.append(len(rows))
        if stage == "commit" and len(appends) == at:
            raise error
        return append(table, rows)

    monkeypatch.setattr(LogprobTable, "append", failing_append)
    dataset = Failing(RowSource(str(file)), lambda: None)
    watching = Watching()
    if stage == "read":
        dataset.at = at
    if stage == "engine":
        engine.at, engine.error = at, error
    if stage == "watcher":

        def interrupt(sequences, tokens, before=watching.advance):
            before(sequences, tokens)
            if watching.done >= 10 * at:
                raise error

        watching.advance = interrupt
    store = Store(tmp_path / "store")
    scorer = Scheduler(lambda: engine, commit_sequences=16)
    with pytest.raises(type(error), match=str(error) or None):
        score_dataset(dataset, store, reference, scorer, watcher=watching)
    assert not {name for name in names() if name != "reflogp-pack"}, "a thread goes on"
    stored = store[reference.reference_id].totals()[1]
    if stage != "commit":
        assert stored >= watching.done, "what was told as scored is stored"
    monkeypatch.setattr(LogprobTable, "append", append)
    whole = TokenizedDataset(RowSource(str(file)), lambda: None)
    again = score_dataset(whole, store, reference, Scheduler(lambda: TorchEngine(str(reference_folder), "float32")))
    assert (again.hits, again.scored) == (stored, 2 * ROWS - stored)


def test_the_first_error_is_the_one_that_is_raised(reference_folder, tmp_path, monkeypatch):
    """An engine that fails, while the commit of what it computed before fails too."""
    file = write_rows(tmp_path / "rows.jsonl", token_rows(ROWS, seed=1))
    engine = Slow(str(reference_folder), "float32", token_budget=200)
    engine.at, engine.error = 4, EngineError("the device is lost")

    def append(table, rows):
        raise StoreUnavailableError("the disk is full")

    monkeypatch.setattr(LogprobTable, "append", append)
    dataset = TokenizedDataset(RowSource(str(file)), lambda: None)
    with pytest.raises(EngineError, match="the device is lost"):
        score_dataset(
            dataset,
            Store(tmp_path / "store"),
            describe_reference(str(reference_folder), "float32"),
            Scheduler(lambda: engine),
        )


def test_a_stop_does_not_wait_for_a_pass_that_hangs(reference_folder, tmp_path, monkeypatch):
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

    watching, engine = Watching(), Hanging(str(reference_folder), "float32", token_budget=200)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    file = write_rows(tmp_path / "rows.jsonl", token_rows(ROWS, seed=7))
    reference, store = describe_reference(str(reference_folder), "float32"), Store(tmp_path / "store")
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        dataset = TokenizedDataset(RowSource(str(file)), lambda: None)
        score_dataset(dataset, store, reference, Scheduler(lambda: engine), watcher=watching)
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 30
    assert store[reference.reference_id].totals()[1] >= watching.done > 0
    gate.set()


def test_a_dataset_is_not_read_further_than_the_queues_hold(reference_folder, tmp_path, monkeypatch):
    """An engine that stands still stops the reading; when it goes on, so does the reading."""
    monkeypatch.setattr("reflogp.scoring.data.tokenize.batched", lambda source, size, own=batched: own(source, 8))
    monkeypatch.setattr("reflogp.scoring.runs.scheduler.COMMIT_SEQUENCES", 16)
    file = write_rows(tmp_path / "rows.jsonl", token_rows(400, seed=3))
    read, gate = [], threading.Event()

    class Counted(TokenizedDataset):
        def __iter__(self):
            for window in super().__iter__():
                read.append(window.last_row + 1)
                yield window

    class Waiting(TorchEngine):
        def _launch(self, unit, temperature):
            gate.wait(60)
            return super()._launch(unit, temperature)

    reference = describe_reference(str(reference_folder), "float32")
    engine = Waiting(str(reference_folder), "float32", token_budget=2000)
    found = []
    run = threading.Thread(
        target=lambda: found.append(
            score_dataset(
                Counted(RowSource(str(file)), lambda: None), Store(tmp_path / "store"), reference, Scheduler(lambda: engine)
            )
        )
    )
    run.start()
    before = -1
    while not read or read[-1] != before:
        before = read[-1] if read else -1
        time.sleep(1)
    gate.set()
    run.join(120)
    # two windows wait, one is being made, one is at hand; two groups wait for the engine or are with it, of 16 sequences
    assert before <= 8 * (2 + 1 + 1 + 2 + 2)
    assert found[0].scored == 800


def groups_with_gaps(sequences, sizes):
    at = 0
    for size in sizes:
        yield sequences[at : at + size]
        at += size


@pytest.fixture(scope="module")
def plain(reference_folder):
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    return lambda sequence: plain_token_logps(model, list(sequence.prompt_ids), list(sequence.completion_ids))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_groups_that_come_and_do_not_come(seed, reference_folder, plain):
    """Any groups, with pauses, too little memory, and passes that become short: each value comes once, and is right."""
    draw = np.random.default_rng(seed)
    sequences = random_sequences(40, seed)
    sizes = []
    while sum(sizes) < len(sequences):
        sizes.append(min(int(draw.choice([0, 0, 1, 5, 17])), len(sequences) - sum(sizes)))
    most = int(draw.integers(60, 200))

    class Small(TorchEngine):
        def _launch(self, unit, temperature):
            return None if unit.tokens > most else super()._launch(unit, temperature)

    engine = Small(str(reference_folder), "float32", token_budget=int(draw.choice([100, 500])))
    begun, values, empty = [], {}, 0
    for number, landed in enumerate(engine.flow(groups_with_gaps(sequences, sizes), before=begun.extend)):
        engine.pass_seconds = [None, 1e-9][number % 2]
        empty += not landed
        for place, logps in landed:
            assert place not in values and place in begun
            values[place] = logps
    assert values.keys() == set(range(40)) and empty <= sizes.count(0)
    for place, logps in values.items():
        assert np.abs(logps - plain(sequences[place])).max() <= 1e-4


def test_passes_are_short_while_they_shall_be(reference_folder):
    engine = TorchEngine(str(reference_folder), "float32", token_budget=4000)
    sequences = random_sequences(600)

    def passes(seconds):
        engine.pass_seconds = seconds
        return [sum(len(sequences[at]) for at, _ in landed) for landed in engine.passes(sequences)]

    long = passes(None)
    short = passes(1e-9)  # so short that the least counts
    assert max(long) > 3000 and max(short) <= 1024
    assert sum(long) == sum(short)


def test_what_sequences_were_scored_with_is_let_go(reference_folder, tmp_path):
    """A flow holds the sequences of groups that are under way, not those that are done."""
    engine = TorchEngine(str(reference_folder), "float32", token_budget=500)
    waiting = {}
    units = engine._units_of_groups
    engine._units_of_groups = lambda groups, own: units(groups, waiting.setdefault("now", own))
    most = 0
    for _ in engine.flow(random_sequences(20, seed) for seed in range(30)):
        most = max(most, len(waiting["now"]))
    assert most <= 60 and not waiting["now"]


def test_a_row_that_fails_is_counted_once_however_often_it_comes(reference_folder, tmp_path, monkeypatch):
    """Also where it comes again after it has failed: in a later window."""
    monkeypatch.setattr("reflogp.scoring.data.tokenize.batched", lambda source, size, own=batched: own(source, 4))
    rows = token_rows(12, seed=5)
    for at in (1, 6, 11):
        rows[at] = {**rows[1], "chosen_ids": [3, 100_000]}
    watching = Watching()
    dataset = TokenizedDataset(RowSource(str(write_rows(tmp_path / "rows.jsonl", rows))), lambda: None)
    summary = score_dataset(
        dataset,
        Store(tmp_path / "store"),
        describe_reference(str(reference_folder), "float32"),
        Scheduler(lambda: TorchEngine(str(reference_folder), "float32")),
        watcher=watching,
    )
    assert (summary.failed, summary.duplicates, summary.scored, summary.bad_rows) == (1, 4, 19, 3)
    assert set(watching.bad) == {1, 6, 11} and all("vocabulary" in problem for problem in watching.bad.values())
    assert watching.done == summary.sequences


def test_the_first_values_are_committed_sooner_than_later_ones(reference_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("reflogp.scoring.runs.pipeline.FIRST_COMMIT_SECONDS", 0.0)
    watching = Watching()
    dataset = TokenizedDataset(RowSource(str(write_rows(tmp_path / "rows.jsonl", token_rows(40, seed=7)))), lambda: None)
    score_dataset(
        dataset,
        Store(tmp_path / "store"),
        describe_reference(str(reference_folder), "float32"),
        Scheduler(lambda: TorchEngine(str(reference_folder), "float32", token_budget=200), commit_seconds=600),
        watcher=watching,
    )
    assert watching.commits == 2  # after the first pass of many, and at the end


def test_the_snapshot_of_a_run_has_the_values_that_another_run_commits_meanwhile(reference_folder, tmp_path, monkeypatch):
    """The last rows are scored by another run after the first commit of this one, which then commits nothing more."""
    rows = token_rows(8, seed=6)
    store, reference = Store(tmp_path / "store"), describe_reference(str(reference_folder), "float32")

    def run(name, rows):
        dataset = TokenizedDataset(RowSource(str(write_rows(tmp_path / name, rows))), lambda: None)
        scorer = Scheduler(lambda: TorchEngine(str(reference_folder), "float32"), commit_seconds=0.01)
        return score_dataset(dataset, store, reference, scorer)

    def windows(source, size):
        for number, window in enumerate(batched(source, 4)):
            if number == 1 and len(source.files) and source.files[0].name == "rows.jsonl":
                while not len(store[reference].snapshot()):
                    time.sleep(0.05)
                run("last.jsonl", rows[4:])
            yield window

    monkeypatch.setattr("reflogp.scoring.data.tokenize.batched", windows)
    summary = run("rows.jsonl", [*rows[:4], *(rows[:1] * 40), *rows[4:]])
    assert (summary.scored, summary.sequences) == (8, 2 * 48), "this run has scored only its first rows"
    found = store[reference].snapshot(summary.snapshot)
    prompts = [row["prompt_ids"] for row in rows] * 2
    keys = sequence_keys(prompts, [row["chosen_ids"] for row in rows] + [row["rejected_ids"] for row in rows])
    assert (found.stored_lengths(keys) > 0).all()


class Faulty(TorchEngine):
    """A device that fails while a pass is computed: whatever is asked of it next says so."""

    launches = 0

    class Mark:
        def has_passed(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …")

        wait = seconds_since = has_passed

    def _launch(self, unit, temperature):
        self.launches += 1
        flying = super()._launch(unit, temperature)
        return dataclasses.replace(flying, landed=self.Mark()) if self.launches == 3 else flying


def test_a_device_that_is_lost_in_the_middle_is_one_sentence(reference_folder):
    engine = Faulty(str(reference_folder), "float32", token_budget=300)
    with pytest.raises(EngineError, match=r"CUDA error: an illegal memory access was encountered$"):
        list(engine.stream(random_sequences(60)))


def test_a_job_whose_model_makes_room_for_another_goes_on_later(reference_folder):
    """Two models are allowed, and the second finds no memory beside the first."""
    answers = []

    def make(name):
        if name == "b" and engines.peek("a") is not None:
            raise OutOfMemoryError("no room")
        return TorchEngine(str(reference_folder), "float32", token_budget=200)

    engines = Engines(make, 2, None, lambda ids: None, lambda name: None)
    loop = EngineLoop(engines, lambda ids: None, answers.append, 0.0)
    thread = threading.Thread(target=loop.run)
    thread.start()
    groups = itertools.chain([random_sequences(40)], itertools.repeat([]))
    with pytest.raises(ModelUnloadedError):
        for number, _ in enumerate(loop.flow("a", groups, lambda numbers: None, lambda: None)):
            if number == 2:
                loop.ask(OnlineRequest("1", "b", random_sequences(2), 1.0, False, None))
    loop.close()
    thread.join(60)
    assert [answer.error for answer in answers] == [None] and engines.peek("a") is None


def test_items_are_made_ahead_and_no_further():
    made = []

    def items():
        for number in range(20):
            made.append(number)
            yield number

    with closing(Prefetch(items(), 3, "reflogp-test")) as ahead:
        iterator = ahead.items(lambda: None)
        assert next(iterator) == 0
        time.sleep(0.3)
        assert made == [0, 1, 2, 3, 4]
        assert list(iterator) == list(range(1, 20))
    assert "reflogp-test" not in names()


def test_what_goes_wrong_ahead_is_raised_behind_what_was_made():
    def items():
        yield 1
        raise DatasetError("broken")

    with closing(Prefetch(items(), 3, "reflogp-test")) as ahead:
        iterator = ahead.items(lambda: None)
        assert next(iterator) == 1
        with pytest.raises(DatasetError, match="broken"):
            next(iterator)


def test_an_iteration_that_is_left_is_closed_in_its_own_thread():
    closed = []

    def items():
        try:
            while True:
                yield 1
        finally:
            closed.append(threading.current_thread().name)

    with closing(Prefetch(items(), 2, "reflogp-test")) as ahead:
        assert next(ahead.items(lambda: None)) == 1
    assert closed == ["reflogp-test"]


@pytest.mark.parametrize("comes", [True, False])
def test_while_a_pass_is_in_flight_and_nothing_comes_the_threads_sleep(comes):
    turns = 0
    unit = Unit([], (), 0, TokenCounts())
    stop = time.monotonic() + 0.3

    def units():
        nonlocal turns
        while not comes or time.monotonic() < stop:
            turns += 1
            yield None
        yield unit

    flying = SimpleNamespace(landed=SimpleNamespace(has_passed=lambda: not comes and time.monotonic() > stop))
    with Prepared(units()) as prepared:
        assert prepared.take(flying) is (unit if comes else None)
        assert time.monotonic() >= stop
    assert 10 < turns < 500
