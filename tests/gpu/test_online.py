"""Online requests beside a job, in a worker's own loop with a real engine on the device."""

from __future__ import annotations

import threading

import numpy as np

from reflogp.scoring.torch_engine import TorchEngine
from reflogp.service.worker.engine_loop import Answer, EngineLoop, Engines, OnlineRequest
from tests.gpu.device import DEVICE, NEEDS_GPU
from tools.families import build
from tools.fidelity import some_pairs

pytestmark = NEEDS_GPU

REFERENCE = "r"


def test_online_requests_beside_a_job_get_the_values_that_they_get_alone(tmp_path):
    build("Llama").save_pretrained(tmp_path)
    engine = TorchEngine(str(tmp_path), "float32", DEVICE, token_budget=600)
    job, online = some_pairs(200), [some_pairs(2, seed=seed) for seed in range(1, 11)]
    expected_job, expected_online = engine.score(job), [engine.score(sequences) for sequences in online]

    answers: dict[str, Answer] = {}
    job_at_answer: list[int] = []
    outcomes: dict[int, np.ndarray] = {}
    answered = threading.Event()

    def on_answer(answer: Answer) -> None:
        answers[answer.request.id] = answer
        job_at_answer.append(len(outcomes))
        if len(answers) == len(online):
            answered.set()

    engines = Engines(lambda _: engine, 1, None, lambda _: None, lambda _: None)
    loop = EngineLoop(engines, lambda _: None, on_answer, window_seconds=0.001)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        waiting = list(enumerate(online))
        for landed, _ in loop.flow(REFERENCE, iter([job]), lambda: None):
            outcomes.update(landed)
            if waiting:
                number, sequences = waiting.pop(0)
                loop.ask(OnlineRequest(str(number), REFERENCE, sequences, 1.0, False))
        assert not waiting, "the job has more passes than there are requests"
        assert answered.wait(60)
    finally:
        loop.close()
        thread.join(60)
    assert sorted(outcomes) == list(range(len(job)))
    assert min(job_at_answer) < len(job), "no request was answered before the job was done"
    for index, values in outcomes.items():
        assert np.abs(values - expected_job[index]).max() <= 1e-4
    for number, expected in enumerate(expected_online):
        answer = answers[str(number)]
        assert answer.error is None
        for ours, right in zip(answer.request.outcomes, expected, strict=True):
            assert np.abs(ours - right).max() <= 1e-4
