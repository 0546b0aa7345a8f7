"""The numbers of tokens that a run says it computed, against the distinct beginnings of its sequences."""

import threading

import pytest

from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.scoring.torch_engine.sequences import TokenCounts
from reflogp.service.worker.engine_loop import EngineLoop, OnlineRequest
from reflogp.service.worker.job_engine import JobEngine
from tests.scoring.test_engine import random_sequences
from tools.families import VOCAB, build


def dialogues():
    """Turns that share long beginnings of each other, and no short ones: each prompt begins with a token of its own."""
    drawn = random_sequences(40, vocab=VOCAB, longest=25, seed=5)
    sequences = []
    for first in range(8):
        prompt = [first, *range(20, 50)]
        for at, other in enumerate(drawn[5 * first : 5 * first + 5]):
            sequences.append(Sequence(prompt, [60 + at, *other.completion_ids]))
        longer = [*sequences[-1].ids().tolist(), 7]
        sequences += [Sequence(longer, [100, 3]), Sequence(longer, [101, 3, 4])]
    return sequences


def test_what_is_shared_counts_once(tmp_path):
    build("Llama").save_pretrained(tmp_path)
    sequences = dialogues()
    engine = TorchEngine(str(tmp_path), "float32", "cpu", token_budget=100_000)
    assert engine.self_check.path == "packed" and engine.token_counts() == TokenCounts()
    engine.score(sequences)
    found = engine.token_counts()
    ids = [tuple(sequence.ids()) for sequence in sequences]
    assert found.computed == len({one[:length] for one in ids for length in range(1, len(one) + 1)})
    assert found.scored == sum(map(len, sequences)) and found.sharing_gain > 2
    engine.score(sequences)
    assert engine.token_counts() - found == found, "a second time as much"


def test_nothing_is_shared_on_the_padded_path(tmp_path):
    build("Bloom (ALiBi)").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="padded path"):
        engine = TorchEngine(str(tmp_path), "float32", "cpu")
    sequences = dialogues()
    engine.score(sequences)
    tokens = sum(map(len, sequences))
    assert engine.token_counts() == TokenCounts(tokens, tokens)


def test_what_ran_out_of_memory_does_not_count(reference_folder, monkeypatch):
    sequences = random_sequences(40)
    right = TorchEngine(str(reference_folder), "float32", "cpu")
    right.score(sequences)
    engine = TorchEngine(str(reference_folder), "float32", "cpu")
    launch, failed = engine._launch, []

    def once(unit, temperature):
        if not failed:
            failed.append(unit)
            return None
        return launch(unit, temperature)

    monkeypatch.setattr(engine, "_launch", once)
    engine.score(sequences)
    assert failed and engine.token_counts().scored == right.token_counts().scored


class OneEngine:
    """A worker's engines, of which there is one."""

    def __init__(self, engine):
        self._engine = engine

    def get(self, reference_id):
        return self._engine

    peek = get

    def displaced_by(self, reference_id):
        return []


def test_a_job_counts_its_own_passes_and_not_those_of_online_requests(reference_folder):
    sequences, online = random_sequences(60), random_sequences(30, seed=1)
    alone = TorchEngine(str(reference_folder), "float32", "cpu", token_budget=400)
    alone.score(sequences)
    engine = TorchEngine(str(reference_folder), "float32", "cpu", token_budget=400)
    answered = threading.Event()
    loop = EngineLoop(OneEngine(engine), lambda ids: None, lambda answer: answered.set(), 0.0)
    job = JobEngine(loop, engine, "ref", (), {}, lambda keys: None, lambda: None)
    loop.ask(OnlineRequest("request", "ref", online, 1.0, False, None))
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        values = dict(pair for landed in job.flow(iter([sequences])) for pair in landed)
        assert answered.wait(30)
    finally:
        loop.close()
        thread.join()
    assert len(values) == 60
    assert job.token_counts() == alone.token_counts()
    assert engine.token_counts().computed > job.token_counts().computed
